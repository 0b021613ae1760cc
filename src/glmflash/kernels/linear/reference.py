"""`y = x Wᵀ` in torch: what the compiled linear kernels must equal."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
