"""Projections `y = x Wᵀ` of FP8-block, BF16 and FP32 weights.

Knows how to hand weights to the kernels, straight from a mapped file or packed for speed; knows
nothing about what a projection is for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear import reference
from glmflash.kernels.linear.reference import Stored

__all__ = ["Weight", "linear", "matrix_row", "pack"]

_KINDS = {torch.float8_e4m3fn: 0, torch.bfloat16: 1, torch.float32: 2}


@dataclass(frozen=True)
class Weight:
    """Matrices `[n_i, k]` that read the same x, as one kernel call wants them.

    parts: the stored tensors with their FP8 block scales (None for BF16 and FP32). They are
        referred to, not copied, unless `packed`.
    n: sum of n_i: the outputs lie side by side, in the order of `parts`.
    packed: held in the layout of the kernel set, which is faster and takes the same memory again.
        Results do not depend on it.
    kernel_set: whose kernels will run, see `glmflash.kernels`.
    """

    parts: tuple[Stored, ...]
    n: int
    k: int
    packed: bool
    kernel_set: str
    fp32: bool
    module: ModuleType | None = field(repr=False)
    table: Tensor = field(repr=False)
    held: tuple[Tensor, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        *parts: Stored,
        packed: bool = False,
        kernel_set: str | None = None,
    ) -> Weight:
        """Prepare weights, each with its FP8 scales or None.

        Raises ValueError on shapes and types that do not fit, ResourceError on a kernel set that
        does not run here.
        """
        if not parts or len({weight.shape[1] for weight, _ in parts}) != 1:
            raise ValueError("a Weight takes one or more matrices [n, k] of the same k")
        kinds = {weight.dtype for weight, _ in parts}
        if torch.float32 in kinds and len(kinds) > 1:
            raise ValueError("an FP32 matrix cannot share a Weight with FP8 or BF16 ones")
        module = kernels.native(kernel_set)
        rows = [matrix_row(weight, scale) for weight, scale in parts]
        held = tuple(tensor for _, tensors in rows for tensor in tensors)
        table = torch.tensor([row for row, _ in rows], dtype=torch.int64)
        if module and packed:
            pairs = zip(table, parts, strict=True)
            held += tuple(pack(module, row, weight) for row, (weight, _) in pairs)
        return cls(
            parts=parts,
            n=sum(weight.shape[0] for weight, _ in parts),
            k=parts[0][0].shape[1],
            packed=packed,
            kernel_set=kernel_set or kernels.active(),
            fp32=torch.float32 in kinds,
            module=module,
            table=table,
            held=held,
        )


def matrix_row(weight: Tensor, scale: Tensor | None) -> tuple[list[int], list[Tensor]]:
    """What a kernel's table says of a row-major matrix, and the tensors that must stay alive.

    Raises ValueError unless the weight is FP8 (e4m3) with scales, BF16 or FP32, its rows dense.
    """
    kind = _KINDS.get(weight.dtype)
    if kind is None or weight.dim() != 2 or weight.stride(1) != 1 or weight.stride(0) < 1:
        raise ValueError(
            f"a weight is FP8 (e4m3), BF16 or FP32 of shape [n, k] with dense rows, not "
            f"{weight.dtype} {tuple(weight.shape)} with strides {weight.stride()}"
        )
    n, k = weight.shape
    if kind != 0:
        if scale is not None:
            raise ValueError(f"block scales belong to FP8 weights, not to {weight.dtype}")
        return [weight.data_ptr(), 0, n, k, weight.stride(0), kind], [weight]
    blocks = (-(-n // reference.BLOCK), -(-k // reference.BLOCK))
    if scale is None or scale.shape != blocks or scale.dtype != torch.float32:
        found = "none" if scale is None else f"{scale.dtype} {tuple(scale.shape)}"
        raise ValueError(f"an FP8 weight {(n, k)} needs fp32 scales of shape {blocks}, not {found}")
    if not scale.is_contiguous() or scale.data_ptr() % 4:  # a mapped file may hold them anywhere
        scale = scale.clone(memory_format=torch.contiguous_format)
    return [weight.data_ptr(), scale.data_ptr(), n, k, weight.stride(0), kind], [weight, scale]


def pack(module: ModuleType, row: Tensor, weight: Tensor) -> Tensor:
    """Pack one matrix and let its table row point at the copy."""
    n, k = weight.shape
    rows, columns = -(-n // module.panel) * module.panel, -(-k // module.k_align) * module.k_align
    packed = torch.empty(rows * columns * weight.element_size(), dtype=torch.uint8)
    module.pack(row.data_ptr(), packed.data_ptr())
    row[0], row[4] = packed.data_ptr(), 0
    return packed


def linear(
    x: Tensor, weight: Weight, out: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """`[..., k]` to `[..., n]`.

    x: bf16 or fp32. bf16 with FP8 or BF16 weights multiplies bf16 values exactly; everything else
        is fp32 arithmetic. Sums are fp32 and are rounded once, to `dtype` (bf16 or fp32; x's own
        by default).
    out: a tensor `[rows, n]` to fill, dense along n, of the wanted type.
    A row of y depends on its row of x alone: not on the other rows, `packed`, or the threads.
    Raises ValueError on shapes and types that do not fit.
    """
    if x.shape[-1] != weight.k or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"x must be bf16 or fp32 [..., {weight.k}], not {x.dtype} {tuple(x.shape)}"
        )
    if weight.module is None:
        ys = [reference.quick(x, w, scale, dtype) for w, scale in weight.parts]
        y = ys[0] if len(ys) == 1 else torch.cat(ys, -1)
        return y if out is None else out.copy_(y.view(out.shape))
    rows = x if x.dim() == 2 else x.reshape(-1, weight.k)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    if out is None:
        out = torch.empty((*x.shape[:-1], weight.n), dtype=dtype or x.dtype)
        stride = weight.n
    else:
        if out.shape != (len(rows), weight.n) or out.stride(1) != 1:
            raise ValueError(f"out must be [{len(rows)}, {weight.n}], not {tuple(out.shape)}")
        stride = out.stride(0)
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"y is bf16 or fp32, not {out.dtype}")
    is_bf16 = x.dtype == torch.bfloat16
    weight.module.linear(
        weight.table.data_ptr(),
        len(weight.parts),
        rows.data_ptr(),
        is_bf16,
        len(rows),
        rows.stride(0),
        is_bf16 and not weight.fp32,
        out.data_ptr(),
        out.dtype == torch.bfloat16,
        stride,
    )
    return out
