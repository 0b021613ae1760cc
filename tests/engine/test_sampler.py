"""Drawing a token: greedy, the nucleus, seeds, and ids that belong to no token."""

import math
from collections import Counter

import pytest
import torch

from glmflash.engine.sampler import Sampler
from glmflash.engine.types import SamplingParams
from glmflash.errors import RequestError

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def test_greedy_and_logprob() -> None:
    token, logprob = Sampler(0.0, 1.0, seed=None)(LOGITS)
    assert token == 0
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


def test_frequencies_follow_the_distribution() -> None:
    sampler = Sampler(1.0, 1.0, seed=3)
    counts = Counter(sampler(LOGITS)[0] for _ in range(4000))
    expected = [2000, 1200, 600, 200]
    chi2 = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected))
    assert chi2 < 16.3  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {0}), (0.51, {0, 1}), (0.94, {0, 1, 2})])
def test_nucleus(top_p: float, kept: set[int]) -> None:
    sampler = Sampler(1.0, top_p, seed=0)
    assert {sampler(LOGITS)[0] for _ in range(300)} == kept


def test_equal_seeds_give_equal_tokens() -> None:
    samplers = Sampler(1.0, 1.0, 7), Sampler(1.0, 1.0, 7)
    draws = [[sampler(LOGITS)[0] for _ in range(50)] for sampler in samplers]
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


def test_rows_beyond_the_tokenizer_are_never_drawn() -> None:
    logits = torch.tensor([0.0, 0.0, 100.0])
    sampler = Sampler(1.0, 1.0, seed=0, allowed=2)
    assert {sampler(logits)[0] for _ in range(100)} == {0, 1}
    assert Sampler(0.0, 1.0, seed=0, allowed=2)(logits)[0] in (0, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"max_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0},
     {"top_p": 1.5}, {"seed": -1}],
)  # fmt: skip
def test_out_of_range_is_refused(wrong: dict) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        SamplingParams(**wrong)
