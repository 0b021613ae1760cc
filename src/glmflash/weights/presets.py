"""Models to make random checkpoints of: the release, a tiny one, one for benchmarks; and slices.

Knows their configs, how an override keeps the rest of a config consistent, and what config.json
says of each way to store the tensors. Writes no file and needs no tensor library.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, cast

from glmflash.config import (
    ModelConfig,
    QuantizationConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
    shipped,
)
from glmflash.config_reading import MOST_LAYERS
from glmflash.config_values import LARGEST
from glmflash.errors import ConfigError
from glmflash.weights.synthetic_tokenizer import SMALLEST, added_token_ids
from glmflash.weights.table import F32, FP8, SCALE_SUFFIX, Storage, TensorSpec, expected_tensors

NAMES = ("glm-5.3-flash", "tiny", "bench")
STORAGES: tuple[Storage, ...] = ("fp8", "bf16", "fp32")
SPARE_ROWS = 24  # of the embedding, beyond the tokenizer: ids that must never come out
SPARSE_EVERY = 4  # three KDA layers, then one of sparse attention

# Names on the released list of unquantised modules that are no tensors.
_GENERIC_NAMES = (
    "attn_mha", "attn_mqa", "dt_bias", "hyper_connection", "lm_head", "mapping_proj",
    "model.embed_tokens", "model.norm", "model.visual", "router", "visual", "weights_proj",
)  # fmt: skip
_FUSED_NAMES = ("qkv_proj", "fused_qkvbfg_a_proj")  # in every KDA layer


@dataclass(frozen=True)
class Overrides:
    """What may differ from the model that a preset is like; None leaves it as it is.

    layers: decoder layers, the MTP layer not counted. experts: routed ones per layer. hidden: width
    of the residual streams. vocab: rows of the embedding. index_topk: tokens that sparse attention
    looks at.
    """

    layers: int | None = None
    experts: int | None = None
    hidden: int | None = None
    vocab: int | None = None
    index_topk: int | None = None
    vision: bool = True
    mtp: bool = True


@dataclass(frozen=True)
class Preset:
    """A model to write. storage: how, unless asked otherwise.

    float32: endings of names that are stored as fp32 although the release has them in bf16.
    """

    config: ModelConfig
    storage: Storage
    float32: tuple[str, ...] = ()

    def tensors(self, storage: Storage) -> dict[str, TensorSpec]:
        """Every tensor to write, by name."""
        return {
            name: spec._replace(dtype=F32) if name.endswith(self.float32) else spec
            for name, spec in expected_tensors(self.config, storage).items()
        }

    def stored_config(self, storage: Storage) -> ModelConfig:
        """The config with what the file says of the storage: dtype and quantisation."""
        quantization = None
        if storage == "fp8":
            names = unquantized_names(self.config)
            quantization = QuantizationConfig("fp8", "e4m3", (128, 128), names)
        dtype = "float32" if storage == "fp32" else "bfloat16"
        text = replace(self.config.text, dtype=dtype)
        return replace(self.config, text=text, quantization=quantization)

    @property
    def tokenizer_size(self) -> int:
        """Ids of its tokenizer."""
        return self.config.text.vocab_size - SPARE_ROWS


def preset(name: str, overrides: Overrides | None = None) -> Preset:
    """The model `name` with its overrides. Raises ConfigError for what makes no model."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"give {', '.join(NAMES)}"
        raise ConfigError(f"there is no model {name!r} to be like; {hint}")
    overrides = overrides or Overrides()
    _check(overrides)
    made = _PRESETS[name]()
    config = _overridden(made.config, overrides)
    # Reading it as a file is what checks every rule between the values.
    again = ModelConfig.from_dict(config.to_dict(), f"a model like {name}")
    return replace(made, config=again)


def unquantized_names(config: ModelConfig) -> tuple[str, ...]:
    """`modules_to_not_convert` in the spelling of the release, sorted."""
    names = set(_GENERIC_NAMES)
    for name, spec in expected_tensors(config, "fp8").items():
        if ".layers." in name or name.startswith("model.visual."):
            name = name.replace("model.language_model.", "model.").removeprefix("model.visual.")
            if spec.component == "vision":
                name = f"visual.{name}"
            if spec.dtype != FP8 and not name.endswith(SCALE_SUFFIX):
                names.add(name.removesuffix(".weight"))
    for i, kind in enumerate(config.text.layer_types):
        if kind == "linear_attention":
            names.update(f"model.layers.{i}.self_attn.{fused}" for fused in _FUSED_NAMES)
    return tuple(sorted(names))


def _released() -> ModelConfig:
    return replace(cast(ModelConfig, shipped("glm-5.3-flash")), quantization=None)


def _flash() -> Preset:
    return Preset(_released(), "fp8")


def _tiny() -> Preset:
    """Every mechanism at a width of 64; choosing pools begins at 12 tokens."""
    released = _released()
    text: dict[str, Any] = {
        "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "index_head_dim": 16, "index_topk": 8,
        "index_n_heads": 12,  # with few heads, scores of exactly 0 tie
        "linear_num_heads": 4, "linear_head_dim": 16, "max_position_embeddings": 32768,
    }  # fmt: skip
    vision = _vision(64, depth=2, width=32, inner=64, merger=96, image_size=56)
    return Preset(_sized(released, text, vision), "bf16")


def _bench() -> Preset:
    """0.76 B parameters in 12 layers: real mechanisms and head sizes at a quarter of the width."""
    released = _released()
    text: dict[str, Any] = {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
        "moe_intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16,
        "n_routed_experts": 32, "q_lora_rank": 384, "kv_lora_rank": 256, "index_n_heads": 8,
        "index_topk": 512, "linear_num_heads": 16, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    vision = _vision(1024, depth=2, width=64, inner=128, merger=128, image_size=28)
    # One dense layer, and the types that transformers keeps in fp32.
    config = _with_layers(_sized(released, text, vision), 12, dense=1)
    return Preset(config, "bf16", ("conv1d.weight", "mlp.gate.weight"))


_PRESETS = dict(zip(NAMES, (_flash, _tiny, _bench), strict=True))


def _vision(
    out: int, *, depth: int, width: int, inner: int, merger: int, image_size: int
) -> dict[str, int]:
    return {
        "depth": depth, "hidden_size": width, "num_heads": 2, "intermediate_size": inner,
        "out_hidden_size": out, "projection_intermediate_size": merger, "image_size": image_size,
    }  # fmt: skip


def _sized(config: ModelConfig, text: dict[str, Any], vision: dict[str, int]) -> ModelConfig:
    """A config with other sizes, its layers by the released pattern, its ids by its vocabulary."""
    sized = replace(
        config,
        text=replace(config.text, **text),
        vision=replace(cast(VisionConfig, config.vision), **vision),
    )
    return _with_vocabulary(_with_layers(sized, text["num_hidden_layers"], _dense(config.text)))


def _overridden(config: ModelConfig, overrides: Overrides) -> ModelConfig:
    text = config.text
    wanted = {
        "hidden_size": overrides.hidden,
        "n_routed_experts": overrides.experts,
        "vocab_size": overrides.vocab,
        "index_topk": overrides.index_topk,
        "num_nextn_predict_layers": None if overrides.mtp else 0,
    }
    changed = {key: value for key, value in wanted.items() if value is not None}
    chosen = text.num_experts_per_tok
    if overrides.experts is not None and overrides.experts < chosen:
        raise ConfigError(
            f"{overrides.experts} experts are too few: every token uses {chosen}; "
            f"give at least {chosen}"
        )
    config = replace(config, text=replace(text, **cast(dict[str, Any], changed)))
    if overrides.layers is not None:
        config = _with_layers(config, overrides.layers, _dense(text))
    config = _with_vocabulary(config)
    if not overrides.vision:
        return replace(config, vision=None, token_ids=None, model_type="glm5_next_text")
    vision = cast(VisionConfig, config.vision)
    return replace(config, vision=replace(vision, out_hidden_size=config.text.hidden_size))


def _with_layers(config: ModelConfig, layers: int, dense: int) -> ModelConfig:
    """Trim or extend the per-layer lists: 3 KDA : 1 sparse, the first `dense` without experts."""
    text = replace(
        config.text,
        num_hidden_layers=layers,
        layer_types=tuple(
            "sparse_attention" if i % SPARSE_EVERY == SPARSE_EVERY - 1 else "linear_attention"
            for i in range(layers)
        ),
        mlp_layer_types=tuple("dense" if i < dense else "sparse" for i in range(layers)),
        indexer_types=("full",) * layers,
    )
    return replace(config, text=text)


def _dense(text: TextConfig) -> int:
    return text.mlp_layer_types.count("dense")


def _with_vocabulary(config: ModelConfig) -> ModelConfig:
    """Point all token ids at the added tokens of the synthetic tokenizer."""
    ids = added_token_ids(config.text.vocab_size - SPARE_ROWS)
    ends = (ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"])
    media = TokenIds(
        image=ids["<|image|>"],
        video=ids["<|video|>"],
        image_start=ids["<|begin_of_image|>"],
        image_end=ids["<|end_of_image|>"],
        video_start=ids["<|begin_of_video|>"],
        video_end=ids["<|end_of_video|>"],
    )
    text = replace(config.text, eos_token_id=ends, pad_token_id=ends[0])
    return replace(config, text=text, token_ids=media)


def _check(overrides: Overrides) -> None:
    smallest = {"vocab": SMALLEST + SPARE_ROWS}
    for name in ("layers", "experts", "hidden", "vocab", "index_topk"):
        value = getattr(overrides, name)
        least, most = smallest.get(name, 1), MOST_LAYERS if name == "layers" else LARGEST
        if value is not None and not least <= value <= most:
            limit = f"at least {least}" if value < least else f"at most {most:,}"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; give {limit}")
