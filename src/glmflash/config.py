"""What config.json says, checked: GLM-5.3-Flash to run, GLM-5.3 to compare.

Knows every key that decides shapes or arithmetic, and which values contradict each other. No value
that matters has a default here: the released model differs from the library's class defaults.
Knows nothing of tensors or files other than config.json.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from glmflash import config_reading as reading
from glmflash.config_values import Section
from glmflash.errors import ConfigError

SHIPPED = ("glm-5.3-flash", "glm-5.3")


@dataclass(frozen=True)
class TextConfig:
    """`text_config`: the language model. Names are the keys of the file.

    layer_types holds "linear_attention" or "sparse_attention", whichever spelling the file uses.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_kpool_always_select_tail: bool
    index_share_for_mtp_iteration: bool
    indexer_types: tuple[str, ...]
    layer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int
    linear_lower_bound: float
    hc_mult: int
    hc_eps: float
    hc_sinkhorn_iters: int
    swiglu_limit: float
    rms_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    dtype: str
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    tie_word_embeddings: bool


@dataclass(frozen=True)
class VisionConfig:
    """`vision_config`: the vision tower and its merger."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    in_channels: int
    image_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    rms_norm_eps: float
    swiglu_limit: float
    rope_theta: float


@dataclass(frozen=True)
class QuantizationConfig:
    """`quantization_config` of an FP8 release."""

    quant_method: str
    fmt: str
    weight_block_size: tuple[int, int]
    modules_to_not_convert: tuple[str, ...]


@dataclass(frozen=True)
class TokenIds:
    """Ids that mark images and videos in a prompt."""

    image: int
    video: int
    image_start: int
    image_end: int
    video_start: int
    video_end: int


@dataclass(frozen=True)
class ModelConfig:
    """A GLM-5.3-Flash model: text, and vision with its token ids unless it is text-only."""

    text: TextConfig
    vision: VisionConfig | None
    quantization: QuantizationConfig | None
    token_ids: TokenIds | None
    model_type: str

    @classmethod
    def from_dir(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read `config.json` of a checkpoint directory. Raises ConfigError."""
        return cls.from_file(_config_in(Path(path)))

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> ModelConfig:
        """Read a config file. Raises ConfigError."""
        return cls.from_dict(_read_json(Path(path)), str(path))

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> ModelConfig:
        """Check the content of a config file, nested or flat (text only). Raises ConfigError.

        where: names the source in messages.
        """
        top = _top(values, where)
        model_type = _model_type(top, ("glm5_next", "glm5_next_text"))
        flat = top.values.get("text_config") is None
        text_section = top if flat else top.section("text_config")
        if not flat:
            text_section.constant("model_type", "glm5_next_text")
        text = TextConfig(**reading.text_values(text_section, top))
        vision, ids = None, None
        if not flat and top.has("vision_config"):
            section = top.section("vision_config")
            vision = VisionConfig(**reading.vision_values(section, text.hidden_size))
            ids = TokenIds(**reading.token_id_values(top, text.vocab_size))
        return cls(text, vision, _quantization(top), ids, model_type)

    def to_dict(self) -> dict[str, Any]:
        """The config.json of the release layout: what `from_dict` reads back as an equal config."""
        text = reading.text_file_values(asdict(self.text))
        ending: dict[str, Any] = {"tie_word_embeddings": self.text.tie_word_embeddings}
        ending["model_type"] = self.model_type
        if self.quantization:
            ending["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": self.quantization.fmt,
                "modules_to_not_convert": list(self.quantization.modules_to_not_convert),
                "quant_method": self.quantization.quant_method,
                "weight_block_size": list(self.quantization.weight_block_size),
            }
        head = {"architectures": ["Glm5NextForConditionalGeneration"]}
        if self.vision is None or self.token_ids is None:
            return {**head, **text, **ending}
        return {
            **head,
            "text_config": {**text, "model_type": "glm5_next_text"},
            "vision_config": reading.vision_file_values(asdict(self.vision)),
            **{f"{name}_token_id": value for name, value in asdict(self.token_ids).items()},
            **ending,
        }


@dataclass(frozen=True)
class GlmMoeDsaConfig:
    """GLM-5.3 (`glm_moe_dsa`), the larger sibling: for arithmetic and comparison, not for running.

    index_topk_freq and index_skip_topk_offset are None where the file leaves them out.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_topk_freq: int | None
    index_skip_topk_offset: int | None
    index_share_for_mtp_iteration: bool
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    dtype: str
    eos_token_id: tuple[int, ...]
    pad_token_id: int | None
    tie_word_embeddings: bool
    quantization: QuantizationConfig | None
    model_type: str

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: str = "config") -> GlmMoeDsaConfig:
        """Check the content of a GLM-5.3 config file. Raises ConfigError."""
        top = _top(values, where)
        model_type = _model_type(top, ("glm_moe_dsa",))
        found = reading.moe_dsa_values(top)
        return cls(**found, quantization=_quantization(top), model_type=model_type)


def read_config(
    source: str | os.PathLike[str] | dict[str, Any], where: str = "config"
) -> ModelConfig | GlmMoeDsaConfig:
    """The config of either model, from a directory, a file, or its parsed content.

    Raises ConfigError.
    """
    if isinstance(source, dict):
        values = source
    else:
        path = Path(source)
        path = _config_in(path) if path.is_dir() else path
        values, where = _read_json(path), str(path)
    top = _top(values, where)
    if _model_type(top, ("glm5_next", "glm5_next_text", "glm_moe_dsa")) == "glm_moe_dsa":
        return GlmMoeDsaConfig.from_dict(values, where)
    return ModelConfig.from_dict(values, where)


@cache
def shipped(name: str) -> ModelConfig | GlmMoeDsaConfig:
    """A released config that comes with the package: "glm-5.3-flash" or "glm-5.3"."""
    if name not in SHIPPED:
        raise ConfigError(f"no config {name!r} is shipped; there are {' and '.join(SHIPPED)}")
    file = resources.files("glmflash") / "data" / f"{name}.config.json"
    return read_config(json.loads(file.read_text(encoding="utf-8")), f"shipped {name}")


def _config_in(directory: Path) -> Path:
    if not directory.is_dir():
        kind = "is a file, not a directory" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {kind}; give the directory that holds config.json")
    if not (directory / "config.json").exists():
        raise ConfigError(f"{directory} holds no config.json, so it is not a checkpoint")
    return directory / "config.json"


def _read_json(path: Path) -> Any:
    if path.is_dir():
        raise ConfigError(f"{path} is a directory; give the config.json inside it")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no file {path}; expected a config.json") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not JSON ({reason}); fetch the file again") from error


def _top(values: object, where: str) -> Section:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: found a JSON {type(values).__name__}; expected an object")
    return Section(values, where)


def _model_type(top: Section, known: tuple[str, ...]) -> str:
    if top.values.get("model_type") == "glm_moe_dsa" and "glm_moe_dsa" not in known:
        raise top.wrong(
            "model_type", "'glm5_next' (GLM-5.3 can be inspected and compared, but not run)"
        )
    return top.choice("model_type", known)


def _quantization(top: Section) -> QuantizationConfig | None:
    if not top.has("quantization_config"):
        return None
    return QuantizationConfig(**reading.quantization_values(top.section("quantization_config")))
