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
from glmflash.kernels.kpool import blocked, reference

__all__ = ["Pooling", "append", "score", "select"]


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


def select(
    queries: Tensor,
    weights: Tensor,
    pools: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int] | None = None,
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
    kpool - 1 more with the tail. Raises ValueError on shapes and types that do not fit.
    """
    rows, heads = weights.shape
    dim = pools[0].shape[1]
    counts = [rows] if counts is None else counts
    scale = (heads * dim) ** -0.5
    module = kernels.native(kernel_set)
    _check_queries(queries, weights, pools, dim)
    if not len(pools) == len(starts) == len(counts) or sum(counts) != rows:
        raise ValueError(f"{len(pools)} sequences, starts {list(starts)}, counts {list(counts)}")
    for table, start, count in zip(pools, starts, counts, strict=True):
        if len(table) < (start + count) // kpool:
            raise ValueError(f"{len(table)} pools are too few for position {start + count - 1}")
    width = kpool * top_pools + (kpool - 1 if tail else 0)
    if module is None:
        parts = (queries.split(list(counts)), weights.split(list(counts)))
        return torch.cat(
            [
                blocked.select(q, w.float() * scale, p, s, kpool, top_pools, tail)
                for q, w, p, s in zip(*parts, pools, starts, strict=True)
            ]
        )
    out = torch.empty(rows, width, dtype=torch.int32)
    call = module.pool_select_bf16 if is_bf16(queries) else module.pool_select_fp32
    call(
        *(queries.data_ptr(), queries.stride(0), weights.data_ptr(), weights.stride(0)),
        *(heads, dim, scale, kpool, top_pools, tail),
        *(counts, [p.data_ptr() for p in pools], starts, out.data_ptr(), width),
    )
    return out


def score(queries: Tensor, weights: Tensor, pools: Tensor, kernel_set: str | None = None) -> Tensor:
    """The scores that `select` compares, fp32 `[T, P]`, of every pool for every query."""
    (rows, heads), (count, dim) = weights.shape, pools.shape
    _check_queries(queries, weights, [pools], dim)
    scale = (heads * dim) ** -0.5
    module = kernels.native(kernel_set)
    if module is None:
        return reference.score(queries, weights.float() * scale, pools)
    out = torch.empty(rows, count)
    call = module.pool_scores_bf16 if is_bf16(queries) else module.pool_scores_fp32
    call(
        *(queries.data_ptr(), queries.stride(0), weights.data_ptr(), weights.stride(0)),
        *(heads, dim, scale, rows, pools.data_ptr(), count, out.data_ptr()),
    )
    return out


def _check_queries(queries: Tensor, weights: Tensor, pools: Sequence[Tensor], dim: int) -> None:
    rows, heads = weights.shape
    check_rows(rows, heads * dim, queries.dtype, queries)
    check_rows(rows, heads, queries.dtype, weights)
    for table in pools:
        check_tensor("pools", table, (len(table), dim), queries.dtype)
