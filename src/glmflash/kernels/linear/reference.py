"""`y = x Wᵀ` in torch: what the compiled linear kernels must equal."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 128
Stored = tuple[Tensor, Tensor | None]  # a weight [n, k] and, if it is FP8, its block scales


def dense(
    weight: Tensor, scale: Tensor | None, round_weights: Literal["none", "bf16"] = "none"
) -> Tensor:
    """The values of a weight `[n, k]` in fp32.

    scale: fp32 `[ceil(n / 128), ceil(k / 128)]` of an FP8 weight; a value is fp32(w8) * scale.
    round_weights: "none" keeps that product, "bf16" rounds it once, as transformers does.
    """
    values = weight.to(torch.float32)
    if scale is not None:
        rows, columns = weight.shape
        spread = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        values = values * spread
    return values.to(torch.bfloat16).float() if round_weights == "bf16" else values


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    round_weights: Literal["none", "bf16"] = "none",
) -> Tensor:
    """`[..., k]` to `[..., n]`: products and sums in fp32, one rounding to `dtype` (x's own)."""
    return (x.float() @ dense(weight, scale, round_weights).T).to(dtype or x.dtype)


def quick(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`linear` by torch's own product where the types agree: what runs without compiled kernels.

    A bf16 product is then rounded to bf16 even where fp32 is wanted, and FP8 values that meet a
    bf16 x are rounded to bf16 first.
    """
    if scale is not None and x.dtype == torch.bfloat16:
        weight, scale = dense(weight, scale, "bf16").to(torch.bfloat16), None
    if scale is None and weight.dtype == x.dtype:
        return functional.linear(x, weight).to(dtype or x.dtype)
    return linear(x, weight, scale, dtype)
