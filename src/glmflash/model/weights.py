"""A checkpoint's tensors as the model wants them, module by module.

Knows how a stored tensor becomes what a kernel takes: as it lies in the mapped file where the
kernels can read that, packed for speed where memory allows, converted otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear import Weight
from glmflash.kernels.linear.reference import Stored
from glmflash.weights.store import WeightStore


@dataclass(frozen=True)
class Weights:
    """The tensors under one prefix.

    dtype: of the activations. resident: hold matrices in the kernels' own layout (the torch
    reference: expanded), which is faster and takes their size in memory; without it they are read
    from the mapped file at each use. exact_fp8: take FP8 values as fp32(w8) * scale; otherwise
    that product is rounded to bf16 once, as transformers does, and always held. The torch
    reference computes with matrices in the type of the activations, so for bf16 activations it
    rounds that product whatever exact_fp8 says; the compiled kernels never do.
    """

    store: WeightStore
    dtype: torch.dtype
    resident: bool = True
    exact_fp8: bool = True
    prefix: str = ""

    def at(self, name: str) -> Weights:
        """The weights below `name`."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def tensor(self, name: str) -> Tensor:
        """A tensor in the type of the activations."""
        return self._dense(name, self.dtype)

    def float(self, name: str) -> Tensor:
        """A tensor that is fp32 whatever the activations are."""
        return self._dense(name, torch.float32)

    def stored(self, name: str) -> Stored:
        """A matrix as the kernels take it: the stored tensor and its FP8 scales, or None."""
        path = self.prefix + name
        tensor, scale = self.store.tensor(path), self.store.scale(path)
        native = kernels.native() is not None
        if scale is not None:
            if self.exact_fp8 and (native or not self.resident):
                return tensor, scale
            return self._dense(name, torch.bfloat16 if native else self.dtype), None
        if not native or (tensor.dtype, self.dtype) == (torch.float32, torch.bfloat16):
            return self._dense(name, self.dtype), None
        return tensor, None

    def linear(self, *names: str) -> Weight:
        """Projections of one input; their outputs lie side by side."""
        parts = [self.stored(name) for name in names]
        kinds = {tensor.dtype for tensor, _ in parts}
        if torch.float32 in kinds and len(kinds) > 1:  # the kernels do not mix it with others
            parts = [(self.float(name), None) for name in names]
        return Weight.of(*parts, packed=self.resident)

    def _dense(self, name: str, dtype: torch.dtype) -> Tensor:
        rounding: Literal["none", "bf16"] = "none" if self.exact_fp8 else "bf16"
        return self.store.dense(self.prefix + name, dtype, rounding).contiguous()
