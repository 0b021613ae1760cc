"""RMSNorm as the model rounds it, and the clamped SwiGLU.

Knows rows of activations; a row's result depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_rows, is_bf16
from glmflash.kernels.norm import reference

__all__ = ["rms_norm", "swiglu"]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None = None,
    kernel_set: str | None = None,
) -> Tensor:
    """`weight * cast(x / sqrt(mean(x^2) + eps))` of rows `[T, n]`, weight `[n]` of the same type.

    x: bf16 or fp32, rows dense, any row stride. Statistics are fp32; the scaled value and the
    product are rounded to the type of x. out: where to write; it may be x itself.
    Raises ValueError on shapes and types that do not fit.
    """
    module = kernels.native(kernel_set)
    if module is None:
        y = reference.rms_norm(x, weight, eps)
        return y if out is None else out.copy_(y)
    rows, n = x.shape
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype)
    if weight.shape != (n,) or weight.dtype != x.dtype or weight.stride(0) != 1:
        raise ValueError(f"weight must be dense {x.dtype} [{n}], not {weight.dtype} {weight.shape}")
    check_rows(rows, n, x.dtype, x, out)
    call = module.rms_norm_bf16 if is_bf16(x) else module.rms_norm_fp32
    x_at, out_at = (x.data_ptr(), x.stride(0)), (out.data_ptr(), out.stride(0))
    call(*x_at, weight.data_ptr(), *out_at, rows, n, eps)
    return out


def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    out: Tensor | None = None,
    kernel_set: str | None = None,
) -> Tensor:
    """`SiLU(min(gate, limit)) * clamp(up, -limit, limit)` of `[T, n]`, rounded once.

    gate, up: both bf16 or both fp32, rows dense, any row stride (the halves of one projection).
    Raises ValueError on shapes and types that do not fit.
    """
    module = kernels.native(kernel_set)
    if module is None:
        y = reference.swiglu(gate, up, limit)
        return y if out is None else out.copy_(y)
    rows, n = gate.shape
    if out is None:
        out = torch.empty(rows, n, dtype=gate.dtype)
    check_rows(rows, n, gate.dtype, gate, up, out)
    call = module.swiglu_bf16 if is_bf16(gate) else module.swiglu_fp32
    gate_at, up_at = (gate.data_ptr(), gate.stride(0)), (up.data_ptr(), up.stride(0))
    call(*gate_at, *up_at, out.data_ptr(), out.stride(0), rows, n, limit)
    return out
