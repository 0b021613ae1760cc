"""Manifold-constrained hyper-connections (mHC): four residual streams around each block.

A site turns the streams X `[T, N, D]` into one block input, and afterwards spreads the block's
output over the streams while mixing them with a doubly stochastic matrix. Everything but the
streams themselves is fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.model.linear import Weights


@dataclass(frozen=True)
class Routing:
    """What a site computed for a block: output weights `post [T, N]`, mixing `mix [T, N, N]`.

    `mix[t, k, i]` is how much of source stream k goes into target stream i.
    """

    post: Tensor
    mix: Tensor


def sinkhorn(mix: Tensor, iterations: int, eps: float) -> Tensor:
    """Scale `mix [T, source, target]` (rows already sum to 1) to doubly stochastic.

    The softmax stands for the first row step, so columns come first; each iteration ends on them.
    """
    mix = mix / (mix.sum(1, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(2, keepdim=True) + eps)
        mix = mix / (mix.sum(1, keepdim=True) + eps)
    return mix


def expand_streams(x: Tensor, streams: int) -> Tensor:
    """`[T, D]` to `[T, N, D]`: identical copies of the embedding."""
    return x.unsqueeze(1).expand(-1, streams, -1)


def collapse_streams(streams: Tensor) -> Tensor:
    """`[T, N, D]` to `[T, D]`: the plain mean, no learned head."""
    return streams.mean(1)


class HyperConnection:
    """One mHC site. Weights: `fn [N*(N+2), N*D]`, `base [N*(N+2)]`, `scale [3]`."""

    def __init__(self, weights: Weights, site: str, config: TextConfig) -> None:
        self.fn = weights.float(f"{site}_fn")
        self.base = weights.float(f"{site}_base")
        self.scale = weights.float(f"{site}_scale")
        self.streams = config.hc_mult
        self.iterations = config.hc_sinkhorn_iters
        self.eps = config.hc_eps
        self.norm_eps = config.rms_norm_eps  # not hc_eps

    def collapse(self, streams: Tensor) -> tuple[Tensor, Routing]:
        """Streams `[T, N, D]` to the block input `[T, D]` and the routing of its output."""
        n = self.streams
        flat = streams.flatten(1).float()
        # fn is linear, so the norm's factor may follow it
        factor = torch.rsqrt(flat.square().mean(-1, keepdim=True) + self.norm_eps)
        z = functional.linear(flat, self.fn) * factor
        pre, post, mix = z.split([n, n, n * n], dim=-1)
        base_pre, base_post, base_mix = self.base.split([n, n, n * n])
        pre = torch.sigmoid(self.scale[0] * pre + base_pre) + self.eps
        post = 2 * torch.sigmoid(self.scale[1] * post + base_post)
        mix = (self.scale[2] * mix + base_mix).view(-1, n, n).softmax(-1) + self.eps
        routing = Routing(post, sinkhorn(mix, self.iterations, self.eps))
        x = torch.einsum("tn,tnd->td", pre, flat.view(-1, n, streams.shape[-1]))
        return x.to(streams.dtype), routing

    def spread(self, streams: Tensor, y: Tensor, routing: Routing) -> Tensor:
        """`X_i <- post_i y + sum_k mix[k, i] X_k`, in fp32 with one rounding."""
        mixed = torch.bmm(routing.mix.transpose(1, 2), streams.float())
        return (routing.post.unsqueeze(-1) * y.float().unsqueeze(1) + mixed).to(streams.dtype)
