"""The pooled lightning indexer: which tokens the queries of a sparse layer attend to.

Knows how tokens become pools and how queries choose among them; does not know the projections
that make keys, gates and queries, nor where the pools are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_rows, check_tensor, is_bf16
from glmflash.kernels.kpool import reference

__all__ = ["Pooling", "append", "quantize", "score", "select"]


@dataclass(frozen=True)
class Pooling:
    """A layer's rule of pooling.

    key_norm, key_bias: `[d]`, of the keys' LayerNorm. ape: `[kpool, d]`, bias of a gate by its
    place in the pool. All in one type, bf16 or fp32: that of the activations.
    Raises ValueError on shapes and types that do not fit.
    """

    key_norm: Tensor
    key_bias: Tensor
    ape: Tensor
    eps: float = 1e-6
    kernel_set: str | None = None

    def __post_init__(self) -> None:
        kpool, dim = self.ape.shape
        is_bf16(self.ape)
        check_tensor("ape", self.ape, (kpool, dim), self.ape.dtype)
        check_tensor("key_norm", self.key_norm, (dim,), self.ape.dtype)
        check_tensor("key_bias", self.key_bias, (dim,), self.ape.dtype)
        if not 1 <= kpool <= 64:
            raise ValueError(f"a pool has 1 to 64 tokens, not {kpool}")


def append(
    layer: Pooling, keys: Tensor, gates: Tensor, waiting: Tensor, count: int
) -> tuple[Tensor, int]:
    """Take in T tokens of one sequence: `(finished pools [P, d], tokens now waiting)`.

    keys, gates: `[T, d]`, raw, rows dense, any row stride. waiting: `[kpool, 2, d]`, whose first
    `count` places hold key (after its norm) and gate of the unfinished pool's tokens; changed in
    place. Rounded to the type: keys after the norm, the softmax over a pool's members, its
    products with the keys, their fp32 sum. Raises ValueError on shapes and types that do not fit.
    """
    module = kernels.native(layer.kernel_set)
    if module is None:
        return reference.append(layer, keys, gates, waiting, count)
    (kpool, dim), tokens = layer.ape.shape, len(keys)
    check_rows(tokens, dim, layer.ape.dtype, keys, gates)
    check_tensor("waiting", waiting, (kpool, 2, dim), layer.ape.dtype)
    if not 0 <= count < kpool:
        raise ValueError(f"{count} tokens cannot wait for a pool of {kpool}")
    complete, left = divmod(count + tokens, kpool)
    pools = torch.empty(complete, dim, dtype=keys.dtype)
    call = module.pool_append_bf16 if is_bf16(keys) else module.pool_append_fp32
    call(
        *(keys.data_ptr(), keys.stride(0), gates.data_ptr(), gates.stride(0), tokens),
        *(layer.key_norm.data_ptr(), layer.key_bias.data_ptr(), layer.eps, layer.ape.data_ptr()),
        *(kpool, dim, waiting.data_ptr(), count, pools.data_ptr()),
    )
    return pools, left


def quantize(pools: Tensor, kernel_set: str | None = None) -> tuple[Tensor, Tensor]:
    """Pools `[P, d]` (d a multiple of 4) to int8: codes + 128 `[P, d]` uint8, scales `[P]` fp32.

    Lossy: scores of such pools differ from the exact ones by about a percent, so pools that are
    near the last kept place may change.
    """
    count, dim = pools.shape
    module = kernels.native(kernel_set)
    if module is None:
        return reference.quantize(pools)
    check_tensor("pools", pools, (count, dim), pools.dtype)
    codes, scales = torch.empty(count, dim, dtype=torch.uint8), torch.empty(count)
    call = module.pool_quantize_bf16 if is_bf16(pools) else module.pool_quantize_fp32
    call(pools.data_ptr(), count, dim, codes.data_ptr(), scales.data_ptr())
    return codes, scales


def select(
    queries: Tensor,
    weights: Tensor,
    pools: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int] | None = None,
    scales: Sequence[Tensor] | None = None,
    *,
    kpool: int,
    top_pools: int,
    tail: bool = True,
    kernel_set: str | None = None,
) -> Tensor:
    """Tokens that each query attends to: int32 `[T, W]`, ascending, -1 after the last.

    queries `[T, H*d]` and head weights `[T, H]` (raw projections), one type, rows dense, any row
    stride. pools, starts, counts: per sequence its finished pools `[n, d]` in that type, the
    position of its first query, and how many of the rows it owns (one sequence owns all without
    counts). A query at position t sees pools 0..(t+1)//kpool - 1 and keeps the `top_pools` best by
    `sum_h w_h relu(q_h . pool)`, equal scores by lower pool; with `tail` the tokens of its
    unfinished pool follow. Scores are fp32 sums of exact products. W = kpool * top_pools, and
    kpool - 1 more with the tail.

    scales: the pools are codes of `quantize`, with these scales; queries are then rounded to int8
    too, a scale per head. Raises ValueError on shapes and types that do not fit.
    """
    rows, heads = weights.shape
    dim = pools[0].shape[1]
    counts = [rows] if counts is None else counts
    _check_queries(queries, weights, pools, scales)
    if not len(pools) == len(starts) == len(counts) or sum(counts) != rows:
        raise ValueError(f"{len(pools)} sequences, starts {list(starts)}, counts {list(counts)}")
    for table, start, count in zip(pools, starts, counts, strict=True):
        if len(table) < (start + count) // kpool:
            raise ValueError(f"{len(table)} pools are too few for position {start + count - 1}")
    module = kernels.native(kernel_set)
    if module is None:
        return reference.select(
            queries, weights, pools, starts, counts, scales, kpool, top_pools, tail
        )
    width = kpool * top_pools + (kpool - 1 if tail else 0)
    out = torch.empty(rows, width, dtype=torch.int32)
    call = module.pool_select_bf16 if is_bf16(queries) else module.pool_select_fp32
    call(
        *(queries.data_ptr(), queries.stride(0), weights.data_ptr(), weights.stride(0)),
        *(heads, dim, (heads * dim) ** -0.5, kpool, top_pools, tail, counts),
        *([p.data_ptr() for p in pools], [s.data_ptr() for s in scales or ()] or [0] * len(pools)),
        *(starts, out.data_ptr(), width),
    )
    return out


def score(
    queries: Tensor,
    weights: Tensor,
    pools: Tensor,
    scales: Tensor | None = None,
    kernel_set: str | None = None,
) -> Tensor:
    """The scores that `select` compares, fp32 `[T, P]`, of every pool for every query."""
    (rows, heads), (count, dim) = weights.shape, pools.shape
    _check_queries(queries, weights, [pools], scales if scales is None else [scales])
    module = kernels.native(kernel_set)
    if module is None:
        return reference.score(queries, weights, pools, scales)
    out = torch.empty(rows, count)
    call = module.pool_scores_bf16 if is_bf16(queries) else module.pool_scores_fp32
    call(
        *(queries.data_ptr(), queries.stride(0), weights.data_ptr(), weights.stride(0)),
        *(heads, dim, (heads * dim) ** -0.5, rows, pools.data_ptr()),
        *(0 if scales is None else scales.data_ptr(), count, out.data_ptr()),
    )
    return out


def _check_queries(
    queries: Tensor, weights: Tensor, pools: Sequence[Tensor], scales: Sequence[Tensor] | None
) -> None:
    (rows, heads), dim = weights.shape, pools[0].shape[1]
    check_rows(rows, heads * dim, queries.dtype, queries)
    check_rows(rows, heads, queries.dtype, weights)
    for table in pools:
        check_tensor("pools", table, (len(table), dim), torch.uint8 if scales else queries.dtype)
    if scales is None:
        return
    if dim % 4:
        raise ValueError(f"int8 pools need a width that is a multiple of 4, not {dim}")
    for table, scale in zip(pools, scales, strict=True):
        check_tensor("scales", scale, (len(table),), torch.float32)
