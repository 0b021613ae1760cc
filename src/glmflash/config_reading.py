"""From the keys of a config.json to the fields of the config classes, and back.

Knows every key, what is derived from what, and which values contradict each other. Nothing that
decides shapes or arithmetic has a default: the released model differs from the library's class
defaults. Returns plain dictionaries; the classes are in `glmflash.config`.
"""

from __future__ import annotations

from typing import Any

from glmflash.config_values import Section

DTYPES = ("bfloat16", "float32", "float16")
LINEAR, SPARSE = "linear_attention", "sparse_attention"
LAYER_KINDS = {
    LINEAR: LINEAR,
    "deepseek_sparse_attention": SPARSE,  # the release
    "indexed_attention": SPARSE,  # files written by transformers 5.24
    "full_attention": SPARSE,
    SPARSE: SPARSE,
}
MOST_LAYERS, MOST_EXPERTS = 10_000, 100_000  # a wrong number must not ask for endless tables

_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim",
    "index_n_heads", "index_head_dim", "index_topk", "n_shared_experts", "num_experts_per_tok",
    "n_group", "topk_group", "max_position_embeddings",
)  # fmt: skip

# Built into the arithmetic: a file may leave them out, but may not ask for anything else.
_CONSTANTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_router_dtype": "float32",
    "moe_layer_freq": 1,
}
_TEXT_CONSTANTS = {
    "qk_rope_head_dim": 0,
    "mla_use_nope": True,
    "index_kpool_compress": True,
    "mhc": True,
}
# linear_attn_config key of the release: key that transformers writes, and our field
_LINEAR_KEYS = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}


def text_values(s: Section, top: Section) -> dict[str, Any]:
    """The fields of TextConfig. s: the text keys; top: the whole file (the same if it is flat)."""
    found = _common_values(s, top)
    layers = found["num_hidden_layers"]
    found["layer_types"] = s.kinds("layer_types", layers, LAYER_KINDS)
    found["index_kpool"] = s.integer("index_kpool")
    found["index_kpool_always_select_tail"] = s.flag("index_kpool_always_select_tail")
    found["hc_mult"] = s.integer("hc_mult")
    found["hc_sinkhorn_iters"] = s.integer("hc_sinkhorn_iters")
    found["hc_eps"] = s.number("hc_eps")
    found["swiglu_limit"] = s.number("swiglu_limit")
    found |= _linear_values(s, found["layer_types"])
    s.integer("qk_rope_head_dim", 0, 0)
    for key, value in _TEXT_CONSTANTS.items():
        s.constant(key, value)
    s.constant("qk_head_dim", found["qk_nope_head_dim"])
    pool = found["index_kpool"]
    s.require(found["index_topk"] % pool == 0, "index_topk", f"a multiple of index_kpool ({pool})")
    sparse = [i for i, kind in enumerate(found["layer_types"]) if kind == SPARSE]
    if sparse and found["indexer_types"][sparse[0]] == "shared":
        raise s.contradiction(
            f"indexer_types[{sparse[0]}] is 'shared'",
            "expected 'full' at the first sparse layer: no earlier one has an index to share",
        )
    return found


def moe_dsa_values(s: Section) -> dict[str, Any]:
    """The fields of GlmMoeDsaConfig, without quantization and model_type."""
    found = _common_values(s, s)
    found["qk_rope_head_dim"] = s.integer("qk_rope_head_dim")
    s.constant("qk_head_dim", found["qk_nope_head_dim"] + found["qk_rope_head_dim"])
    rope = s.section("rope_parameters") if s.has("rope_parameters") else s
    found["rope_theta"] = rope.number("rope_theta")
    for key, low in (("index_topk_freq", 1), ("index_skip_topk_offset", 0)):
        found[key] = s.integer(key, low) if s.has(key) else None
    frequency, offset = found["index_topk_freq"], found["index_skip_topk_offset"]
    if frequency is not None and offset is not None:
        schedule = tuple(
            "full" if max(i - offset + 1, 0) % frequency == 0 else "shared"
            for i in range(found["num_hidden_layers"])
        )
        s.require(
            found["indexer_types"] == schedule,
            "indexer_types",
            f"the schedule of index_topk_freq {frequency}, index_skip_topk_offset {offset}",
        )
    return found


def _common_values(s: Section, top: Section) -> dict[str, Any]:
    """Keys that both models have, and the constants of their common arithmetic."""
    found: dict[str, Any] = {key: s.integer(key) for key in _COUNTS}
    layers = found["num_hidden_layers"] = s.integer("num_hidden_layers", high=MOST_LAYERS)
    found["n_routed_experts"] = s.integer("n_routed_experts", high=MOST_EXPERTS // layers)
    for key, kinds in (
        ("indexer_types", ("full", "shared")),
        ("mlp_layer_types", ("dense", "sparse")),
    ):
        found[key] = s.kinds(key, layers, {kind: kind for kind in kinds})
    found["norm_topk_prob"] = s.flag("norm_topk_prob")
    found["routed_scaling_factor"] = s.number("routed_scaling_factor")
    found["rms_norm_eps"] = s.number("rms_norm_eps")
    found |= _mtp_values(s)
    found["dtype"] = _dtype(s, top)
    found["eos_token_id"] = s.ids("eos_token_id", found["vocab_size"])
    padding = s.ids("pad_token_id", found["vocab_size"])
    s.require(len(padding) <= 1, "pad_token_id", "one token id or null")
    found["pad_token_id"] = padding[0] if padding else None
    found["tie_word_embeddings"] = s.flag("tie_word_embeddings")
    if top.has("tie_word_embeddings"):
        tied = found["tie_word_embeddings"]
        agree = top.flag("tie_word_embeddings") == tied
        top.require(agree, "tie_word_embeddings", f"{s.prefix}tie_word_embeddings ({tied})")
    for key, value in _CONSTANTS.items():
        s.constant(key, value)
    heads = found["num_attention_heads"]
    if s.has("num_key_value_heads"):  # transformers takes absent or null as "the same"
        same = s.integer("num_key_value_heads") == heads
        s.require(same, "num_key_value_heads", f"num_attention_heads ({heads})")
    if s.has("first_k_dense_replace"):
        dense = s.integer("first_k_dense_replace", 0)
        expected = tuple("dense" if i < dense else "sparse" for i in range(layers))
        s.require(
            found["mlp_layer_types"] == expected,
            "first_k_dense_replace",
            "the number of leading 'dense' entries of mlp_layer_types, with 'sparse' after them",
        )
    _check_routing(s, found)
    return found


def _mtp_values(s: Section) -> dict[str, Any]:
    """Absent from files of transformers, which knows no MTP layer: then there is none.

    Without the second key every draft selects for itself; sharing the index set only saves work.
    """
    layers, share = "num_nextn_predict_layers", "index_share_for_mtp_iteration"
    return {
        layers: s.integer(layers, 0, 1) if s.has(layers) else 0,
        share: s.flag(share) if s.has(share) else False,
    }


def _dtype(s: Section, top: Section) -> str:
    """Of the text part, else of the whole file, under its new or its old name."""
    for section in (s, top):
        for key in ("dtype", "torch_dtype"):
            if section.has(key):
                return section.choice(key, DTYPES)
    return s.choice("dtype", DTYPES)


def _check_routing(s: Section, found: dict[str, Any]) -> None:
    experts, groups, kept = found["n_routed_experts"], found["n_group"], found["topk_group"]
    s.require(experts % groups == 0, "n_group", f"a divisor of n_routed_experts ({experts})")
    size = experts // groups
    # a group is ranked by the sum of its two best experts
    s.require(groups == 1 or size >= 2, "n_group", f"at least 2 of {experts} experts per group")
    s.require(kept <= groups, "topk_group", f"at most n_group ({groups})")
    s.require(
        found["num_experts_per_tok"] <= kept * size,
        "num_experts_per_tok",
        f"at most the {kept * size} experts of topk_group ({kept}) groups",
    )


def _linear_values(s: Section, kinds: tuple[str, ...]) -> dict[str, Any]:
    """KDA sizes: from linear_attn_config, from the flat linear_* keys, or from both if equal."""
    found: dict[str, Any] = {}
    nested = s.section("linear_attn_config") if s.has("linear_attn_config") else None
    for inner, outer in _LINEAR_KEYS.items():
        sources = []
        if nested and inner in nested.values:
            sources.append((nested, inner))
        if outer in s.values:
            sources.append((s, outer))
        values = [_linear_value(section, key) for section, key in sources or [(s, outer)]]
        s.require(len(set(values)) == 1, outer, f"linear_attn_config.{inner} ({values[0]})")
        found[outer] = values[0]
    for key, kind in (("kda_layers", LINEAR), ("full_attn_layers", SPARSE)):
        if nested and nested.has(key):
            expected = [i for i, found_kind in enumerate(kinds) if found_kind == kind]
            nested.require(
                nested.values[key] == expected, key, "the 0-based indices that layer_types gives"
            )
    return found


def _linear_value(s: Section, key: str) -> int | float:
    if key not in ("gate_lower_bound", "linear_lower_bound"):
        return s.integer(key)
    if key == "gate_lower_bound" and s.values[key] is None and s.values.get("safe_gate", True):
        return -5.0  # what the reference makes of a null bound with a safe gate
    return s.number(key, "a finite number < 0 (a gate without bound is not implemented)", sign=-1)


def vision_values(s: Section, text_hidden_size: int) -> dict[str, Any]:
    """The fields of VisionConfig."""
    keys = (
        "hidden_size", "num_heads", "intermediate_size", "out_hidden_size",
        "projection_intermediate_size", "in_channels", "spatial_merge_size",
    )  # fmt: skip
    s.constant("model_type", "glm5_next_vision")
    found: dict[str, Any] = {key: s.integer(key) for key in keys}
    found["depth"] = s.integer("depth", high=MOST_LAYERS)
    for key in ("image_size", "patch_size", "temporal_patch_size"):
        found[key] = _square(s, key)
    found["rms_norm_eps"] = s.number("rms_norm_eps")
    found["swiglu_limit"] = s.number("swiglu_limit")
    s.require(s.flag("attention_bias"), "attention_bias", "true (nothing else is implemented)")
    s.constant("hidden_act", "silu")
    # The release has no rope key; 10,000 is the base it was made with (specification of the tower).
    found["rope_theta"] = 10000.0
    if s.has("rope_parameters"):
        rope = s.section("rope_parameters")
        found["rope_theta"] = rope.number("rope_theta")
        if rope.has("rope_type"):
            rope.choice("rope_type", ("axial", "default"))
    s.require(
        found["out_hidden_size"] == text_hidden_size,
        "out_hidden_size",
        f"text_config.hidden_size ({text_hidden_size})",
    )
    s.require(
        found["hidden_size"] % (4 * found["num_heads"]) == 0,  # rows and columns, rotated in pairs
        "num_heads",
        f"heads whose size is a multiple of 4 (hidden_size is {found['hidden_size']})",
    )
    return found


def _square(s: Section, key: str) -> int:
    """One side of a size that may be written as a list of equal sides."""
    value = s.values.get(key)
    if isinstance(value, list):
        s.require(len(value) == 2 and value[0] == value[1], key, "two equal sides")
        return Section({key: value[0]}, s.where, s.prefix).integer(key)
    return s.integer(key)


def token_id_values(top: Section, vocabulary: int) -> dict[str, int]:
    """The fields of TokenIds."""
    names = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    found = {name: top.integer(f"{name}_token_id", 0, vocabulary - 1) for name in names}
    for i, name in enumerate(names):
        earlier = [other for other in names[:i] if found[other] == found[name]]
        if earlier:
            raise top.wrong(f"{name}_token_id", f"another id than {earlier[0]}_token_id")
    return found


def quantization_values(s: Section) -> dict[str, Any]:
    """The fields of QuantizationConfig: FP8 e4m3 in blocks of 128 x 128, or nothing."""
    s.choice("quant_method", ("fp8",))
    s.constant("fmt", "e4m3")  # transformers leaves it out: the only format it writes
    s.constant("activation_scheme", "dynamic")
    s.require(s.values.get("weight_block_size") == [128, 128], "weight_block_size", "[128, 128]")
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": (128, 128),
        "modules_to_not_convert": s.strings("modules_to_not_convert"),
    }


def text_file_values(fields: dict[str, Any]) -> dict[str, Any]:
    """The text keys as the release writes them. fields: those of TextConfig."""
    out = {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}
    kinds = out["layer_types"]
    linear = {inner: out.pop(outer) for inner, outer in _LINEAR_KEYS.items()}
    linear["kda_layers"] = [i for i, kind in enumerate(kinds) if kind == LINEAR]
    linear["full_attn_layers"] = [i for i, kind in enumerate(kinds) if kind == SPARSE]
    out["layer_types"] = [LINEAR if k == LINEAR else "deepseek_sparse_attention" for k in kinds]
    constants = {**_CONSTANTS, **_TEXT_CONSTANTS}
    constants.pop("moe_layer_freq")  # of GLM-5.3 only
    return {
        **out,
        **constants,
        "head_dim": 0,
        "qk_head_dim": out["qk_nope_head_dim"],
        "num_key_value_heads": out["num_attention_heads"],
        "linear_attn_config": linear,
    }


def vision_file_values(fields: dict[str, Any]) -> dict[str, Any]:
    """The vision keys as transformers writes them. fields: those of VisionConfig."""
    out = dict(fields)
    rope = {"rope_theta": out.pop("rope_theta"), "rope_type": "axial"}
    return {
        **out,
        "attention_bias": True,
        "hidden_act": "silu",
        "model_type": "glm5_next_vision",
        "rope_parameters": rope,
    }
