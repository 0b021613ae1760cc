"""Latent attention against fp64 arithmetic, and against itself bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.mla import Latent, mla, reference

KINDS = [  # activations, kv_b
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
]
SHAPES = [  # heads, key_dim, value_dim, rank
    (4, 32, 32, 64),
    (2, 256, 128, 512),
    (3, 18, 26, 34),
    (1, 7, 5, 9),
    (20, 16, 40, 24),
]


def make(shape: tuple[int, int, int, int], dtype: torch.dtype, kernel_set: str) -> Latent:
    heads, key_dim, value_dim, rank = shape
    g = torch.Generator().manual_seed(0)
    kv_b = torch.randn(heads * (key_dim + value_dim), rank, generator=g) * rank**-0.5
    return Latent(kv_b.to(dtype), heads, key_dim, value_dim, kernel_set)


def make_queries(layer: Latent, rows: int, dtype: torch.dtype) -> Tensor:
    width = layer.heads * layer.key_dim
    g = torch.Generator().manual_seed(1)
    return torch.randn(rows, width + 2, generator=g).to(dtype)[:, 2:] * 2


def make_latents(layer: Latent, count: int, dtype: torch.dtype, seed: int = 2) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, layer.rank, generator=g).to(dtype)


def choose(rows: int, count: int, width: int) -> Tensor:
    """Ascending token ids of different number per row, -1 after the last; row 0 has none."""
    g = torch.Generator().manual_seed(3)
    tokens = torch.full((rows, width), -1, dtype=torch.int32)
    for t in range(1, rows):
        n = min(count, 1 + (t * 37) % width)
        tokens[t, :n] = torch.randperm(count, generator=g)[:n].sort().values
    return tokens


def assert_close(got: Tensor, expected: Tensor) -> None:
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        return
    # inside, a rounded value on a border may fall to the other side: an error of one step in one
    # of many summands
    size = expected.float().square().mean().sqrt().item()
    torch.testing.assert_close(got, expected, rtol=2**-7, atol=2**-7 * size)
    assert (got == expected).float().mean() > 0.5


@pytest.mark.parametrize(("dtype", "kv_type"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_causal(kernel_set, threads, shape, dtype, kv_type):
    layer = make(shape, kv_type, kernel_set)
    latents = make_latents(layer, 200, dtype)
    for rows, start in ((1, 0), (1, 199), (3, 62), (70, 0), (70, 130)):
        q = make_queries(layer, rows, dtype)
        args = (layer, q, [latents], [start])
        assert_close(mla(*args), reference.mla(*args, [rows], None, torch.float64))


@pytest.mark.parametrize(("dtype", "kv_type"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_selected(kernel_set, threads, shape, dtype, kv_type):
    layer = make(shape, kv_type, kernel_set)
    latents = make_latents(layer, 300, dtype)
    tokens = choose(40, 300, 135)
    q = make_queries(layer, 40, dtype)
    args = (layer, q, [latents], [260])
    out = mla(*args, tokens=tokens)
    assert_close(out, reference.mla(*args, [40], tokens, torch.float64))
    assert not out[0].any()
    one = mla(layer, q[7:8], [latents], [260], tokens=tokens[7:8])
    assert torch.equal(one[0], out[7])


@pytest.mark.parametrize(("dtype", "kv_type"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_cut_gives_the_same_bits(kernel_set, threads, shape, dtype, kv_type):
    layer = make(shape, kv_type, kernel_set)
    rows, start = 75, 66
    latents, q = make_latents(layer, start + rows, dtype), make_queries(layer, rows, dtype)
    whole = mla(layer, q, [latents], [start])
    tokens = torch.full((rows, start + rows), -1, dtype=torch.int32)
    for t in range(rows):
        tokens[t, : start + t + 1] = torch.arange(start + t + 1)
    assert torch.equal(mla(layer, q, [latents], [start], tokens=tokens), whole)
    for size in (1, 2, 3, 17, 64):
        parts = [
            mla(layer, part, [latents[: start + i * size + len(part)]], [start + i * size])
            for i, part in enumerate(q.split(size))
        ]
        assert torch.equal(torch.cat(parts), whole)


def test_sequences_together_as_alone(kernel_set, threads):
    layer = make((4, 32, 32, 64), torch.bfloat16, kernel_set)
    counts, starts = [1, 5, 1], [99, 0, 30]
    latents = [make_latents(layer, n, torch.bfloat16, n) for n in (100, 5, 40)]
    q = make_queries(layer, 7, torch.bfloat16)
    together = mla(layer, q, latents, starts, counts)
    parts = zip(q.split(counts), latents, starts, strict=True)
    assert torch.equal(together, torch.cat([mla(layer, p, [x], [s]) for p, x, s in parts]))


def test_large_scores(kernel_set):
    """Scores of some hundreds: the softmax must not overflow, the largest wins."""
    layer = make((2, 16, 16, 16), torch.float32, kernel_set)
    latents, q = make_latents(layer, 50, torch.float32) * 30, make_queries(layer, 3, torch.float32)
    args = (layer, q * 30, [latents], [47])
    out, expected = mla(*args), reference.mla(*args, [3], None, torch.float64)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


def test_misfits_are_errors(kernel_set):
    layer = make((2, 16, 16, 16), torch.float32, kernel_set)
    latents, q = make_latents(layer, 5, torch.float32), make_queries(layer, 3, torch.float32)
    with pytest.raises(ValueError, match="too few"):
        mla(layer, q, [latents], [3])
    with pytest.raises(ValueError, match="counts"):
        mla(layer, q, [latents], [0], [2])
    with pytest.raises(ValueError, match="tokens"):
        mla(layer, q, [latents], [0], tokens=torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="bf16 kv_b"):
        mla(layer, q.bfloat16(), [latents.bfloat16()], [0])
