"""Runs the oracle, and tells whether its answer may be used.

transformers' own cached and one-shot runs part ways by 1e-2 and more where two experts or two
pools nearly tie, because both runs round differently and the choice flips. A test against such an
answer says nothing. `trusted_logits` therefore measures, for the very weights and tokens of a
test, how far every choice is from flipping and how well the oracle agrees with itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from transformers.models.glm5_next import Glm5NextForConditionalGeneration

from .tiny import PLAIN_TOKENS

MAX_DIFFERENCE = 2e-4
MEAN_DIFFERENCE = 2e-5
SELF_AGREEMENT = 1e-4
SMALLEST_MARGIN = 3e-5


class UntrustedOracleError(AssertionError):
    """The oracle's answer hangs on a near tie; choose another seed."""


class ChoiceMargins(TorchFunctionMode):
    """Watches every top-k and keeps the smallest gap between the last taken and the first left."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = float("inf")

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, torch.Tensor.topk):
            scores = args[0]
            k = kwargs["k"] if "k" in kwargs else args[1]
            # The best two of a group are only summed, so which two does not matter.
            summed = scores.ndim == 3 and scores.shape[0] > 1
            if k < scores.shape[-1] and not summed:
                self._note(scores, k)
        return func(*args, **kwargs)

    def _note(self, scores: torch.Tensor, k: int) -> None:
        best = torch.sort(scores.detach().float(), dim=-1, descending=True).values
        taken, left = best[..., k - 1], best[..., k]
        real = left > torch.finfo(torch.float32).min  # masked candidates never win
        if real.any():
            self.smallest = min(self.smallest, float((taken - left)[real].min()))


def random_tokens(count: int, seed: int) -> list[int]:
    """`count` ids of ordinary text."""
    draw = random.Random(seed)
    return [draw.randrange(PLAIN_TOKENS) for _ in range(count)]


def random_chunks(count: int, seed: int, largest: int = 70) -> list[int]:
    """Sizes 1..largest that add up to `count`."""
    draw = random.Random(seed)
    sizes: list[int] = []
    while sum(sizes) < count:
        sizes.append(min(draw.randint(1, largest), count - sum(sizes)))
    return sizes


def one_shot(
    oracle: Glm5NextForConditionalGeneration, ids: Sequence[int], **media: torch.Tensor
) -> np.ndarray:
    """fp32 logits [T, vocab] of the whole prompt at once."""
    with torch.no_grad():
        output = oracle(input_ids=torch.tensor([list(ids)]), use_cache=False, **media)
    return output.logits[0].float().numpy()


def in_chunks(
    oracle: Glm5NextForConditionalGeneration, ids: Sequence[int], sizes: Iterable[int]
) -> np.ndarray:
    """fp32 logits [T, vocab], the prompt arriving in pieces through transformers' cache."""
    cache, rows, at = None, [], 0
    with torch.no_grad():
        for size in sizes:
            piece = torch.tensor([list(ids[at : at + size])])
            output = oracle(input_ids=piece, cache=cache, use_cache=True)
            cache, at = output.cache, at + size
            rows.append(output.logits[0].float().numpy())
    return np.concatenate(rows)


def largest(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference."""
    return float(np.abs(a - b).max())


def trusted_logits(
    oracle: Glm5NextForConditionalGeneration,
    ids: Sequence[int],
    headroom: float = 1,
    **media: torch.Tensor,
) -> np.ndarray:
    """One-shot logits [T, vocab]; raises UntrustedOracleError where a choice nearly ties or the
    oracle disagrees with itself. Media prompts are only checked for near ties. headroom: how many
    times better than needed both must be."""
    with ChoiceMargins() as margins:
        logits = one_shot(oracle, ids, **media)
    if margins.smallest < SMALLEST_MARGIN * headroom:
        raise UntrustedOracleError(f"a choice hangs on {margins.smallest:.1e}")
    if not media:
        sizes = random_chunks(len(ids), seed=len(ids))
        disagreement = largest(logits, in_chunks(oracle, ids, sizes))
        if disagreement > SELF_AGREEMENT / headroom:
            raise UntrustedOracleError(f"one shot and chunks differ by {disagreement:.1e}")
    return logits


def assert_parity(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Both gates: the largest and the mean absolute difference of logits."""
    assert ours.shape == theirs.shape
    difference = np.abs(ours - theirs)
    worst = np.unravel_index(int(difference.argmax()), difference.shape)
    assert difference.max() <= MAX_DIFFERENCE, f"{difference.max():.2e} at [token, id] {worst}"
    assert difference.mean() <= MEAN_DIFFERENCE, f"mean {difference.mean():.2e}"
