"""Absorbed latent attention in torch, many queries at a time: without compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from glmflash.kernels.mla import Latent

# Elements of scores [queries, heads, keys] or gathered latents that may exist at once (64 MiB).
BLOCK_ELEMENTS = 1 << 24


def mla(
    layer: Latent,
    q: Tensor,
    latents: Sequence[Tensor],
    starts: Sequence[int],
    counts: Sequence[int],
    tokens: Tensor | None,
) -> Tensor:
    """As `glmflash.kernels.mla.mla`."""
    kv_b = layer.kv_b.to(q.dtype).view(layer.heads, -1, layer.rank)
    key_half, value_half = kv_b.split([layer.key_dim, layer.value_dim], dim=1)
    # the scale of the key size, not of the latent size
    heads = q.view(len(q), layer.heads, layer.key_dim) * layer.key_dim**-0.5
    absorbed = torch.bmm(heads.transpose(0, 1), key_half).transpose(0, 1)
    attended, row = [], 0
    for sequence, start, count in zip(latents, starts, counts, strict=True):
        part = absorbed[row : row + count]
        if tokens is None:
            attended.append(attend_causal(part, sequence, start))
        else:
            attended.append(attend_selected(part, sequence, tokens[row : row + count]))
        row += count
    out = torch.bmm(torch.cat(attended).transpose(0, 1), value_half.transpose(1, 2))
    return out.transpose(0, 1).flatten(1)


def attend_causal(q: Tensor, latents: Tensor, start: int) -> Tensor:
    """Absorbed queries `[T, H, r]` at positions start.. to all latents up to their own."""
    steps, heads, rank = q.shape
    out = []
    block = max(1, BLOCK_ELEMENTS // (heads * (start + steps)))
    for first in range(0, steps, block):
        part = q[first : first + block]
        seen = latents[: start + first + len(part)]
        scores = (part.reshape(-1, rank) @ seen.t()).float().view(len(part), heads, -1)
        own = torch.arange(start + first, start + first + len(part))
        allowed = torch.arange(len(seen)) <= own.unsqueeze(1)
        weights = _softmax(scores, allowed.unsqueeze(1)).to(q.dtype)
        out.append((weights.view(-1, len(seen)) @ seen).view_as(part))
    return torch.cat(out)


def attend_selected(q: Tensor, latents: Tensor, tokens: Tensor) -> Tensor:
    """Absorbed queries `[T, H, r]` to their own tokens `[T, W]` (-1 = empty)."""
    out = []
    block = max(1, BLOCK_ELEMENTS // ((tokens.shape[1] + 1) * (q.shape[1] + q.shape[2])))
    for part, chosen in zip(q.split(block), tokens.split(block), strict=True):
        gathered = latents[chosen.clamp(min=0)]
        scores = torch.bmm(part, gathered.transpose(1, 2)).float()
        weights = _softmax(scores, (chosen >= 0).unsqueeze(1)).to(q.dtype)
        out.append(torch.bmm(weights, gathered))
    return torch.cat(out)


def _softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over allowed places; a row without any becomes zeros."""
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).masked_fill(~allowed, 0.0)
