"""Every tensor of a checkpoint: name, shape and stored type, generated from the config.

Knows the release layout of GLM-5.3-Flash and of GLM-5.3 (specification of the checkpoint on disk).
Reads no file and needs no tensor library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from glmflash.config import GlmMoeDsaConfig, ModelConfig, TextConfig, VisionConfig

Storage = Literal["fp8", "bf16", "fp32"]
COMPONENTS = (
    "embedding", "head", "norms", "mhc", "kda", "mla", "indexer", "dense_mlp", "router",
    "routed_experts", "shared_experts", "mtp", "vision",
)  # fmt: skip
FP8, BF16, F32 = "F8_E4M3", "BF16", "F32"
ITEM_BYTES = {FP8: 1, BF16: 2, "F16": 2, F32: 4}
BLOCK = 128  # rows and columns that share one FP8 scale
SCALE_SUFFIX = "_scale_inv"  # "…weight" and its scales "…weight_scale_inv"

_Row = tuple[str, tuple[int, ...], str]  # name below its prefix, shape, type in the FP8 release


class TensorSpec(NamedTuple):  # quicker to make than a dataclass, and there are 118,629
    """One expected tensor. dtype as safetensors writes it; layer: index of its decoder layer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    component: str
    layer: int | None

    @property
    def parameters(self) -> int:
        """Number of elements; 0 for the scales of an FP8 weight, which are no parameters."""
        return 0 if self.name.endswith(SCALE_SUFFIX) else math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


def expected_tensors(
    config: ModelConfig | GlmMoeDsaConfig, storage: Storage
) -> dict[str, TensorSpec]:
    """All tensors of a checkpoint by name, in the order of the layers.

    storage: "fp8" as released, scales included; "bf16" as its sibling (a few tensors stay fp32);
    "fp32" everything.
    """
    specs: dict[str, TensorSpec] = {}
    for name, shape, dtype, component, layer in _all_rows(config):
        for row in _stored(name, shape, dtype, storage):
            specs[row[0]] = TensorSpec(*row, component, layer)
    return specs


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an FP8 matrix: one per block of 128 x 128, ragged edges included."""
    return tuple(-(-size // BLOCK) for size in shape)


def _stored(name: str, shape: tuple[int, ...], dtype: str, storage: Storage) -> Iterator[_Row]:
    if storage == "fp32":
        yield name, shape, F32
    elif dtype == FP8 and storage == "fp8":
        yield name, shape, FP8
        yield name + SCALE_SUFFIX, scale_shape(shape), F32
    else:
        yield name, shape, BF16 if dtype == FP8 else dtype


def _all_rows(
    config: ModelConfig | GlmMoeDsaConfig,
) -> Iterator[tuple[str, tuple[int, ...], str, str, int | None]]:
    """Name, shape, type in the FP8 release, component, layer."""
    text = config.text if isinstance(config, ModelConfig) else config
    prefix = "model.language_model." if isinstance(config, ModelConfig) else "model."
    hidden, matrix = text.hidden_size, (text.vocab_size, text.hidden_size)
    yield f"{prefix}embed_tokens.weight", matrix, BF16, "embedding", None
    for i in range(text.num_hidden_layers):
        for component, rows in _layer(text, i):
            for name, shape, dtype in rows:
                yield f"{prefix}layers.{i}.{name}", shape, dtype, component, i
    for i in range(text.num_hidden_layers, text.num_hidden_layers + text.num_nextn_predict_layers):
        for name, shape, dtype in _mtp_layer(text):
            yield f"{prefix}layers.{i}.{name}", shape, dtype, "mtp", i
    yield f"{prefix}norm.weight", (hidden,), BF16, "norms", None
    if not text.tie_word_embeddings:
        yield "lm_head.weight", matrix, BF16, "head", None
    if isinstance(config, ModelConfig) and config.vision:
        for name, shape, dtype in _vision(config.vision):
            yield f"model.visual.{name}", shape, dtype, "vision", None


def _layer(c: TextConfig | GlmMoeDsaConfig, index: int) -> Iterator[tuple[str, list[_Row]]]:
    """Decoder layer `index`, as components and their rows."""
    yield "norms", _layer_norms(c)
    if isinstance(c, TextConfig):
        yield "mhc", _mhc(c)
    if isinstance(c, TextConfig) and c.layer_types[index] == "linear_attention":
        yield "kda", _kda(c)
    else:
        yield "mla", _mla(c)
        if c.indexer_types[index] == "full":
            yield "indexer", _indexer(c)
    if c.mlp_layer_types[index] == "dense":
        yield "dense_mlp", _mlp("mlp.", c.hidden_size, c.intermediate_size)
    else:
        yield "router", _router(c)
        yield "shared_experts", _shared_experts(c)
        yield "routed_experts", _routed_experts(c)


def _mtp_layer(c: TextConfig | GlmMoeDsaConfig) -> Iterator[_Row]:
    """A sparse layer without mHC, always with an indexer of its own; embedding and head shared."""
    hidden = c.hidden_size
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield f"{name}.weight", (hidden,), BF16
    yield "eh_proj.weight", (hidden, 2 * hidden), BF16
    yield from _layer_norms(c)
    yield from _mla(c)
    yield from _indexer(c)
    yield from _router(c)
    yield from _shared_experts(c)
    yield from _routed_experts(c)


def _layer_norms(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    names = ("input_layernorm", "post_attention_layernorm")
    return [(f"{name}.weight", (c.hidden_size,), BF16) for name in names]


def _mhc(c: TextConfig) -> list[_Row]:
    n = c.hc_mult
    width = 2 * n + n * n  # pre, post, and the n x n mixing matrix
    rows: list[_Row] = []
    for site in ("hc_attn", "hc_ffn"):
        rows.append((f"{site}_fn", (width, n * c.hidden_size), BF16))
        rows.append((f"{site}_base", (width,), F32))
        rows.append((f"{site}_scale", (3,), F32))
    return rows


def _kda(c: TextConfig) -> list[_Row]:
    heads, dim, hidden = c.linear_num_heads, c.linear_head_dim, c.hidden_size
    inner = heads * dim
    rows: list[_Row] = []
    for x in "qkv":
        rows.append((f"{x}_proj.weight", (inner, hidden), BF16))
        rows.append((f"{x}_conv1d.weight", (inner, 1, c.linear_conv_kernel_dim), BF16))
    for x in "fg":  # decay gate and output gate, both of low rank
        rows.append((f"{x}_a_proj.weight", (dim, hidden), BF16))
        rows.append((f"{x}_b_proj.weight", (inner, dim), BF16))
    rows.append(("b_proj.weight", (heads, hidden), BF16))
    rows.append(("A_log", (heads,), F32))
    rows.append(("dt_bias", (inner,), F32))
    rows.append(("o_norm.weight", (dim,), BF16))
    rows.append(("o_proj.weight", (hidden, inner), BF16))
    return _below("self_attn.", rows)


def _mla(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    heads, hidden, q_rank, rank = (
        c.num_attention_heads, c.hidden_size, c.q_lora_rank, c.kv_lora_rank,
    )  # fmt: skip
    rope, kv_b = (0, BF16) if isinstance(c, TextConfig) else (c.qk_rope_head_dim, FP8)
    rows: list[_Row] = [
        ("q_a_proj.weight", (q_rank, hidden), FP8),
        ("q_a_layernorm.weight", (q_rank,), BF16),
        ("q_b_proj.weight", (heads * (c.qk_nope_head_dim + rope), q_rank), FP8),
        ("kv_a_proj_with_mqa.weight", (rank + rope, hidden), FP8),
        ("kv_a_layernorm.weight", (rank,), BF16),
        ("kv_b_proj.weight", (heads * (c.qk_nope_head_dim + c.v_head_dim), rank), kv_b),
        ("o_proj.weight", (hidden, heads * c.v_head_dim), FP8),
    ]
    return _below("self_attn.", rows)


def _indexer(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    heads, dim, hidden = c.index_n_heads, c.index_head_dim, c.hidden_size
    projection = BF16 if isinstance(c, TextConfig) else FP8
    rows: list[_Row] = [
        ("wq_b.weight", (heads * dim, c.q_lora_rank), projection),
        ("wk.weight", (dim, hidden), projection),
        ("k_norm.weight", (dim,), BF16),
        ("k_norm.bias", (dim,), BF16),
        ("weights_proj.weight", (heads, hidden), BF16),
    ]
    if isinstance(c, TextConfig):  # learned pooling
        rows.append(("index_kpool_compress_gate", (dim, hidden), BF16))
        rows.append(("index_kpool_compress_ape", (c.index_kpool, dim), BF16))
    return _below("self_attn.indexer.", rows)


def _router(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    experts = c.n_routed_experts
    return [
        ("mlp.gate.weight", (experts, c.hidden_size), BF16),
        ("mlp.gate.e_score_correction_bias", (experts,), F32),
    ]


def _shared_experts(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    inner = c.moe_intermediate_size * c.n_shared_experts
    return _mlp("mlp.shared_experts.", c.hidden_size, inner)


def _routed_experts(c: TextConfig | GlmMoeDsaConfig) -> list[_Row]:
    return [
        row
        for i in range(c.n_routed_experts)
        for row in _mlp(f"mlp.experts.{i}.", c.hidden_size, c.moe_intermediate_size)
    ]


def _mlp(prefix: str, hidden: int, inner: int, dtype: str = FP8, bias: bool = False) -> list[_Row]:
    rows: list[_Row] = []
    for name, shape in (
        ("gate_proj", (inner, hidden)),
        ("up_proj", (inner, hidden)),
        ("down_proj", (hidden, inner)),
    ):
        rows.append((f"{prefix}{name}.weight", shape, dtype))
        if bias:
            rows.append((f"{prefix}{name}.bias", shape[:1], dtype))
    return rows


def _vision(c: VisionConfig) -> Iterator[_Row]:
    """The tower and its merger; never FP8."""
    width, out, patch = c.hidden_size, c.out_hidden_size, c.patch_size
    shape = (width, c.in_channels, c.temporal_patch_size, patch, patch)
    yield "patch_embed.proj.weight", shape, BF16
    yield "patch_embed.proj.bias", (width,), BF16
    for i in range(c.depth):
        yield from _below(f"blocks.{i}.", _vision_block(c))
    yield "post_layernorm.weight", (width,), BF16
    yield "downsample.weight", (out, width, c.spatial_merge_size, c.spatial_merge_size), BF16
    yield "downsample.bias", (out,), BF16
    yield "merger.proj.weight", (out, out), BF16
    yield "merger.post_projection_norm.weight", (out,), BF16
    yield "merger.post_projection_norm.bias", (out,), BF16
    yield from _mlp("merger.", out, c.projection_intermediate_size, BF16)


def _vision_block(c: VisionConfig) -> list[_Row]:
    width = c.hidden_size
    head = width // c.num_heads
    return [
        ("norm1.weight", (width,), BF16),
        ("attn.qkv.weight", (3 * width, width), BF16),
        ("attn.qkv.bias", (3 * width,), BF16),
        ("attn.q_norm.weight", (head,), BF16),
        ("attn.k_norm.weight", (head,), BF16),
        ("attn.proj.weight", (width, width), BF16),
        ("attn.proj.bias", (width,), BF16),
        ("norm2.weight", (width,), BF16),
        *_mlp("mlp.", width, c.intermediate_size, BF16, bias=True),
    ]


def _below(prefix: str, rows: list[_Row]) -> list[_Row]:
    return [(prefix + name, shape, dtype) for name, shape, dtype in rows]
