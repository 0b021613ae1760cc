"""Clamped SwiGLU experts in torch: what the compiled kernels must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.kernels.linear.reference import Stored, linear

Expert = tuple[Stored, Stored, Stored]
Product = Callable[[Tensor, Tensor, Tensor | None, torch.dtype | None], Tensor]


def expert(x: Tensor, weights: Expert, limit: float, product: Product = linear) -> Tensor:
    """`W_down (SiLU(min(gate, limit)) * clamp(up, -limit, limit))` in fp32, `[T, D]` to `[T, D]`.

    The hidden values are rounded to the type of x, as they are the x of the last product.
    """
    gate, up = (product(x, *stored, torch.float32) for stored in weights[:2])
    hidden = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    return product(hidden.to(x.dtype), *weights[2], torch.float32)


def moe(
    x: Tensor,
    experts: Sequence[Expert | None],
    ids: Tensor | None,
    weights: Tensor | None,
    limit: float,
    shared: Expert | None = None,
    product: Product = linear,
) -> Tensor:
    """`[T, D]` to fp32 `[T, D]`: the shared expert, plus the weighted routed ones by ascending id.

    ids, weights: `[T, top_k]`, the experts of each token and what to multiply them by. product:
    `linear`, or the quicker form of it.
    """
    total = (
        expert(x, shared, limit, product) if shared else torch.zeros(x.shape, dtype=torch.float32)
    )
    if ids is None or weights is None:
        return total
    for e in ids.unique().tolist():
        chosen = experts[e]
        if chosen is None:
            raise ValueError(f"expert {e} has no weights")
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        y = expert(x[tokens], chosen, limit, product) * weights[tokens, slots].unsqueeze(-1)
        total.index_add_(0, tokens, y)
    return total
