"""Kimi delta attention against the equations in fp64, and bit for bit against itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.kda import Kda, State, kda, reference


def make(kernel_set: str, heads: int, dim: int, taps: int = 4) -> Kda:
    g = torch.Generator().manual_seed(0)
    return Kda(
        torch.randn(taps, 3 * heads * dim, generator=g),
        torch.rand(heads, generator=g) + 0.5,
        torch.randn(heads * dim, generator=g),
        torch.rand(dim, generator=g) + 0.5,
        lower_bound=-5.0,
        eps=1e-5,
        kernel_set=kernel_set,
    )


def inputs(w: Kda, rows: int, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    n = w.heads * w.dim
    # one wide buffer: the matrices are strided views of it, as after a fused projection
    wide = torch.randn(rows, 5 * n + w.heads + 1, generator=g).to(dtype)
    return list(wide[:, 1:].split([3 * n, n, w.heads, n], dim=1))


def empty(w: Kda, dtype: torch.dtype, seed: int | None = None) -> State:
    conv = torch.zeros(len(w.conv) - 1, w.conv.shape[1], dtype=dtype)
    state = torch.zeros(w.heads, w.dim, w.dim)
    if seed is not None:
        g = torch.Generator().manual_seed(seed)
        conv.normal_(generator=g)
        state.normal_(generator=g)
    return conv, state


def copy(state: State) -> State:
    return state[0].clone(), state[1].clone()


SHAPES = [(1, 8, 4), (3, 16, 4), (2, 24, 2), (1, 33, 3), (2, 64, 4), (2, 128, 4)]


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 63, 64, 65, 70, 130])
@pytest.mark.parametrize(("heads", "dim", "taps"), SHAPES)
def test_fp32_equals_the_equations(kernel_set, threads, heads, dim, taps, rows):
    w = make(kernel_set, heads, dim, taps)
    x = inputs(w, rows, torch.float32)
    state = empty(w, torch.float32, seed=2)
    expected_state = state[0].clone(), state[1].double()
    expected = reference.kda(w, *x, [expected_state], [rows], torch.float64)
    out = kda(w, *x, [state])
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[1].double(), expected_state[1], rtol=1e-5, atol=1e-5)
    assert torch.equal(state[0], expected_state[0])


@pytest.mark.parametrize("rows", [1, 5, 70])
@pytest.mark.parametrize(("heads", "dim", "taps"), SHAPES)
def test_bf16_within_rounding(kernel_set, heads, dim, taps, rows):
    w = make(kernel_set, heads, dim, taps)
    x = inputs(w, rows, torch.bfloat16)
    state = empty(w, torch.bfloat16, seed=2)
    expected_state = state[0].clone(), state[1].double()
    expected = reference.kda(w, *x, [expected_state], [rows], torch.float64).double()
    out = kda(w, *x, [state]).double()
    # almost everywhere the same bf16; a step where a value inside sits on a rounding border
    size = expected.square().mean().sqrt()
    assert ((out - expected).abs() <= 2**-7 * expected.abs() + 2**-9 * size).all()
    assert (out == expected).double().mean() > 0.9
    torch.testing.assert_close(state[1].double(), expected_state[1], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "taps"), SHAPES)
def test_any_cut_gives_the_same_bits(kernel_set, heads, dim, taps, dtype):
    rows, w = 131, make(kernel_set, heads, dim, taps)
    x = inputs(w, rows, dtype)
    whole_state = empty(w, dtype)
    whole = kda(w, *x, [whole_state])
    for cut in ([1] * rows, [64, 67], [2, 1, 1, 5, 70, 52], [130, 1]):
        state, out = empty(w, dtype), []
        for parts in zip(*(m.split(cut) for m in x), strict=True):
            out.append(kda(w, *parts, [state]))
        assert torch.equal(torch.cat(out), whole)
        assert torch.equal(state[1], whole_state[1])
        assert torch.equal(state[0], whole_state[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_together_as_alone(kernel_set, threads, dtype):
    w = make(kernel_set, 3, 32)
    counts = [1, 0, 9, 1, 70]
    x = inputs(w, sum(counts), dtype)
    states = [empty(w, dtype, seed=i) for i in range(len(counts))]
    alone_states = [copy(s) for s in states]
    together = kda(w, *x, states, counts)
    alone = [
        kda(w, *parts, [state])
        for parts, state in zip(
            zip(*(m.split(counts) for m in x), strict=True), alone_states, strict=True
        )
    ]
    assert torch.equal(together, torch.cat(alone))
    for a, b in zip(states, alone_states, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[1], b[1])


def test_extreme_inputs_stay_finite(kernel_set):
    w = make(kernel_set, 2, 16)
    x = inputs(w, 12, torch.float32)
    for m in x:
        m *= 1e4
    x[0][3] = 0.0
    x[0][4] = 1e-41
    state = empty(w, torch.float32)
    out = kda(w, *x, [state])
    expected = reference.kda(w, *x, [empty(w, torch.float32)], [12], torch.float64)
    assert out.isfinite().all()
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)


def test_misfits_are_errors(kernel_set):
    w = make(kernel_set, 2, 16)
    x = inputs(w, 3, torch.float32)
    with pytest.raises(ValueError, match="counts"):
        kda(w, *x, [empty(w, torch.float32)], [2])
    with pytest.raises(ValueError, match="conv state"):
        kda(w, *x, [empty(w, torch.bfloat16)])
    with pytest.raises(ValueError, match="dense rows"):
        kda(w, x[0], x[1][:2], x[2], x[3], [empty(w, torch.float32)])
    with pytest.raises(ValueError, match="conv must"):
        Kda(w.conv[:, 1:].contiguous(), w.rate, w.dt_bias, w.norm, -5.0, 1e-5)
