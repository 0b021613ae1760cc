"""From logits to a token: temperature, nucleus, one random generator per request."""

from __future__ import annotations

import torch
from torch import Tensor


class Sampler:
    """Draws tokens of one request.

    allowed: ids at or above it belong to no token and are never drawn.
    """

    def __init__(
        self, temperature: float, top_p: float, seed: int | None, allowed: int | None = None
    ) -> None:
        self.temperature, self.top_p, self.allowed = temperature, top_p, allowed
        self.generator = torch.Generator()
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)

    def __call__(self, logits: Tensor) -> tuple[int, float]:
        """fp32 logits `[vocab]` to a token and its log probability under the model."""
        logits = logits[: self.allowed]
        logprobs = logits.log_softmax(-1)
        token = int(logits.argmax()) if self.temperature == 0 else self._draw(logits)
        return token, float(logprobs[token])

    def _draw(self, logits: Tensor) -> int:
        # fp64: the cumulative sum over a large vocabulary must not drift
        probabilities = (logits.double() / self.temperature).softmax(-1)
        if self.top_p < 1:
            ordered, ids = probabilities.sort(descending=True, stable=True)
            # keep a token while the mass before it is below top_p: at least one stays
            ordered[ordered.cumsum(-1) - ordered >= self.top_p] = 0
            return int(ids[torch.multinomial(ordered, 1, generator=self.generator)])
        return int(torch.multinomial(probabilities, 1, generator=self.generator))
