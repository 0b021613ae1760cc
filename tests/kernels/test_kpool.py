"""The pooled indexer against fp64 arithmetic, its tie rule, and against itself bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.kpool import Pooling, append, reference, score, select

TYPES = [torch.float32, torch.bfloat16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_pooling(kpool: int, dim: int, dtype: torch.dtype, kernel_set: str) -> Pooling:
    g = generator(0)
    norm, bias = (torch.randn(dim, generator=g).to(dtype) for _ in range(2))
    return Pooling(norm, bias, torch.randn(kpool, dim, generator=g).to(dtype), 1e-6, kernel_set)


def take_all(
    layer: Pooling, keys: Tensor, gates: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Finished pools and the waiting members after calls of these sizes."""
    waiting, count, pools = torch.zeros(*layer.ape.shape, dtype=keys.dtype), 0, []
    waiting = waiting.unsqueeze(1).repeat(1, 2, 1)
    for k, g in zip(keys.split(sizes), gates.split(sizes), strict=True):
        done, count = append(layer, k, g, waiting, count)
        pools.append(done)
    return torch.cat(pools), waiting[:count]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kpool", "dim"), [(4, 128), (4, 33), (1, 16), (2, 8), (16, 24)])
def test_append(kernel_set, kpool, dim, dtype):
    layer = make_pooling(kpool, dim, dtype, kernel_set)
    tokens = 71
    wide = torch.randn(tokens, 2 * dim + 3, generator=generator(1)).to(dtype)
    keys, gates = wide[:, 3:].split(dim, dim=1)
    pools, waiting = take_all(layer, keys, gates, [tokens])
    empty = torch.zeros(kpool, 2, dim, dtype=dtype)
    expected, left = reference.append(layer, keys, gates, empty, 0, torch.float64)
    assert (len(pools), len(waiting)) == (tokens // kpool, left)
    bound = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 0.03}
    )
    torch.testing.assert_close(pools, expected, **bound)
    torch.testing.assert_close(waiting, empty[:left], **bound)
    assert (pools == expected).float().mean() > 0.97 or dtype == torch.float32
    for sizes in ([1] * tokens, [3, 1, 2, 65], [70, 1], [2, 40, 29]):
        again = take_all(layer, keys, gates, sizes)
        assert torch.equal(again[0], pools)
        assert torch.equal(again[1], waiting)


def make_queries(rows: int, heads: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Strided queries `[rows, heads*dim]` and signed head weights `[rows, heads]`."""
    wide = torch.randn(rows, heads * (dim + 1) + 1, generator=generator(2)).to(dtype)
    queries, weights = wide[:, 1:].split([heads * dim, heads], dim=1)
    return queries, weights


def make_pools(count: int, dim: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, dim, generator=generator(3)).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("heads", "dim"), [(32, 128), (12, 64), (5, 33), (1, 8), (50, 20)])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_scores(kernel_set, threads, rows, heads, dim, dtype):
    queries, weights = make_queries(rows, heads, dim, dtype)
    for count in (1, 7, 16, 17, 300):
        pools = make_pools(count, dim, dtype)
        scores = score(queries, weights, pools, kernel_set)
        scaled = weights.double() * (heads * dim) ** -0.5
        expected = reference.score(queries.contiguous(), scaled, pools).float()
        torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        alone = [
            score(q[None], w[None], pools[: count - count // 3], kernel_set)[0]
            for q, w in zip(queries, weights, strict=True)
        ]
        assert torch.equal(torch.stack(alone), scores[:, : count - count // 3])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize(("kpool", "top_pools"), [(4, 16), (1, 5), (2, 300)])
def test_select(kernel_set, threads, kpool, top_pools, tail, dtype):
    heads, dim, rows = 12, 32, 70
    queries, weights = make_queries(rows, heads, dim, dtype)
    pools = make_pools(1100, dim, dtype)
    for start in (0, 1, 5, 1000):
        args = {"kpool": kpool, "top_pools": top_pools, "tail": tail, "kernel_set": kernel_set}
        tokens = select(queries, weights, [pools], [start], **args)
        # judge the choice by the kernel's own scores: those are tested above
        scores = score(queries, weights, pools, kernel_set)
        for t, row in enumerate(tokens.tolist()):
            seen = start + t + 1
            visible = seen // kpool
            order = scores[t, :visible].sort(descending=True, stable=True).indices[:top_pools]
            expected = [p * kpool + m for p in sorted(order.tolist()) for m in range(kpool)]
            if tail:
                expected += range(visible * kpool, seen)
            assert row == expected + [-1] * (len(row) - len(expected))
        for size in (1, 3, 33):
            parts = [
                select(q, w, [pools], [start + i * size], **args)
                for i, (q, w) in enumerate(
                    zip(queries.split(size), weights.split(size), strict=True)
                )
            ]
            assert torch.equal(torch.cat(parts), tokens)


def test_sequences_together_as_alone(kernel_set, threads):
    queries, weights = make_queries(6, 12, 32, torch.bfloat16)
    pools = [make_pools(n, 32, torch.bfloat16) for n in (40, 3, 200)]
    starts, counts = [155, 0, 777], [1, 2, 3]
    args = {"kpool": 4, "top_pools": 8, "kernel_set": kernel_set}
    together = select(queries, weights, pools, starts, counts, **args)
    parts = zip(queries.split(counts), weights.split(counts), pools, starts, strict=True)
    alone = [select(q, w, [p], [s], **args) for q, w, p, s in parts]
    assert torch.equal(together, torch.cat(alone))


def test_equal_scores_keep_the_lower_pools(kernel_set):
    """Every pool is one of a few vectors, so most scores are equal; relu makes many of them 0."""
    heads, dim, rows = 3, 8, 40
    queries, weights = make_queries(rows, heads, dim, torch.float32)
    kinds = make_pools(3, dim, torch.float32)
    pools = kinds[torch.randint(0, 3, (500,), generator=generator(4))]
    args = {"kpool": 1, "top_pools": 200, "tail": False}
    tokens = select(queries, weights, [pools], [400], kernel_set=kernel_set, **args)
    kept = score(queries, weights, pools, kernel_set)
    for t, row in enumerate(tokens.tolist()):
        order = kept[t, : 401 + t].sort(descending=True, stable=True).indices[:200]
        assert row == sorted(order.tolist())


def test_zero_and_minus_zero_are_equal(kernel_set):
    """Scores of 0 and -0 (a negative head weight times a relu of 0) must not be told apart."""
    queries = -torch.ones(1, 8)
    pools = torch.ones(10, 8)
    weights = torch.tensor([[-1.0]])
    row = select(
        queries, weights, [pools], [9], kpool=1, top_pools=4, tail=False, kernel_set=kernel_set
    )
    assert row.tolist() == [[0, 1, 2, 3]]


def test_scores_of_every_size_are_ordered(kernel_set):
    """Huge, tiny, subnormal and negative scores: the choice is by value, not by bit pattern."""
    values = torch.tensor([0.0, -1e-40, 1e-40, -3e38, 3e38, 1.0, -1.0, 1e-20, -1e-20, 1e20])
    pools = torch.stack([values.clamp(min=0), (-values).clamp(min=0)], dim=1)
    queries, weights = torch.tensor([[2.0, 0.0, 0.0, 2.0]]), torch.tensor([[1.0, -1.0]])
    got = score(queries, weights, pools, kernel_set)[0]
    for top in range(1, 10):
        row = select(
            *(queries, weights, [pools], [9]),
            kpool=1, top_pools=top, tail=False, kernel_set=kernel_set,
        )
        order = got.sort(descending=True, stable=True).indices[:top]
        assert row[0].tolist() == sorted(order.tolist())


def test_misfits_are_errors(kernel_set):
    queries, weights = make_queries(2, 3, 8, torch.float32)
    pools, args = make_pools(3, 8, torch.float32), {"kpool": 4, "kernel_set": kernel_set}
    with pytest.raises(ValueError, match="too few"):
        select(queries, weights, [pools], [14], top_pools=2, **args)
    with pytest.raises(ValueError, match="sequences"):
        select(queries, weights, [pools], [1], [1], top_pools=2, **args)
    with pytest.raises(ValueError, match="pools"):
        select(queries, weights, [pools.bfloat16()], [1], top_pools=2, **args)
    layer = make_pooling(4, 8, torch.float32, kernel_set)
    with pytest.raises(ValueError, match="wait"):
        append(layer, pools, pools, torch.zeros(4, 2, 8), 4)
