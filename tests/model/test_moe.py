"""The clamped SwiGLU by hand: the gate is clamped above only, up on both sides."""

import math

import torch

from glmflash.model.moe import clamped_swiglu


def test_clamps() -> None:
    gate = torch.tensor([50.0, -50.0, 1.0, 1.0])
    up = torch.tensor([1.0, 1.0, 50.0, -50.0])
    silu_one = 1 / (1 + math.exp(-1))
    expected = torch.tensor([10 / (1 + math.exp(-10)), -50 * math.exp(-50), 10 * silu_one,
                             -10 * silu_one])  # fmt: skip
    torch.testing.assert_close(clamped_swiglu(gate, up, 10.0), expected)
