"""Kimi delta attention between its projections, written as the equations read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from glmflash.kernels.kda import Kda

L2_EPS = 1e-6
Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def kda(
    layer: Kda,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    states: Sequence[tuple[Tensor, Tensor]],
    counts: Sequence[int],
    compute: torch.dtype = torch.float32,
    rule: Rule | None = None,
) -> Tensor:
    """As `glmflash.kernels.kda.kda`.

    compute: the type between the roundings (fp64: the judge of every kernel). rule: another form
    of `delta_rule`.
    """
    outputs = []
    parts = (x.split(list(counts)) for x in (qkv, decay, beta, gate))
    for z, f, b, g, (conv, recurrent) in zip(*parts, states, strict=True):
        state = recurrent.to(compute)
        out, state = _sequence(layer, z, f, b, conv, state, rule or delta_rule)
        outputs.append(_gated_norm(layer, out.to(z.dtype).to(compute), g).to(z.dtype))
        conv.copy_(torch.cat([conv, z])[len(z) :])
        recurrent.copy_(state)
    return torch.cat(outputs)


def _sequence(
    layer: Kda, z: Tensor, f: Tensor, b: Tensor, conv: Tensor, state: Tensor, rule: Rule
) -> tuple[Tensor, Tensor]:
    """Delta-rule outputs `[T, H, d]` and the new state `[H, d, d]`."""
    heads, dim, compute = layer.heads, layer.dim, state.dtype
    mixed = short_convolution(torch.cat([conv, z]).to(compute), layer.conv.to(compute))
    mixed = mixed.to(z.dtype).to(compute)
    q, k, v = (x.reshape(-1, heads, dim) for x in mixed.chunk(3, dim=-1))
    q, k = l2_normalize(q) * dim**-0.5, l2_normalize(k)
    beta = torch.sigmoid(b.to(compute)).to(z.dtype).to(compute)
    f = (f.to(compute) + layer.dt_bias.to(compute).flatten()).view(-1, heads, dim)
    log_decay = layer.lower_bound * torch.sigmoid(layer.rate.to(compute).view(-1, 1) * f)
    return rule(q, k, v, log_decay, beta, state)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, one step after another.

    q, k, v, g `[T, H, d]` (g is the log decay), beta `[T, H]`, state `[H, d, d]`.
    Returns outputs `[T, H, d]` and the new state.
    """
    outputs = [torch.empty(0, *q.shape[1:], dtype=q.dtype)]
    for t in range(len(q)):
        state = g[t].exp().unsqueeze(-1) * state  # decay before the correction
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        write = beta[t].unsqueeze(-1) * (v[t] - recalled)
        state = state + k[t].unsqueeze(-1) * write.unsqueeze(1)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]).unsqueeze(0))  # read after the write
    return torch.cat(outputs), state


def short_convolution(window: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU: window `[T+taps-1, C]`, taps `[taps, C]`."""
    steps = len(window) - len(taps) + 1
    return functional.silu(sum(window[j : j + steps] * tap for j, tap in enumerate(taps)))


def l2_normalize(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last axis; the epsilon is added, not a floor."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _gated_norm(layer: Kda, out: Tensor, gate: Tensor) -> Tensor:
    """RMSNorm of each head times the sigmoid of its gate, `[T, H*d]`."""
    gate = torch.sigmoid(gate.to(out.dtype).view_as(out))
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + layer.eps)
    return (normed * layer.norm.to(out.dtype) * gate).flatten(1)
