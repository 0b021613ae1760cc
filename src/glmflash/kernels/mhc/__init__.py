"""One site of the manifold-constrained hyper-connections (mHC): between two blocks.

Knows how a block's output joins the residual streams and how the next block's input leaves them;
the blocks are not its business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_tensor, is_bf16
from glmflash.kernels.mhc import reference

__all__ = ["Site", "mean", "site"]


@dataclass(frozen=True)
class Site:
    """Weights of a site for N streams of width D, and of the RMSNorm behind it.

    fn: `[N*(N+2), N*D]` bf16 or fp32, rows: pre, post, mix (source major). base `[N*(N+2)]` and
    scale `[3]` fp32. norm: `[D]` in the type of the streams, None for the bare collapse.
    Raises ValueError on shapes and types that do not fit.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor | None
    iterations: int
    eps: float
    norm_eps: float
    kernel_set: str | None = None

    def __post_init__(self) -> None:
        n = self.streams
        check_tensor("base", self.base, (n * (n + 2),), torch.float32)
        check_tensor("scale", self.scale, (3,), torch.float32)
        is_bf16(self.fn)
        if not 1 <= n <= 8 or self.fn.shape[1] % n or not self.fn.is_contiguous():
            raise ValueError(f"fn must be contiguous [N*(N+2), N*D], N <= 8, not {self.fn.shape}")

    @property
    def streams(self) -> int:
        """N, from the number of rows."""
        return int((len(self.fn) + 1) ** 0.5) - 1


def site(
    layer: Site,
    streams: Tensor,
    routing: Tensor,
    y: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Spread y over the streams, then collapse them: the next block's normalised input `[T, D]`.

    streams: `[T, N, D]`, bf16 or fp32, changed in place where y is given. y: `[T, D]`, the output
    of the block whose routing `[T, N + N*N]` (fp32: post, then mix) is in `routing`; afterwards
    `routing` holds that of the next block. Everything between is fp32; the streams, the collapsed
    row, its norm and its product with the norm's weight are rounded to the type of the streams.
    Raises ValueError on shapes and types that do not fit.
    """
    if out is None:
        out = torch.empty(len(streams), streams.shape[2], dtype=streams.dtype)
    module = kernels.native(layer.kernel_set)
    if module is None:
        return out.copy_(reference.site(layer, streams, routing, y))
    tokens, n, dim = _check(streams, routing, y, layer.norm, out)
    if layer.fn.shape != (n * (n + 2), n * dim):
        raise ValueError(f"a site of {list(layer.fn.shape)} does not fit {n} streams of {dim}")
    module.mhc(
        *(is_bf16(streams), layer.fn.dtype == torch.bfloat16, tokens, n, dim, streams.data_ptr()),
        *(_address(y), routing.data_ptr(), layer.fn.data_ptr(), layer.base.data_ptr()),
        *(layer.scale.data_ptr(), _address(layer.norm), out.data_ptr()),
        *(layer.iterations, layer.eps, layer.norm_eps),
    )
    return out


def mean(
    streams: Tensor,
    routing: Tensor,
    y: Tensor,
    norm: Tensor | None,
    norm_eps: float,
    kernel_set: str | None = None,
) -> Tensor:
    """The end of the trunk: spread y as `site` does, then the normalised mean of the streams."""
    module = kernels.native(kernel_set)
    if module is None:
        return reference.mean(streams, routing, y, norm, norm_eps)
    out = torch.empty(len(streams), streams.shape[2], dtype=streams.dtype)
    tokens, n, dim = _check(streams, routing, y, norm, out)
    module.mhc(
        *(is_bf16(streams), False, tokens, n, dim, streams.data_ptr(), y.data_ptr()),
        *(routing.data_ptr(), 0, 0, 0, _address(norm), out.data_ptr(), 0, 0.0, norm_eps),
    )
    return out


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _check(
    streams: Tensor, routing: Tensor, y: Tensor | None, norm: Tensor | None, out: Tensor
) -> tuple[int, int, int]:
    tokens, n, dim = streams.shape
    if not streams.is_contiguous():
        raise ValueError("streams must be contiguous: they are changed in place")
    check_tensor("routing", routing, (tokens, n + n * n), torch.float32)
    check_tensor("out", out, (tokens, dim), streams.dtype)
    if y is not None:
        check_tensor("y", y, (tokens, dim), streams.dtype)
    if norm is not None:
        check_tensor("norm", norm, (dim,), streams.dtype)
    return tokens, n, dim
