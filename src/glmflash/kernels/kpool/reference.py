"""The pooled indexer as its equations read.

compute: the type between the roundings (fp64: the judge of every kernel).
"""

from __future__ import annotations

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


def score(queries: Tensor, weights: Tensor, pools: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . pool)`: fp32 `[T, P]`, fp64 where the weights are.

    queries `[T, H*d]`, weights `[T, H]` with all scales in them, pools `[P, d]`.
    """
    compute = torch.promote_types(weights.dtype, torch.float32)
    heads = queries.view(*weights.shape, pools.shape[1]).to(compute)
    dots = torch.matmul(heads, pools.to(compute).T).relu()
    return torch.bmm(weights.to(compute).unsqueeze(1), dots).squeeze(1)


def select(
    queries: Tensor,
    weights: Tensor,
    pools: Tensor,
    start: int,
    kpool: int,
    top_pools: int,
    tail: bool,
) -> Tensor:
    """Tokens of one sequence's queries, the first at position `start`.

    Arguments as `score` and `glmflash.kernels.kpool.select`.
    """
    out = []
    for t, row in enumerate(score(queries, weights, pools)):
        seen = start + t + 1
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
