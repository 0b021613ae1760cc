"""Absorbed latent attention as its equations read.

compute: the type between the roundings (fp64: the judge of every kernel).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from glmflash.kernels.mla import Latent


def mla(
    layer: Latent,
    q: Tensor,
    latents: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int],
    tokens: Tensor | None,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """As `glmflash.kernels.mla.mla`."""
    kv_b = layer.kv_b.to(compute).view(layer.heads, -1, layer.rank)
    key_half, value_half = kv_b.split([layer.key_dim, layer.value_dim], dim=1)
    heads = q.view(len(q), layer.heads, layer.key_dim).to(compute)
    absorbed = torch.einsum("thk,hkr->thr", heads, key_half) * layer.key_dim**-0.5
    absorbed = absorbed.to(q.dtype).to(compute)
    attended: list[Tensor] = []
    for sequence, start, count in zip(latents, starts, counts, strict=True):
        for position in range(start, start + count):
            row = len(attended)
            ids = torch.arange(position + 1)
            if tokens is not None:
                ids = tokens[row][tokens[row] >= 0].long()
            attended.append(_attend(absorbed[row], sequence[ids].to(compute), q.dtype))
    out = torch.einsum("thr,hvr->thv", torch.stack(attended).to(compute), value_half)
    return out.flatten(1).to(q.dtype)


def _attend(absorbed: Tensor, latents: Tensor, dtype: torch.dtype) -> Tensor:
    """Attended latents `[H, rank]` of one token; zeros where there is nothing to attend to."""
    if not len(latents):
        return torch.zeros_like(absorbed).to(dtype)
    scores = absorbed @ latents.T
    # the rounded shares are what is summed and what they are divided by
    shares = (scores - scores.amax(-1, keepdim=True)).exp().to(dtype).to(scores.dtype)
    return (shares @ latents / shares.sum(-1, keepdim=True)).to(dtype)
