"""Sigmoid router: which experts a token goes to, and with what weights.

Knows one layer's rule; the experts themselves are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_rows, check_tensor, is_bf16
from glmflash.kernels.router import reference

__all__ = ["Router", "router"]


@dataclass(frozen=True)
class Router:
    """A layer's router.

    weight: `[experts, D]` as stored, bf16 or fp32. bias: fp32 `[experts]`, for the choice alone.
    groups, kept_groups: experts outside the groups with the best two experts cannot be chosen.
    Raises ValueError on shapes and types that do not fit.
    """

    weight: Tensor
    bias: Tensor
    top_k: int
    groups: int = 1
    kept_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    kernel_set: str | None = None

    def __post_init__(self) -> None:
        experts = len(self.weight)
        check_tensor("bias", self.bias, (experts,), torch.float32)
        is_bf16(self.weight)
        if not self.weight.is_contiguous():
            raise ValueError("the router's weight must be contiguous")
        if experts % self.groups or not 1 <= self.kept_groups <= self.groups:
            raise ValueError(
                f"{experts} experts do not fall into {self.groups} groups, {self.kept_groups} kept"
            )
        if not 1 <= self.top_k <= experts // self.groups * self.kept_groups:
            raise ValueError(f"{self.top_k} experts cannot be chosen from {experts}")


def router(x: Tensor, layer: Router) -> tuple[Tensor, Tensor]:
    """Rows `[T, D]` to expert ids int64 and weights fp32, both `[T, top_k]`.

    x: bf16 or fp32, rows dense. All arithmetic is fp32. Experts come in descending order of their
    biased score, equal scores by ascending id. Raises ValueError on shapes and types that do not
    fit.
    """
    module = kernels.native(layer.kernel_set)
    if module is None:
        return reference.router(x, layer)
    experts, width = layer.weight.shape
    rows = len(x)
    check_rows(rows, width, x.dtype, x)
    ids = torch.empty(rows, layer.top_k, dtype=torch.int64)
    weights = torch.empty(rows, layer.top_k)
    module.router(
        *(is_bf16(x), layer.weight.dtype == torch.bfloat16, x.data_ptr(), x.stride(0), rows),
        *(layer.weight.data_ptr(), width, layer.bias.data_ptr(), experts, layer.top_k),
        *(layer.groups, layer.kept_groups, layer.normalize, layer.scale),
        *(ids.data_ptr(), weights.data_ptr()),
    )
    return ids, weights
