"""The router as its equations read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from glmflash.kernels.router import Router


def choose(layer: Router, scores: Tensor) -> Tensor:
    """Expert ids `[T, top_k]` for the raw scores `[T, experts]`."""
    biased = scores + layer.bias.to(scores.dtype)
    if layer.kept_groups < layer.groups:
        grouped = biased.view(len(biased), layer.groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        kept = strength.sort(descending=True, stable=True).indices[:, : layer.kept_groups]
        dropped = torch.ones_like(strength, dtype=torch.bool).scatter_(1, kept, False)
        biased = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
    return biased.sort(descending=True, stable=True).indices[:, : layer.top_k]


def router(x: Tensor, layer: Router, compute: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """As `glmflash.kernels.router.router`; compute is the type of all arithmetic."""
    scores = torch.sigmoid(x.to(compute) @ layer.weight.to(compute).T)
    chosen = choose(layer, scores)
    weights = scores.gather(1, chosen)
    if layer.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, (weights * layer.scale).float()
