"""Makes tiny random checkpoints and the oracle model beside each.

Knows: the smallest config transformers accepts for this model, which random weights make mistakes
visible (the default initialisation hides most of them), the tensor names of the released files,
and the FP8 block rule written out a second time. Knows nothing of glmflash: everything a test
compares against comes from transformers, or from the arithmetic in this file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers.models.glm5_next import Glm5NextConfig, Glm5NextForConditionalGeneration

Storage = Literal["fp32", "bf16", "fp8"]

VOCABULARY = 320
IMAGE, VIDEO, IMAGE_START, IMAGE_END, VIDEO_START, VIDEO_END = range(VOCABULARY - 6, VOCABULARY)
PLAIN_TOKENS = VOCABULARY - 6  # ids below this are ordinary text
BLOCK = 128
E4M3_MAX = 448.0

# Kept in fp32 in the released files, whatever the rest is stored in.
RELEASED_FP32 = (
    "e_score_correction_bias",
    "dt_bias",
    "A_log",
    "hc_attn_base",
    "hc_attn_scale",
    "hc_ffn_base",
    "hc_ffn_scale",
)
QUANTISED_MLP = ("gate_proj", "up_proj", "down_proj")
QUANTISED_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")


@dataclass(frozen=True)
class Tiny:
    """One checkpoint on disk and the transformers model that computes what it should compute.

    oracle: fp32, holding exactly the values of the files (after rounding, for bf16 and fp8).
    tensors: what the files hold, MTP included, as stored.
    """

    path: Path
    oracle: Glm5NextForConditionalGeneration
    tensors: dict[str, torch.Tensor]
    text: dict[str, Any]


def text_config(**overrides: Any) -> dict[str, Any]:
    """Text values of the tiny model. `layers` is a word of K (KDA), S (sparse with its own
    indexer) and s (sparse sharing the neighbour's); `dense` is the number of dense MLP layers."""
    layers = str(overrides.pop("layers", "KKSK"))
    dense = int(overrides.pop("dense", 1))
    linear = {
        "head_dim": overrides.pop("linear_head_dim", 16),
        "num_heads": overrides.pop("linear_num_heads", 3),
        "short_conv_kernel_size": overrides.pop("linear_conv_kernel_dim", 4),
        "gate_lower_bound": -5.0,
        "safe_gate": True,
    }
    values: dict[str, Any] = {
        "model_type": "glm5_next_text",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(layers),
        "num_attention_heads": 4,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 32,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 0,
        "v_head_dim": 16,
        # Many index heads: a score is exactly 0 when every head's relu is 0, and equal scores are
        # ranked in no defined order by torch.topk.
        "index_n_heads": 16,
        "index_head_dim": 16,
        "index_topk": 8,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "indexer_types": ["shared" if kind == "s" else "full" for kind in layers],
        "layer_types": [
            "linear_attention" if kind == "K" else "deepseek_sparse_attention" for kind in layers
        ],
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (len(layers) - dense),
        "linear_attn_config": linear,
        "hc_mult": 4,
        "hc_eps": 1e-6,
        "hc_sinkhorn_iters": 20,
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "pad_token_id": 0,
        "eos_token_id": [0, 1, 2],
        "tie_word_embeddings": False,
    }
    unknown = set(overrides) - set(values)
    if unknown:
        raise ValueError(f"not a text key: {sorted(unknown)}")
    values.update(overrides)
    values["num_key_value_heads"] = values["num_attention_heads"]
    return values


def vision_config(hidden_size: int, /, **overrides: Any) -> dict[str, Any]:
    """Vision values of the tiny model; `hidden_size` is the width of the text model."""
    values = {
        "model_type": "glm5_next_vision",
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "out_hidden_size": hidden_size,
        "projection_intermediate_size": 80,
        "in_channels": 3,
        "image_size": 56,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "rms_norm_eps": 1e-5,
        "swiglu_limit": 10.0,
        "attention_bias": True,
        "hidden_act": "silu",
    }
    return values | overrides


def random_values(
    name: str, shape: torch.Size, std: float, random: torch.Generator
) -> torch.Tensor:
    """Random fp32 values for one tensor, by its name: no norm is 1, no bias is 0, gates spread."""

    def normal(scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=random) * scale

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(shape, generator=random) * (high - low) + low

    if name.endswith("A_log"):
        return uniform(-1.0, 1.0)
    if name.endswith("dt_bias"):
        return uniform(-3.0, 1.0)
    if name.endswith(("hc.scale", "_scale")):
        return uniform(0.5, 1.5)
    if name.endswith(("hc.base", "_base")):
        return normal(0.5)
    if name.endswith(("e_score_correction_bias", ".bias")):
        return normal(0.1)
    if name.endswith("compress_ape"):
        return normal(0.15)
    if len(shape) == 1:
        return uniform(0.5, 1.5)
    return normal(std)


def randomise(model: torch.nn.Module, seed: int, hidden_size: int) -> None:
    """Fill every parameter and the router's choice bias in place. Wide models get smaller weights,
    so that hidden states keep their size."""
    random = torch.Generator().manual_seed(seed)
    std = 0.15 * min(1.0, math.sqrt(64 / hidden_size))
    biases = [(n, b) for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *biases]:
            value.copy_(random_values(name, value.shape, std, random))


def mtp_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names (below `layers.{i}.`) and shapes of the MTP layer, which transformers does not have."""
    hidden, inner = text["hidden_size"], text["moe_intermediate_size"]
    heads, rank_q, rank_kv = text["num_attention_heads"], text["q_lora_rank"], text["kv_lora_rank"]
    head_qk, head_v = text["qk_nope_head_dim"], text["v_head_dim"]
    index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "eh_proj.weight": (hidden, 2 * hidden),
        "shared_head.norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_a_proj.weight": (rank_q, hidden),
        "self_attn.q_a_layernorm.weight": (rank_q,),
        "self_attn.q_b_proj.weight": (heads * head_qk, rank_q),
        "self_attn.kv_a_proj_with_mqa.weight": (rank_kv, hidden),
        "self_attn.kv_a_layernorm.weight": (rank_kv,),
        "self_attn.kv_b_proj.weight": (heads * (head_qk + head_v), rank_kv),
        "self_attn.o_proj.weight": (hidden, heads * head_v),
        "self_attn.indexer.wq_b.weight": (index_heads * index_dim, rank_q),
        "self_attn.indexer.wk.weight": (index_dim, hidden),
        "self_attn.indexer.k_norm.weight": (index_dim,),
        "self_attn.indexer.k_norm.bias": (index_dim,),
        "self_attn.indexer.weights_proj.weight": (index_heads, hidden),
        "self_attn.indexer.index_kpool_compress_gate": (index_dim, hidden),
        "self_attn.indexer.index_kpool_compress_ape": (text["index_kpool"], index_dim),
        "mlp.gate.weight": (text["n_routed_experts"], hidden),
        "mlp.gate.e_score_correction_bias": (text["n_routed_experts"],),
    }
    widths = {f"experts.{i}": inner for i in range(text["n_routed_experts"])}
    widths["shared_experts"] = inner * text["n_shared_experts"]
    for expert, width in widths.items():
        shapes[f"mlp.{expert}.gate_proj.weight"] = (width, hidden)
        shapes[f"mlp.{expert}.up_proj.weight"] = (width, hidden)
        shapes[f"mlp.{expert}.down_proj.weight"] = (hidden, width)
    return shapes


def mtp_tensors(text: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Random fp32 MTP tensors under their released names."""
    random = torch.Generator().manual_seed(seed + 1_000_003)
    std = 0.15 * min(1.0, math.sqrt(64 / text["hidden_size"]))
    prefix = f"model.language_model.layers.{text['num_hidden_layers']}."
    return {
        prefix + name: random_values(name, torch.Size(shape), std, random)
        for name, shape in mtp_shapes(text).items()
    }


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values [rows, columns] and fp32 multipliers, one per 128 x 128 block, ragged edges
    included: scale = largest magnitude of the block / 448."""
    rows, columns = weight.shape
    scales = torch.empty(math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            block = weight[at].float()
            scales[i, j] = block.abs().max().clamp_min(1e-12) / E4M3_MAX
            scaled = (block / scales[i, j]).clamp(-E4M3_MAX, E4M3_MAX)
            values[at] = scaled.to(torch.float8_e4m3fn)
    return values, scales


def dequantise(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The block rule, element by element in fp32, rounded once to bf16."""
    rows = torch.arange(values.shape[0]) // BLOCK
    columns = torch.arange(values.shape[1]) // BLOCK
    return (values.float() * scales[rows][:, columns]).to(torch.bfloat16)


def is_quantised(name: str, linear_layers: set[int]) -> bool:
    """Whether the FP8 release stores this weight as e4m3."""
    parts = name.split(".")
    if ".visual." in name or "layers" not in parts or parts[-1] != "weight":
        return False
    if parts[-2] in QUANTISED_MLP:
        return True
    layer = int(parts[parts.index("layers") + 1])
    return parts[-2] in QUANTISED_ATTENTION and layer not in linear_layers


def as_stored(
    tensors: dict[str, torch.Tensor], storage: Storage, text: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """fp32 tensors in the dtypes of the fp32, bf16 or FP8 release."""
    if storage == "fp32":
        return tensors
    linear = {i for i, kind in enumerate(text["layer_types"]) if kind == "linear_attention"}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(RELEASED_FP32):
            stored[name] = tensor
        elif storage == "fp8" and is_quantised(name, linear):
            values, scales = quantise(tensor.to(torch.bfloat16))
            stored[name] = values
            stored[name.removesuffix("weight") + "weight_scale_inv"] = scales
        else:
            stored[name] = tensor.to(torch.bfloat16)
    return stored


def quantization_config(stored: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the FP8 release says of itself in config.json."""
    kept = sorted(
        name.removesuffix(".weight")
        for name, tensor in stored.items()
        if tensor.dtype == torch.bfloat16 and tensor.ndim >= 2
    )
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": kept,
    }


def write_config(path: Path, storage: Storage, stored: dict[str, torch.Tensor]) -> None:
    """Complete the config.json that transformers wrote."""
    config = json.loads((path / "config.json").read_text())
    if storage != "fp32":
        config["dtype"] = "bfloat16"
    if storage == "fp8":
        config["quantization_config"] = quantization_config(stored)
    (path / "config.json").write_text(json.dumps(config, indent=2))


def oracle_of(
    model: Glm5NextForConditionalGeneration, path: Path, stored: dict[str, torch.Tensor]
) -> Glm5NextForConditionalGeneration:
    """An fp32 oracle holding what the files hold. Loaded by transformers from a plain fp32 copy of
    the files, so that its FP8 reader (which wants whole blocks) is not asked about ragged edges."""
    plain = {}
    for name, tensor in stored.items():
        if name.endswith("weight_scale_inv"):
            continue
        scale = stored.get(name.removesuffix("weight") + "weight_scale_inv")
        value = tensor if scale is None else dequantise(tensor, scale)
        plain[name] = value.float()
    copy = path.with_name(path.name + "-plain")
    copy.mkdir()
    save_file(plain, copy / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(copy)
    return Glm5NextForConditionalGeneration.from_pretrained(copy, dtype=torch.float32).eval()


def make_tiny(
    directory: Path,
    *,
    seed: int,
    text: dict[str, Any] | None = None,
    vision: dict[str, Any] | None = None,
    storage: Storage = "fp32",
    mtp: bool = True,
    amend: Callable[[torch.nn.Module], None] | None = None,
) -> Tiny:
    """Write a checkpoint below `directory` in the released layout; return it with its oracle.

    text, vision: overrides of `text_config` and `vision_config`. mtp=False leaves the files as
    transformers writes them: a config that speaks of an MTP layer, and no tensor of it. amend:
    changes the random weights before they are written.
    """
    values = text_config(**(text or {}))
    config = Glm5NextConfig(
        text_config=dict(values),
        vision_config=vision_config(values["hidden_size"], **(vision or {})),
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        image_start_token_id=IMAGE_START,
        image_end_token_id=IMAGE_END,
        video_start_token_id=VIDEO_START,
        video_end_token_id=VIDEO_END,
        architectures=["Glm5NextForConditionalGeneration"],
    )
    model = Glm5NextForConditionalGeneration(config).eval()
    randomise(model, seed, values["hidden_size"])
    if amend:
        with torch.no_grad():
            amend(model)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    shard = directory / "model.safetensors"
    tensors = load_file(shard)
    if mtp:
        tensors |= mtp_tensors(values, seed)
    stored = as_stored(tensors, storage, values)
    save_file(stored, shard, metadata={"format": "pt"})
    write_config(directory, storage, stored)
    oracle = model if storage == "fp32" else oracle_of(model, directory, stored)
    return Tiny(directory, oracle, stored, values)
