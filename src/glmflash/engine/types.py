"""What goes into an engine and what comes out: plain frozen records."""

from __future__ import annotations

from dataclasses import dataclass

from glmflash.errors import RequestError


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    max_tokens: None is up to the context's end. temperature, top_p: None is the checkpoint's own
    (generation_config.json); temperature 0 is greedy. seed: equal seeds give equal tokens; None
    draws one. effort: low, high or max, for chat prompts only. ignore_eos: run to max_tokens.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    effort: str = "max"
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.temperature is not None and not 0 <= self.temperature <= 100:
            raise RequestError(f"temperature must be 0..100, not {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise RequestError(f"seed must be 0..2^63-1, not {self.seed}")


@dataclass(frozen=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Timings:
    """Seconds spent reading the prompt and writing the answer."""

    prefill: float
    decode: float


@dataclass(frozen=True)
class Delta:
    """A piece of an answer. finish_reason is set on the last one: "stop" or "length"."""

    text: str = ""
    reasoning: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer. logprobs: of the chosen tokens, before temperature and top_p."""

    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
