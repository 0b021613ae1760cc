"""The pooled indexer as its equations read.

compute: the type between the roundings (fp64: the judge of every kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from glmflash.kernels.kpool import Pooling


def append(
    layer: Pooling,
    keys: Tensor,
    gates: Tensor,
    waiting: Tensor,
    count: int,
    compute: torch.dtype = torch.float32,
) -> tuple[Tensor, int]:
    """As `glmflash.kernels.kpool.append`."""
    (kpool, dim), dtype = layer.ape.shape, keys.dtype
    norm = layer.key_norm.to(compute), layer.key_bias.to(compute)
    normed = functional.layer_norm(keys.to(compute), (dim,), *norm, eps=layer.eps).to(dtype)
    members = torch.cat([waiting[:count], torch.stack([normed, gates], dim=1)])
    complete, left = divmod(len(members), kpool)
    done = members[: complete * kpool].view(complete, kpool, 2, dim).to(compute)
    shares = (done[:, :, 1] + layer.ape.to(compute)).softmax(1).to(dtype).to(compute)
    products = (shares * done[:, :, 0]).to(dtype).to(compute)
    waiting[:left] = members[complete * kpool :]
    return products.sum(1).to(dtype), left


def score(
    queries: Tensor,
    weights: Tensor,
    pools: Tensor,
    scales: Tensor | None = None,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """As `glmflash.kernels.kpool.score`, in the type `compute`."""
    (rows, heads), dim = weights.shape, pools.shape[1]
    per_head = queries.view(rows, heads, dim).to(compute)
    w = weights.to(compute) * (heads * dim) ** -0.5
    if scales is None:
        dots = per_head @ pools.to(compute).T
    else:
        codes, steps = quantize(per_head.flatten(0, 1))
        values = (codes.to(compute) - 128).view(rows, heads, dim)
        dots = values @ (pools.to(compute) - 128).T * scales.to(compute)
        w = w * steps.view(rows, heads).to(compute)
    return torch.bmm(w.unsqueeze(1), dots.relu()).squeeze(1)


def quantize(pools: Tensor) -> tuple[Tensor, Tensor]:
    """As `glmflash.kernels.kpool.quantize`: the largest value of a row becomes 127."""
    rows = pools.float()
    steps = rows.abs().amax(1) / 127
    codes = (rows / steps.unsqueeze(1).clamp(min=torch.finfo(torch.float32).tiny)).round()
    return (codes + 128).to(torch.uint8), steps


def select(
    queries: Tensor,
    weights: Tensor,
    pools: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int],
    scales: Sequence[Tensor] | None,
    kpool: int,
    top_pools: int,
    tail: bool,
) -> Tensor:
    """As `glmflash.kernels.kpool.select`."""
    out = []
    parts = zip(queries.split(list(counts)), weights.split(list(counts)), strict=True)
    for i, (q, w) in enumerate(parts):
        scores = score(q, w, pools[i], scales[i] if scales else None)
        for t, row in enumerate(scores):
            seen = starts[i] + t + 1
            visible = seen // kpool
            # a stable sort keeps equal scores in the order of their ids
            order = row[:visible].sort(descending=True, stable=True).indices
            kept = order[:top_pools].sort().values
            tokens = (kept.unsqueeze(1) * kpool + torch.arange(kpool)).flatten()
            if tail:
                tokens = torch.cat([tokens, torch.arange(visible * kpool, seen)])
            out.append(tokens)
    width = kpool * top_pools + (kpool - 1 if tail else 0)
    return torch.stack([functional.pad(x, (0, width - len(x)), value=-1) for x in out]).int()
