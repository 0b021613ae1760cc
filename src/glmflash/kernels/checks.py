"""What every native call needs of its activations, checked before addresses leave Python."""

from __future__ import annotations

import torch
from torch import Tensor


def is_bf16(x: Tensor) -> bool:
    """Whether x is bf16 rather than fp32. Raises ValueError if it is neither."""
    if x.dtype == torch.bfloat16:
        return True
    if x.dtype != torch.float32:
        raise ValueError(f"kernels take bfloat16 or float32, not {x.dtype}")
    return False


def check_rows(rows: int, width: int, dtype: torch.dtype, *matrices: Tensor) -> None:
    """Raise ValueError unless each matrix is `[rows, width]` of `dtype`, dense within a row."""
    for x in matrices:
        if x.shape != (rows, width) or x.dtype != dtype or (x.stride(1) != 1 and width > 1):
            raise ValueError(
                f"expected dense rows [{rows}, {width}] of {dtype}, not {list(x.shape)} {x.dtype} "
                f"with strides {x.stride()}"
            )


def check_tensor(what: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless x is contiguous and of this shape and type."""
    if x.shape != shape or x.dtype != dtype or not x.is_contiguous():
        raise ValueError(
            f"{what} must be contiguous {dtype} {list(shape)}, not {x.dtype} {list(x.shape)}"
        )
