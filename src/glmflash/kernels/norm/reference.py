"""RMSNorm and the clamped SwiGLU as the equations read.

compute: the type between the roundings (fp64: the judge of every kernel).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float, compute: torch.dtype = torch.float32) -> Tensor:
    """`weight * cast(x / sqrt(mean(x^2) + eps))` over the last axis, in the type of `x`."""
    wide = x.to(compute)
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype).to(compute) * weight.to(compute)).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float, compute: torch.dtype = torch.float32) -> Tensor:
    """`SiLU(min(gate, limit)) * clamp(up, -limit, limit)`; the gate is clamped above only."""
    activated = functional.silu(gate.to(compute).clamp(max=limit))
    return (activated * up.to(compute).clamp(-limit, limit)).to(gate.dtype)
