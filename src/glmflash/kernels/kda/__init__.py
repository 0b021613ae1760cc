"""Kimi delta attention between its projections: convolution, gates, delta rule, gated norm.

Knows one call for any mixture of sequences, each with any number of new tokens; does not know the
projections around it. The result of a token does not depend on how a sequence is cut into calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.checks import check_rows, check_tensor, is_bf16
from glmflash.kernels.kda import blocked

__all__ = ["Kda", "State", "kda"]

State = tuple[Tensor, Tensor]
MOST_TAPS = 4  # of the compiled kernels


@dataclass(frozen=True)
class Kda:
    """What a KDA layer owns besides its projections; all contiguous fp32.

    conv: `[taps, 3*H*d]`, channels of q, k, v; the last tap meets the current token. rate: `[H]`,
    exp(A_log). dt_bias: `[H*d]`. norm: `[d]`, of the output. lower_bound: of the log decay.
    Raises ValueError on shapes and types that do not fit.
    """

    conv: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    lower_bound: float
    eps: float
    kernel_set: str | None = None

    def __post_init__(self) -> None:
        taps, channels = len(self.conv), self.heads * self.dim
        check_tensor("conv", self.conv, (taps, 3 * channels), torch.float32)
        check_tensor("rate", self.rate, (self.heads,), torch.float32)
        check_tensor("dt_bias", self.dt_bias, (channels,), torch.float32)
        check_tensor("norm", self.norm, (self.dim,), torch.float32)
        if taps < 2:
            raise ValueError(f"a convolution has at least 2 taps, not {taps}")

    @property
    def heads(self) -> int:
        """H."""
        return len(self.rate)

    @property
    def dim(self) -> int:
        """d, of keys and values alike."""
        return len(self.norm)


def kda(
    layer: Kda,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    states: Sequence[State],
    counts: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Raw projections of T tokens to `[T, H*d]`, the input of the output projection.

    qkv: `[T, 3*H*d]`. decay: `[T, H*d]`, f_b of f_a. beta: `[T, H]`. gate: `[T, H*d]`, g_b of g_a.
    All bf16 or all fp32, rows dense, any row stride: parts of one wide projection will do.
    states: one (conv `[taps-1, 3*H*d]` in that type, recurrent `[H, d, d]` fp32) per sequence,
    both changed in place. counts: how many of the rows each sequence owns, in order; without it
    one sequence owns all.

    Rounded to the type of qkv: SiLU of the convolution, sigmoid of beta, what the recurrence
    reads out, and the result. All else is fp32. Raises ValueError on shapes and types that do not
    fit.
    """
    rows, heads, dim = len(qkv), layer.heads, layer.dim
    counts = [rows] if counts is None else counts
    if len(states) != len(counts) or sum(counts) != rows:
        raise ValueError(f"{len(states)} states and counts {list(counts)} for {rows} rows")
    if out is None:
        out = torch.empty(rows, heads * dim, dtype=qkv.dtype)
    taps = len(layer.conv)
    module = kernels.native(layer.kernel_set) if taps <= MOST_TAPS else None
    if module is None:
        return out.copy_(blocked.kda(layer, qkv, decay, beta, gate, states, counts))
    check_rows(rows, 3 * heads * dim, qkv.dtype, qkv)
    check_rows(rows, heads * dim, qkv.dtype, decay, gate, out)
    check_rows(rows, heads, qkv.dtype, beta)
    for conv, recurrent in states:
        check_tensor("conv state", conv, (taps - 1, 3 * heads * dim), qkv.dtype)
        check_tensor("state", recurrent, (heads, dim, dim), torch.float32)
    module.kda(
        is_bf16(qkv),
        *(qkv.data_ptr(), qkv.stride(0), decay.data_ptr(), decay.stride(0)),
        *(beta.data_ptr(), beta.stride(0), gate.data_ptr(), gate.stride(0)),
        *(out.data_ptr(), out.stride(0), layer.conv.data_ptr(), layer.rate.data_ptr()),
        *(layer.dt_bias.data_ptr(), layer.norm.data_ptr(), heads, dim, taps),
        *(layer.lower_bound, layer.eps, counts),
        *([c.data_ptr() for c, _ in states], [r.data_ptr() for _, r in states]),
    )
    return out
