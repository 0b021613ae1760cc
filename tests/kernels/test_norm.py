"""RMSNorm and clamped SwiGLU against fp64 arithmetic with the same roundings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.norm import reference, rms_norm, swiglu

TYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 3, 15, 16, 17, 128, 1536, 4096]


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within_rounding(y: Tensor, expected: Tensor) -> None:
    """fp32: 1e-5 relative. bf16: a step per rounding (two) where a value sits on a border."""
    if y.dtype == torch.float32:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-30)
        return
    torch.testing.assert_close(y, expected, rtol=2**-6, atol=1e-38)
    assert (y == expected).float().mean() > 0.99 or y.numel() < 1000


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 70])
def test_rms_norm(kernel_set, threads, rows, n, dtype):
    wide = rand(rows, n + 5, dtype=dtype)
    wide[0] *= 1e-20
    x, weight = wide[:, 3 : 3 + n], rand(n + 1, dtype=dtype, seed=1)[1:]
    y = rms_norm(x, weight, 1e-5, kernel_set=kernel_set)
    assert_within_rounding(y, reference.rms_norm(x, weight, 1e-5, torch.float64))
    alone = torch.cat([rms_norm(r[None], weight, 1e-5, kernel_set=kernel_set) for r in x])
    assert torch.equal(y, alone)
    assert torch.equal(rms_norm(x, weight, 1e-5, out=x, kernel_set=kernel_set), y)
    assert torch.equal(wide[:, 3 : 3 + n], y)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_swiglu(kernel_set, threads, rows, n, dtype):
    both = rand(rows, 2 * n, dtype=dtype) * 8  # some beyond the limit, on both sides
    gate, up = both.split(n, dim=1)
    y = swiglu(gate, up, 10.0, kernel_set=kernel_set)
    assert_within_rounding(y, reference.swiglu(gate, up, 10.0, torch.float64))


def test_swiglu_extremes(kernel_set):
    gate = torch.tensor([[0.0, -0.0, 1e4, -80.0, 10.0, 1e-42, 3.0, torch.nan]])
    up = torch.tensor([[1.0, 1.0, -1e4, 1.0, 1e4, 1.0, torch.inf, 1.0]])
    y = swiglu(gate, up, 10.0, kernel_set=kernel_set)
    expected = reference.swiglu(gate, up, 10.0, torch.float64)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-33, equal_nan=True)


def test_misfits_are_errors(kernel_set):
    x = rand(2, 8, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, x[0, :4], 1e-5, kernel_set=kernel_set)
    with pytest.raises(ValueError, match="dense rows"):
        rms_norm(x.T, x[0, :2], 1e-5, kernel_set=kernel_set)
    with pytest.raises(ValueError, match="float16"):
        rms_norm(x.half(), x[0].half(), 1e-5, kernel_set=kernel_set)
    with pytest.raises(ValueError, match="dense rows"):
        swiglu(x, x[:1], 10.0, kernel_set=kernel_set)
