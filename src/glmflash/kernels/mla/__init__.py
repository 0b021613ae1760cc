"""Sparse latent attention (MLA without positions) in absorbed form.

Knows attention of queries to latents, between the query projection and the output projection;
which tokens are attended to is the indexer's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_rows, check_tensor, is_bf16
from glmflash.kernels.mla import blocked

__all__ = ["Latent", "mla"]


@dataclass(frozen=True)
class Latent:
    """A layer's kv_b: `[H * (key_dim + value_dim), rank]`, head major, keys before values.

    kv_b: bf16, or fp32 for fp32 activations. Raises ValueError on shapes that do not fit.
    """

    kv_b: Tensor
    heads: int
    key_dim: int
    value_dim: int
    kernel_set: str | None = None

    def __post_init__(self) -> None:
        is_bf16(self.kv_b)
        rows = self.heads * (self.key_dim + self.value_dim)
        check_tensor("kv_b", self.kv_b, (rows, self.kv_b.shape[1]), self.kv_b.dtype)

    @property
    def rank(self) -> int:
        """Width of a latent."""
        return self.kv_b.shape[1]


def mla(
    layer: Latent,
    q: Tensor,
    latents: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int] | None = None,
    tokens: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Queries `[T, H*key_dim]` to attended values `[T, H*value_dim]`.

    q: bf16 or fp32, rows dense, any row stride. latents, starts, counts: per sequence its latents
    `[n, rank]` in that type, the position of its first query, and how many of the rows it owns
    (one sequence owns all without counts). tokens: int32 `[T, W]`, each row's own token ids, -1
    from the end of its list on; without it a row attends to every token up to its own position. A
    row without tokens gets zeros.

    Scores are scaled by key_dim^-0.5. Rounded to the type of q: the absorbed queries, exp(score -
    largest score) of each token, the attended latents, and the result; sums are fp32. Raises
    ValueError on shapes and types that do not fit.
    """
    rows = len(q)
    counts = [rows] if counts is None else counts
    if not len(latents) == len(starts) == len(counts) or sum(counts) != rows:
        raise ValueError(f"{len(latents)} sequences, starts {list(starts)}, counts {list(counts)}")
    if out is None:
        out = torch.empty(rows, layer.heads * layer.value_dim, dtype=q.dtype)
    if tokens is not None:
        check_tensor("tokens", tokens, (rows, tokens.shape[1]), torch.int32)
    module = kernels.native(layer.kernel_set)
    if module is None:
        return out.copy_(blocked.mla(layer, q, latents, starts, counts, tokens))
    check_rows(rows, layer.heads * layer.key_dim, q.dtype, q)
    check_rows(rows, layer.heads * layer.value_dim, q.dtype, out)
    for table, start, count in zip(latents, starts, counts, strict=True):
        check_tensor("latents", table, (len(table), layer.rank), q.dtype)
        if len(table) < start + count:
            raise ValueError(f"{len(table)} latents are too few for position {start + count - 1}")
    if is_bf16(q) and not is_bf16(layer.kv_b):
        raise ValueError("bf16 queries need a bf16 kv_b")
    name = "mla_bf16" if is_bf16(q) else "mla_fp32_bf16" if is_bf16(layer.kv_b) else "mla_fp32"
    getattr(module, name)(
        *(q.data_ptr(), q.stride(0), layer.kv_b.data_ptr(), layer.heads, layer.key_dim),
        *(layer.value_dim, layer.rank, layer.key_dim**-0.5),
        *(counts, [x.data_ptr() for x in latents], starts),
        *((0, 0) if tokens is None else (tokens.data_ptr(), tokens.shape[1])),
        *(out.data_ptr(), out.stride(0)),
    )
    return out
