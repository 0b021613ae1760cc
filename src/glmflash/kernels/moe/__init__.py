"""Mixture of experts, or one dense MLP: clamped SwiGLU, tokens grouped by expert, one call.

Knows the experts of one layer and how to run any subset of them; the router is not its business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear import matrix_row, pack
from glmflash.kernels.linear.reference import quick
from glmflash.kernels.moe import reference
from glmflash.kernels.moe.reference import Expert

__all__ = ["Expert", "Experts", "moe"]

_COLUMNS = 6  # of a matrix in the kernel's table


@dataclass(frozen=True)
class Experts:
    """The experts of one layer, as a kernel call wants them.

    routed: per expert its gate, up `[inner, D]` and down `[D, inner]` matrices, each with FP8
        scales or None; None for an expert whose weights are absent and that no token may choose.
    shared: an expert that sees every token with weight 1; alone, it is a dense MLP.
    packed: held in the layout of the kernel set: faster, and the same memory again.
    """

    routed: tuple[Expert | None, ...]
    shared: Expert | None
    width: int
    kernel_set: str
    fp32: bool
    module: ModuleType | None = field(repr=False)
    table: Tensor = field(repr=False)
    held: tuple[Tensor, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        routed: Sequence[Expert | None] = (),
        shared: Expert | None = None,
        packed: bool = False,
        kernel_set: str | None = None,
    ) -> Experts:
        """Prepare the experts of a layer.

        Raises ValueError on shapes and types that do not fit, ResourceError on a kernel set that
        does not run here.
        """
        everyone = (*routed, shared)
        present = [expert for expert in everyone if expert]
        if not present:
            raise ValueError("a layer needs at least one expert")
        width = present[0][0][0].shape[1]
        kinds = {weight.dtype for expert in present for weight, _ in expert}
        if torch.float32 in kinds and len(kinds) > 1:
            raise ValueError("FP32 experts cannot share a layer with FP8 or BF16 ones")
        module = kernels.native(kernel_set)
        table = torch.zeros(len(everyone), 3, _COLUMNS, dtype=torch.int64)
        held: list[Tensor] = []
        for rows, expert in zip(table, everyone, strict=True):
            if expert:
                _check(expert, width)
                for row, (weight, scale) in zip(rows, expert, strict=True):
                    values, tensors = matrix_row(weight, scale)
                    row[:] = torch.tensor(values)
                    held += tensors
                    if module and packed:
                        held.append(pack(module, row, weight))
        return cls(
            routed=tuple(routed),
            shared=shared,
            width=width,
            kernel_set=kernel_set or kernels.active(),
            fp32=torch.float32 in kinds,
            module=module,
            table=table,
            held=tuple(held),
        )


def _check(expert: Expert, width: int) -> None:
    gate, up, down = (tuple(weight.shape) for weight, _ in expert)
    inner = gate[0]
    if (gate, up, down) != ((inner, width), (inner, width), (width, inner)):
        raise ValueError(
            f"an expert has gate and up [inner, {width}] and down [{width}, inner], not "
            f"{gate}, {up} and {down}"
        )


def moe(
    x: Tensor,
    experts: Experts,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    *,
    limit: float,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`[T, D]` to `[T, D]`: shared(x) + sum over a token's experts of weight * expert(x).

    x: bf16 or fp32, rows dense. As in `linear`, bf16 with FP8 or BF16 weights multiplies bf16
        values exactly, the hidden values being rounded to bf16; all else is fp32.
    ids, weights: int64 and fp32 `[T, top_k]`; ids lie in [0, len(routed)).
    limit: the gate is clamped from above, up from both sides.
    out, dtype: where y goes, or its type (bf16 or fp32; x's own by default). Experts are summed in
        fp32, the shared one first, then by ascending id, and rounded once.
    A row of y depends on its row of x alone. Raises ValueError on shapes and types that do not
    fit, IndexError on an id out of range, RuntimeError on an expert without weights.
    """
    if (
        x.dim() != 2
        or x.shape[1] != experts.width
        or x.dtype not in (torch.bfloat16, torch.float32)
    ):
        raise ValueError(
            f"x must be bf16 or fp32 [T, {experts.width}], not {x.dtype} {tuple(x.shape)}"
        )
    if (ids is None) != (weights is None):
        raise ValueError("ids and weights come together")
    if experts.module is None:
        y = reference.moe(x, experts.routed, ids, weights, limit, experts.shared, quick)
        return y.to(dtype or x.dtype) if out is None else out.copy_(y)
    tokens, top_k = len(x), 0
    if ids is not None and weights is not None:
        top_k = ids.shape[-1]
        ids, weights = ids.contiguous(), weights.contiguous()
        shapes = {tuple(ids.shape), tuple(weights.shape), (tokens, top_k)}
        if len(shapes) > 1 or ids.dtype != torch.int64 or weights.dtype != torch.float32:
            raise ValueError(
                f"ids and weights must be int64 and fp32 [{tokens}, top_k], not {ids.dtype} "
                f"{tuple(ids.shape)} and {weights.dtype} {tuple(weights.shape)}"
            )
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=dtype or x.dtype)
    if (
        out.shape != x.shape
        or out.stride(1) != 1
        or out.dtype not in (torch.bfloat16, torch.float32)
    ):
        raise ValueError(
            f"out must be bf16 or fp32 {tuple(x.shape)}, not {out.dtype} {tuple(out.shape)}"
        )
    is_bf16 = x.dtype == torch.bfloat16
    experts.module.moe(
        experts.table.data_ptr(),
        len(experts.routed),
        experts.shared is not None,
        x.data_ptr(),
        is_bf16,
        tokens,
        experts.width,
        x.stride(0),
        top_k,
        0 if ids is None else ids.data_ptr(),
        0 if weights is None else weights.data_ptr(),
        limit,
        is_bf16 and not experts.fp32,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        out.stride(0),
    )
    return out
