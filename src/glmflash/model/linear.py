"""A projection read from a checkpoint, and the prefix that names a module's tensors.

Knows how a stored weight becomes a matrix of the compute type; knows nothing about what the
matrix is for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.weights.fp8 import dequantize
from glmflash.weights.store import WeightStore


@dataclass(frozen=True)
class Weights:
    """The tensors under one prefix, as the compute type wants them.

    expand: keep FP8 matrices dequantised in memory. Without it each use dequantises anew, which
    is slow but needs no memory beyond the mapped file.
    """

    store: WeightStore
    dtype: torch.dtype
    expand: bool = True
    prefix: str = ""

    def at(self, name: str) -> Weights:
        """The weights below `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str) -> Tensor:
        """A tensor in the compute type."""
        return self.store.dense(self.prefix + name, self.dtype)

    def float(self, name: str) -> Tensor:
        """A tensor that the model uses in fp32 whatever the compute type."""
        return self.store.dense(self.prefix + name, torch.float32)

    def linear(self, name: str) -> Linear:
        """The projection `name`.weight."""
        return Linear(self, f"{self.prefix}{name}.weight")


class Linear:
    """`y = x Wᵀ` with W `[out, in]`; no projection of the text trunk has a bias."""

    def __init__(self, weights: Weights, name: str) -> None:
        stored = weights.store.tensor(name)
        self.dtype = weights.dtype
        self._scale = weights.store.scale(name)
        if self._scale is None or weights.expand:
            self._weight, self._scale = weights.store.dense(name, weights.dtype), None
        else:
            self._weight = stored

    @property
    def weight(self) -> Tensor:
        """The matrix `[out, in]` in the compute type."""
        if self._scale is None:
            return self._weight
        return dequantize(self._weight, self._scale).to(self.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return functional.linear(x, self.weight)
