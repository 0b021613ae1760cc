"""The expert kernels against fp64 arithmetic, and against themselves: bitwise row invariance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear.reference import Stored
from glmflash.kernels.moe import Expert, Experts, moe

from .test_linear import TYPES, exact, make

NATIVE = [name for name in kernels.available() if name != kernels.REFERENCE]
LIMIT = 0.7


@pytest.fixture(params=NATIVE)
def kernel_set(request: pytest.FixtureRequest) -> Iterator[str]:
    yield str(request.param)
    kernels.set_threads(0)


def make_expert(kind: str, width: int, inner: int, seed: int) -> Expert:
    def part(n: int, k: int, offset: int) -> Stored:
        return make(kind, n, k, seed * 3 + offset)

    return part(inner, width, 0), part(inner, width, 1), part(width, inner, 2)


def choose(tokens: int, top_k: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, count, generator=g).topk(top_k).indices
    return ids, torch.rand(tokens, top_k, generator=g) * 2


def run(x: Tensor, weights: Expert) -> tuple[Tensor, Tensor]:
    """fp64 result of one expert, and a bound of its rounding in the given type of x."""
    gate, up, down = (exact(*stored) for stored in weights)
    g, u = x.double() @ gate.T, x.double() @ up.T
    hidden = torch.nn.functional.silu(g.clamp(max=LIMIT)) * u.clamp(-LIMIT, LIMIT)
    step = 2.0**-8 if x.dtype == torch.bfloat16 else 1e-5
    bound = (step * hidden.abs() + 3e-6) @ down.abs().T
    return hidden @ down.T, bound


def check(
    y: Tensor,
    x: Tensor,
    experts: Sequence[Expert | None],
    ids: Tensor,
    weights: Tensor,
    shared: Expert | None,
) -> None:
    total, bound = run(x, shared) if shared else (torch.zeros(x.shape).double(),) * 2
    for e in ids.unique().tolist():
        w = (weights.double() * (ids == e)).sum(1, keepdim=True)
        value, slack = run(x, experts[e])  # type: ignore[arg-type]
        total, bound = total + w * value, bound + w.abs() * slack
    bound = bound + 1e-6 * total.abs()
    if y.dtype == torch.bfloat16:
        bound = bound + 2.0**-8 * total.abs()
    assert bool(((y.double() - total).abs() <= bound).all())


@pytest.mark.parametrize("x_type", TYPES)
@pytest.mark.parametrize("kind", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("with_shared", [False, True])
def test_equals_fp64(kernel_set: str, kind: str, x_type: torch.dtype, with_shared: bool) -> None:
    for width, inner, tokens in [(130, 72, 1), (256, 128, 5), (96, 200, 23)]:
        experts = [make_expert(kind, width, inner, seed) for seed in range(6)]
        shared = make_expert(kind, width, inner + 30, 9) if with_shared else None
        prepared = Experts.of(experts, shared, kernel_set=kernel_set)
        x = torch.randn(tokens, width).to(x_type)
        ids, weights = choose(tokens, 3, len(experts))
        y = moe(x, prepared, ids, weights, limit=LIMIT)
        check(y, x, experts, ids, weights, shared)


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_row_depends_on_nothing_but_itself(kernel_set: str, kind: str) -> None:
    width, inner, tokens = 160, 136, 80
    experts = [make_expert(kind, width, inner, seed) for seed in range(5)]
    shared = make_expert(kind, width, inner, 9)
    x = torch.randn(tokens, width).bfloat16()
    ids, weights = choose(tokens, 2, len(experts))
    kernels.set_threads(1)
    prepared = Experts.of(experts, shared, kernel_set=kernel_set)
    alone = torch.cat(
        [
            moe(x[t : t + 1], prepared, ids[t : t + 1], weights[t : t + 1], limit=LIMIT)
            for t in range(tokens)
        ]
    )
    for packed in (False, True):
        prepared = Experts.of(experts, shared, packed=packed, kernel_set=kernel_set)
        for threads in (1, 2):
            kernels.set_threads(threads)
            for m in (2, 3, 7, 20, 33, tokens):
                y = moe(x[:m], prepared, ids[:m], weights[:m], limit=LIMIT)
                assert torch.equal(y, alone[:m])


def test_order_of_choice_does_not_matter(kernel_set: str) -> None:
    experts = [make_expert("fp8", 128, 128, seed) for seed in range(4)]
    prepared = Experts.of(experts, kernel_set=kernel_set)
    x = torch.randn(9, 128).bfloat16()
    ids, weights = choose(9, 4, 4)
    y = moe(x, prepared, ids, weights, limit=LIMIT)
    assert torch.equal(y, moe(x, prepared, ids.flip(1), weights.flip(1), limit=LIMIT))


def test_more_tokens_than_one_pass(kernel_set: str) -> None:
    experts = [make_expert("bf16", 64, 32, seed) for seed in range(2)]
    prepared = Experts.of(experts, make_expert("bf16", 64, 32, 7), kernel_set=kernel_set)
    x = torch.randn(1300, 64).bfloat16()
    ids, weights = choose(1300, 1, 2)
    ids[:1200] = 0
    y = moe(x, prepared, ids, weights, limit=LIMIT)
    for begin in range(0, 1300, 130):
        part = slice(begin, begin + 130)
        assert torch.equal(y[part], moe(x[part], prepared, ids[part], weights[part], limit=LIMIT))


def test_dense_mlp_and_empty_sets(kernel_set: str) -> None:
    shared = make_expert("fp8", 128, 256, 1)
    x = torch.randn(6, 128).bfloat16()
    none = torch.zeros(6, 0, dtype=torch.int64), torch.zeros(6, 0)
    mlp = Experts.of(shared=shared, kernel_set=kernel_set)
    y = moe(x, mlp, limit=LIMIT)
    check(y, x, [], *none, shared)
    routed = Experts.of([make_expert("fp8", 128, 64, 2)], shared, kernel_set=kernel_set)
    assert torch.equal(moe(x, routed, *none, limit=LIMIT), y)
    alone = Experts.of([make_expert("fp8", 128, 64, 2)], kernel_set=kernel_set)
    assert not moe(x, alone, *none, limit=LIMIT).any()
    assert moe(x[:0], routed, none[0][:0], none[1][:0], limit=LIMIT).shape == (0, 128)


def test_absent_experts(kernel_set: str) -> None:
    experts = [None, make_expert("fp8", 128, 64, 2), None]
    prepared = Experts.of(experts, kernel_set=kernel_set)
    x = torch.randn(2, 128).bfloat16()
    ids, weights = torch.tensor([[1], [1]]), torch.ones(2, 1)
    check(moe(x, prepared, ids, weights, limit=LIMIT), x, experts, ids, weights, None)
    with pytest.raises(RuntimeError, match="expert 2 has no weights"):
        moe(x, prepared, ids + 1, weights, limit=LIMIT)
    for wrong in (-1, 3):
        with pytest.raises(IndexError, match=f"expert id {wrong} of 3"):
            moe(x, prepared, torch.full((2, 1), wrong), weights, limit=LIMIT)


def test_reference() -> None:
    experts = [make_expert("fp8", 96, 64, seed) for seed in range(4)]
    shared = make_expert("fp8", 96, 64, 9)
    prepared = Experts.of(experts, shared, kernel_set=kernels.REFERENCE)
    x = torch.randn(7, 96)
    ids, weights = choose(7, 2, 4)
    check(moe(x, prepared, ids, weights, limit=LIMIT), x, experts, ids, weights, shared)


def test_calls_that_do_not_fit() -> None:
    prepared = Experts.of([make_expert("bf16", 32, 16, 0)])
    x = torch.zeros(2, 32)
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    with pytest.raises(ValueError, match="x must be"):
        moe(x[:, :31], prepared, ids, weights, limit=1)
    with pytest.raises(ValueError, match="ids and weights must be"):
        moe(x, prepared, ids.int(), weights, limit=1)
    with pytest.raises(ValueError, match="ids and weights must be"):
        moe(x, prepared, ids[:1], weights, limit=1)
    with pytest.raises(ValueError, match="come together"):
        moe(x, prepared, ids, limit=1)
    with pytest.raises(ValueError, match="an expert has gate"):
        Experts.of([(make("bf16", 16, 32), make("bf16", 16, 32), make("bf16", 16, 32))])
    with pytest.raises(ValueError, match="at least one"):
        Experts.of()
