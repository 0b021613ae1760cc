"""The router against fp64 arithmetic, and its order for equal scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from glmflash.kernels.router import Router, reference, router


def make(
    experts: int, width: int, dtype: torch.dtype, kernel_set: str, seed: int = 0, **rule: object
) -> Router:
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(experts, width, generator=g) * width**-0.5).to(dtype)
    bias = torch.randn(experts, generator=g) * 0.1
    return Router(weight, bias, kernel_set=kernel_set, **rule)  # type: ignore[arg-type]


def rows(count: int, width: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(count, width + 3, generator=g).to(dtype)[:, 3:]


RULES = [
    {"top_k": 1},
    {"top_k": 8, "scale": 2.5},
    {"top_k": 4, "groups": 4, "kept_groups": 2},
    {"top_k": 3, "groups": 8, "kept_groups": 1, "normalize": False},
]


@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("w_type", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("experts", "width"), [(32, 33), (24, 64), (288, 256)])
def test_equals_the_equations(kernel_set, threads, experts, width, rule, x_type, w_type):
    layer = make(experts, width, w_type, kernel_set, **rule)
    x = rows(70, width, x_type)
    ids, weights = router(x, layer)
    # random scores never come within fp32 rounding of each other here
    expected_ids, expected = reference.router(x, layer, torch.float64)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("w_type", [torch.float32, torch.bfloat16])
def test_a_row_does_not_see_the_others(kernel_set, threads, w_type):
    layer = make(21, 130, w_type, kernel_set, top_k=5)
    x = rows(70, 130, torch.bfloat16)
    ids, weights = router(x, layer)
    for size in (1, 2, 3, 5, 17, 33):
        parts = [router(part, layer) for part in x.split(size)]
        assert torch.equal(torch.cat([i for i, _ in parts]), ids)
        assert torch.equal(torch.cat([w for _, w in parts]), weights)


def test_equal_scores_go_to_the_lower_expert(kernel_set):
    layer = Router(torch.zeros(16, 8), torch.zeros(16), top_k=3, scale=3.0, kernel_set=kernel_set)
    ids, weights = router(torch.ones(2, 8), layer)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.ones(2, 3))


def test_bias_chooses_but_does_not_weigh(kernel_set):
    bias = torch.tensor([0.0, 5.0, 0.0, 4.0])
    layer = Router(torch.zeros(4, 8), bias, top_k=2, kernel_set=kernel_set)
    ids, weights = router(torch.ones(1, 8), layer)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.5]]))


def test_misfits_are_errors(kernel_set):
    with pytest.raises(ValueError, match="groups"):
        make(10, 8, torch.float32, kernel_set, top_k=1, groups=3)
    with pytest.raises(ValueError, match="cannot be chosen"):
        make(8, 8, torch.float32, kernel_set, top_k=5, groups=2)
    with pytest.raises(ValueError, match="dense rows"):
        router(torch.ones(1, 9), make(8, 8, torch.float32, kernel_set, top_k=1))
