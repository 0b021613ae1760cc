"""RMSNorm as the model defines it: statistics in fp32, rounded before the weight is applied."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`weight * cast(x / sqrt(mean(x^2) + eps))` over the last axis, in the type of `x`."""
    x32 = x.float()
    scaled = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return scaled.to(x.dtype) * weight
