"""A site of the hyper-connections as its equations read.

compute: the type between the roundings (fp64: the judge of every kernel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from glmflash.kernels.norm.reference import rms_norm

if TYPE_CHECKING:
    from glmflash.kernels.mhc import Site


def sinkhorn(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """Scale `mix [T, source, target]` (rows already sum to 1) to doubly stochastic.

    The softmax stands for the first row step, so columns come first; each iteration ends on them.
    """
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


def spread(streams: Tensor, routing: Tensor, y: Tensor, compute: torch.dtype) -> None:
    """`X_i <- post_i y + sum_k mix[k, i] X_k`, in place with one rounding."""
    tokens, n, _ = streams.shape
    post, mix = routing.to(compute).split([n, n * n], dim=1)
    mixed = torch.bmm(mix.reshape(tokens, n, n).transpose(1, 2), streams.to(compute))
    streams.copy_(post.unsqueeze(-1) * y.to(compute).unsqueeze(1) + mixed)


def site(
    layer: Site,
    streams: Tensor,
    routing: Tensor,
    y: Tensor | None,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """As `glmflash.kernels.mhc.site`."""
    if y is not None:
        spread(streams, routing, y, compute)
    n, flat = streams.shape[1], streams.flatten(1).to(compute)
    factor = torch.rsqrt(flat.square().mean(-1, keepdim=True) + layer.norm_eps)
    z = flat @ layer.fn.to(compute).T * factor
    scale, base = layer.scale.to(compute), layer.base.to(compute)
    pre, post, mix = z.split([n, n, n * n], dim=-1)
    base_pre, base_post, base_mix = base.split([n, n, n * n])
    pre = torch.sigmoid(scale[0] * pre + base_pre) + layer.eps
    post = 2 * torch.sigmoid(scale[1] * post + base_post)
    mix = (scale[2] * mix + base_mix).view(-1, n, n).softmax(-1) + layer.eps
    mix = sinkhorn(mix, layer.iterations, layer.eps)
    routing.copy_(torch.cat([post, mix.flatten(1)], dim=1))
    x = torch.einsum("tn,tnd->td", pre, streams.to(compute)).to(streams.dtype)
    return x if layer.norm is None else rms_norm(x, layer.norm, layer.norm_eps, compute)


def mean(
    streams: Tensor,
    routing: Tensor,
    y: Tensor,
    norm: Tensor | None,
    norm_eps: float,
    compute: torch.dtype = torch.float32,
) -> Tensor:
    """As `glmflash.kernels.mhc.mean`."""
    spread(streams, routing, y, compute)
    x = streams.to(compute).mean(1).to(streams.dtype)
    return x if norm is None else rms_norm(x, norm, norm_eps, compute)
