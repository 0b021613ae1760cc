"""Writes checkpoints whose headers are real and whose tensors are holes in the file.

A sparse file takes no room, so even the released checkpoint of 328 GB can lie on any disk.
Knows the safetensors layout by itself, so that the reader under test is not its own witness.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from glmflash.config import ModelConfig, shipped
from glmflash.weights.table import TensorSpec, expected_tensors

ITEM_BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


def small_config(vision: bool = True, quantised: bool = True, **text: Any) -> dict[str, Any]:
    """The released config with few layers, narrow, and everything that has a mechanism left in."""
    values = shipped("glm-5.3-flash").to_dict()
    values["text_config"] |= {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 192,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_head_dim": 32,
        "v_head_dim": 32,
        "index_head_dim": 32,
        "index_n_heads": 4,
        "index_topk": 16,
        "indexer_types": ["full"] * 5,
        "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention", "linear_attention"],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 2,
        "eos_token_id": [0, 1, 2],
        "pad_token_id": 0,
        "max_position_embeddings": 4096,
    }
    values["text_config"]["linear_attn_config"] = {
        "num_heads": 4,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    }
    values["text_config"] |= text
    values["tie_word_embeddings"] = values["text_config"]["tie_word_embeddings"]
    values["vision_config"] |= {
        "depth": 2,
        "hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 96,
        "out_hidden_size": 256,
        "projection_intermediate_size": 160,
    }
    names = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    values |= {f"{name}_token_id": 500 + place for place, name in enumerate(names)}
    if not vision:
        flat = values["text_config"] | {"model_type": "glm5_next_text"}
        values = {"quantization_config": values["quantization_config"], **flat}
    if not quantised:
        del values["quantization_config"]
    return values


def write_header(path: Path, specs: list[TensorSpec]) -> int:
    """A safetensors file with these tensors, all zero. Returns the bytes of its tensors."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for spec in specs:
        size = prod(spec.shape) * ITEM_BYTES[spec.dtype]
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + position)
    return position


def write_checkpoint(
    folder: Path, values: dict[str, Any], storage: str = "fp8", shards: int = 3
) -> dict[str, int]:
    """A checkpoint folder in the release layout. Returns the bytes of tensors by shard."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_dict(values)
    specs = list(expected_tensors(config, storage).values())  # type: ignore[arg-type]
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    parts = [
        specs[i * len(specs) // shards : (i + 1) * len(specs) // shards] for i in range(shards)
    ]
    sizes = {
        name: write_header(folder / name, part) for name, part in zip(names, parts, strict=True)
    }
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": {
            spec.name: name for name, part in zip(names, parts, strict=True) for spec in part
        },
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sizes
