"""Manifold-constrained hyper-connections (mHC): four residual streams around each block.

A site sits before each block: it spreads the previous block's output over the streams, mixing them
with a doubly stochastic matrix, and collapses them to the next block's normalised input. The
equations are in `kernels/mhc/reference.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels.mhc import Site
from glmflash.model.weights import Weights


def make_site(weights: Weights, name: str, norm: str, config: TextConfig) -> Site:
    """The site `name` of a layer, with the norm behind it. fn `[N*(N+2), N*D]` stays as stored."""
    return Site(
        fn=weights.store.tensor(f"{weights.prefix}{name}_fn").contiguous(),
        base=weights.float(f"{name}_base"),
        scale=weights.float(f"{name}_scale"),
        norm=weights.tensor(norm),
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,  # not hc_eps
    )


def expand_streams(x: Tensor, count: int) -> Tensor:
    """`[T, D]` to `[T, N, D]`: identical copies of the embedding."""
    return x.unsqueeze(1).repeat(1, count, 1)


def new_routing(tokens: int, count: int) -> Tensor:
    """Room for a site's routing `[T, N + N*N]`: output weights, then the mixing matrix."""
    return torch.empty(tokens, count * (count + 1))
