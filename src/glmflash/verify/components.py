"""Which part of the model a tensor belongs to, by its name alone.

Knows the naming of both models. For files without a config it also finds out which layers are KDA,
sparse attention or the MTP layer, from the names that only one kind has.
"""

from __future__ import annotations

from collections.abc import Iterable

from glmflash.config import GlmMoeDsaConfig, ModelConfig

OTHER = "other"  # not a name of either model
_ONLY_KDA = ("A_log", "dt_bias", "o_norm", "b_proj", "f_a_proj", "g_a_proj", "q_conv1d", "q_proj")
_ONLY_MLA = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "indexer", "q_a_layernorm")
_ONLY_MTP = ("eh_proj", "enorm", "hnorm", "shared_head")
_IN_LAYER = (  # beginnings of names below a layer; "mlp.gate." must not catch "mlp.gate_proj"
    ("mlp.experts.", "routed_experts"),
    ("mlp.shared_experts.", "shared_experts"),
    ("mlp.gate.", "router"),
    ("mlp.", "dense_mlp"),
    ("self_attn.indexer.", "indexer"),
    ("hc_", "mhc"),
    ("input_layernorm.", "norms"),
    ("post_attention_layernorm.", "norms"),
)
_OUTSIDE = {
    "lm_head": "head",
    "model.embed_tokens": "embedding",
    "model.language_model.embed_tokens": "embedding",
    "model.norm": "norms",
    "model.language_model.norm": "norms",
}


def layer_kinds(config: ModelConfig | GlmMoeDsaConfig) -> dict[str, str]:
    """ "kda", "mla" or "mtp" for the index of each layer, as it stands in names."""
    text = config.text if isinstance(config, ModelConfig) else config
    kinds = {str(i): "mla" for i in range(text.num_hidden_layers)}
    if isinstance(config, ModelConfig):
        for i, kind in enumerate(config.text.layer_types):
            if kind == "linear_attention":
                kinds[str(i)] = "kda"
    first = text.num_hidden_layers
    return kinds | {str(first + i): "mtp" for i in range(text.num_nextn_predict_layers)}


def guess_layer_kinds(names: Iterable[str]) -> dict[str, str]:
    """The same from names; a layer of which too little is there to tell is left out."""
    kinds: dict[str, str] = {}
    for name in names:
        index, rest = _in_layer(name)
        part = rest.removeprefix("self_attn.").partition(".")[0]
        if part in _ONLY_MTP:
            kinds[index] = "mtp"
        elif rest.startswith("self_attn.") and part in _ONLY_KDA:
            kinds.setdefault(index, "kda")
        elif rest.startswith("self_attn.") and part in _ONLY_MLA:
            kinds.setdefault(index, "mla")
    return kinds


def component(name: str, kinds: dict[str, str]) -> str:
    """One of the table's components; "attention" where the layer's kind is not known."""
    index, rest = _in_layer(name)
    if not rest:
        if name.startswith("model.visual."):
            return "vision"
        return _OUTSIDE.get(name.rpartition(".")[0], OTHER)
    if kinds.get(index) == "mtp":
        return "mtp"
    for beginning, found in _IN_LAYER:
        if rest.startswith(beginning):
            return found
    return kinds.get(index, "attention") if rest.startswith("self_attn.") else OTHER


def _in_layer(name: str) -> tuple[str, str]:
    """Index of the decoder layer and the name below it; two empty strings outside of layers."""
    if name.startswith("model.visual."):
        return "", ""
    before, found, after = name.partition("layers.")
    if not found or before not in ("model.", "model.language_model."):
        return "", ""
    index, _, rest = after.partition(".")
    return (index, rest) if index.isdecimal() else ("", "")
