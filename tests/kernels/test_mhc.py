"""mHC sites against fp64 arithmetic with the same roundings, and against themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.mhc import Site, mean, reference, site

TYPES = [torch.float32, torch.bfloat16]


def make(n: int, dim: int, dtype: torch.dtype, fn_type: torch.dtype, kernel_set: str) -> Site:
    g = torch.Generator().manual_seed(0)
    rows = n * (n + 2)
    fn = (torch.randn(rows, n * dim, generator=g) * (n * dim) ** -0.5).to(fn_type)
    base, scale = torch.randn(rows, generator=g), torch.rand(3, generator=g) + 0.5
    norm = (torch.rand(dim, generator=g) + 0.5).to(dtype)
    return Site(fn, base, scale, norm, 20, 1e-6, 1e-5, kernel_set)


def tokens(count: int, n: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Streams, routing of the block before (positive weights), and that block's output."""
    g = torch.Generator().manual_seed(1)
    streams = torch.randn(count, n, dim, generator=g).to(dtype)
    routing = torch.rand(count, n + n * n, generator=g)
    return streams, routing, torch.randn(count, dim, generator=g).to(dtype)


def assert_close(got: Tensor, expected: Tensor) -> None:
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected.float(), rtol=1e-5, atol=1e-5)
        return
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=2**-8)
    assert (got == expected).float().mean() > 0.97


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("fn_type", TYPES)
@pytest.mark.parametrize(("n", "dim"), [(4, 64), (4, 1024), (2, 24), (1, 16), (3, 33), (8, 40)])
@pytest.mark.parametrize("count", [1, 3, 4, 21])
def test_equals_the_equations(kernel_set, threads, count, n, dim, fn_type, dtype):
    layer = make(n, dim, dtype, fn_type, kernel_set)
    streams, routing, y = tokens(count, n, dim, dtype)
    expected_streams, expected_routing = streams.clone(), routing.double()
    expected = reference.site(layer, expected_streams, expected_routing, y, torch.float64)
    got = site(layer, streams, routing, y)
    assert_close(streams, expected_streams)
    # a stream value on the other side of a rounding border moves z a little
    tolerance = 1e-5 if dtype == torch.float32 else 2e-4
    torch.testing.assert_close(routing.double(), expected_routing, rtol=tolerance, atol=tolerance)
    assert_close(got, expected)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("count", [1, 9])
def test_first_site_and_end_of_trunk(kernel_set, threads, count, dtype):
    layer = make(4, 96, dtype, dtype, kernel_set)
    streams, routing, y = tokens(count, 4, 96, dtype)
    before, expected_routing = streams.clone(), routing.double()
    expected = reference.site(layer, streams, expected_routing, None, torch.float64)
    assert_close(site(layer, streams, routing), expected)
    assert torch.equal(streams, before)
    expected = reference.mean(before, expected_routing, y, layer.norm, 1e-5, torch.float64)
    assert_close(mean(streams, routing, y, layer.norm, 1e-5, kernel_set), expected)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_does_not_see_the_others(kernel_set, threads, dtype):
    layer = make(4, 530, dtype, torch.bfloat16, kernel_set)
    streams, routing, y = tokens(23, 4, 530, dtype)
    whole = streams.clone(), routing.clone()
    x = site(layer, *whole, y)
    for size in (1, 2, 3, 4, 7):
        part = streams.clone(), routing.clone()
        pieces = zip(part[0].split(size), part[1].split(size), y.split(size), strict=True)
        assert torch.equal(torch.cat([site(layer, *piece) for piece in pieces]), x)
        assert torch.equal(part[0], whole[0])
        assert torch.equal(part[1], whole[1])


def test_mixing_is_doubly_stochastic(kernel_set):
    layer = make(4, 64, torch.float32, torch.float32, kernel_set)
    streams, routing, _ = tokens(5, 4, 64, torch.float32)
    site(layer, streams, routing)
    mix = routing[:, 4:].view(5, 4, 4)
    torch.testing.assert_close(mix.sum(1), torch.ones(5, 4), rtol=0, atol=1e-5)
    torch.testing.assert_close(mix.sum(2), torch.ones(5, 4), rtol=0, atol=1e-3)


def test_misfits_are_errors(kernel_set):
    layer = make(4, 16, torch.float32, torch.float32, kernel_set)
    streams, routing, y = tokens(2, 4, 16, torch.float32)
    with pytest.raises(ValueError, match="routing"):
        site(layer, streams, routing[:, :5], y)
    with pytest.raises(ValueError, match="contiguous"):
        site(layer, streams.transpose(1, 2), routing, y)
    two_streams = tokens(2, 2, 16, torch.float32)
    with pytest.raises(ValueError, match="does not fit"):
        site(layer, *two_streams)
