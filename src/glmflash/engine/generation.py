"""From a prompt to a stream of pieces: encode, read, then draw token after token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from glmflash.chat.media import Image, PreparedMedia, Video
from glmflash.chat.messages import ImagePart, Message
from glmflash.chat.stream import ThoughtSplitter
from glmflash.chat.template import MediaSlot, Segment
from glmflash.engine.sampler import Sampler
from glmflash.engine.types import Delta, Generation, SamplingParams, Timings, Usage
from glmflash.errors import RequestError

if TYPE_CHECKING:
    from glmflash.engine.api import Engine, Prompt
    from glmflash.engine.session import Media


def encode(
    engine: Engine, prompt: Prompt, params: SamplingParams, media: Sequence[Media]
) -> tuple[list[int], list[PreparedMedia]]:
    """Token ids and prepared media of a prompt. Raises RequestError if it is empty or too long."""
    if isinstance(prompt, str):
        ids, prepared = engine.need_tokenizer().encode_raw(prompt), engine.prepare(media)
    elif prompt and isinstance(prompt[0], Message):
        if media:
            raise RequestError("messages carry their media as parts; do not pass media beside them")
        messages = [m for m in prompt if isinstance(m, Message)]
        segments = engine.render(messages, effort=params.effort)
        prepared = engine.prepare(media_of(segments))
        ids = engine.need_tokenizer().encode_segments(segments, prepared)
    else:
        ids = engine.check_tokens([t for t in prompt if not isinstance(t, Message)])
        prepared = engine.prepare(media)
    if not ids:
        raise RequestError("the prompt is empty; give at least one token")
    engine.check_length(len(ids) + 1)
    engine.place(ids, prepared)
    return ids, prepared


def media_of(segments: Sequence[Segment]) -> list[Media]:
    """Pictures and videos of a rendered prompt, in its order: tool results may change places."""
    parts = [segment.part for segment in segments if isinstance(segment, MediaSlot)]
    return [Image(p.source) if isinstance(p, ImagePart) else Video(p.source) for p in parts]


def run(
    engine: Engine,
    ids: list[int],
    media: list[PreparedMedia],
    params: SamplingParams,
    progress: Callable[[int], None],
) -> Iterator[Delta]:
    """Read the prompt, then yield one Delta a token, the last with reason, usage and timings."""
    defaults = engine.defaults
    sampler = Sampler(
        defaults.temperature if params.temperature is None else params.temperature,
        defaults.top_p if params.top_p is None else params.top_p,
        params.seed,
        engine.tokenizer.vocab_length if engine.tokenizer else None,
    )
    room = engine.config.text.max_position_embeddings - len(ids)
    limit = min(room, params.max_tokens or room)
    stops = () if params.ignore_eos else defaults.eos_token_ids
    output = ThoughtSplitter(engine.tokenizer, ids)
    session = engine.session()
    started = time.perf_counter()
    session.sync(ids, media, progress)
    prefilled = time.perf_counter()
    logits = session.logits
    for count in range(1, limit + 1):
        if logits is None:
            raise RuntimeError("the prompt left no logits")
        token, logprob = sampler(torch.from_numpy(logits))
        reason = "stop" if token in stops else "length" if count == limit else None
        text, reasoning = (
            output.end(token if reason == "length" else None) if reason else output.push(token)
        )
        if reason is None:
            yield Delta(text, reasoning, (token,), (logprob,))
            logits = session.step(token)
            continue
        timings = Timings(prefilled - started, time.perf_counter() - prefilled)
        yield Delta(text, reasoning, (token,), (logprob,), reason, Usage(len(ids), count), timings)
        return


def collect(deltas: Iterator[Delta]) -> Generation:
    """All pieces of a stream as one answer."""
    pieces = list(deltas)
    last = pieces[-1]
    if last.finish_reason is None or last.usage is None or last.timings is None:
        raise RuntimeError("a stream ended without a finish reason")
    return Generation(
        text="".join(p.text for p in pieces),
        reasoning="".join(p.reasoning for p in pieces),
        token_ids=tuple(t for p in pieces for t in p.token_ids),
        logprobs=tuple(x for p in pieces for x in p.logprobs),
        finish_reason=last.finish_reason,
        usage=last.usage,
        timings=last.timings,
    )
