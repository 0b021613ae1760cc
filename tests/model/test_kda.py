"""KDA: the chunked form against the recurrence as it is written."""

import pytest
import torch

from glmflash.model.kda import delta_rule_chunked, delta_rule_recurrent, short_convolution


def inputs(steps: int, heads: int, dim: int, gate: tuple[float, float], seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(steps, heads, dim, generator=rng) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    low, high = gate
    g = low + (high - low) * torch.rand(steps, heads, dim, generator=rng)
    beta = torch.rand(steps, heads, generator=rng)
    state = torch.randn(heads, dim, dim, generator=rng)
    return q, k, v, g, beta, state


@pytest.mark.parametrize("steps", [1, 3, 15, 16, 17, 63, 64, 65, 200])
@pytest.mark.parametrize("gate", [(-5.0, 0.0), (-5.0, -4.99), (-1e-3, 0.0)])
def test_chunked_equals_recurrent(steps: int, gate: tuple[float, float]) -> None:
    args = inputs(steps, heads=2, dim=128, gate=gate)
    expected, expected_state = delta_rule_recurrent(*(x.double() for x in args))
    out, state = delta_rule_chunked(*args)
    scale = expected_state.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5 * max(1.0, scale))
    torch.testing.assert_close(state.double(), expected_state, rtol=0, atol=1e-5 * max(1.0, scale))


def test_repeated_keys_stay_accurate() -> None:
    """The same key again and again with beta 1 and no decay: the worst case of the solve."""
    q, k, v, g, beta, state = inputs(64, 1, 32, (-1e-6, 0.0))
    k, beta = k[:1].expand_as(k), torch.ones_like(beta)
    args = (q, k, v, g, beta, state)
    expected, _ = delta_rule_recurrent(*(x.double() for x in args))
    out, _ = delta_rule_chunked(*args)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_convolution_equals_torch_and_is_causal() -> None:
    rng = torch.Generator().manual_seed(1)
    z, taps = torch.randn(9, 6, generator=rng), torch.randn(4, 6, generator=rng)
    left = torch.randn(3, 6, generator=rng)
    whole = torch.cat([left, z]).t().unsqueeze(0)
    expected = torch.nn.functional.conv1d(whole, taps.t().unsqueeze(1), groups=6)[0].t()
    expected = torch.nn.functional.silu(expected)
    torch.testing.assert_close(short_convolution(z, left, taps), expected)
    halves = [
        short_convolution(z[:5], left, taps),
        short_convolution(z[5:], torch.cat([left, z[:5]])[-3:], taps),
    ]
    torch.testing.assert_close(torch.cat(halves), expected)
