"""`glmflash generate`: continue a prompt on the terminal."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glmflash.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glmflash.chat.messages import Message
    from glmflash.engine.types import Delta, Generation

Prompt = Annotated[str, typer.Argument(help="The question. '-' reads it from standard input.")]


def generate(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint directory, or a cached hub id.")],
    prompt: Prompt,
    image: Annotated[list[Path] | None, typer.Option(help="A picture (repeatable).")] = None,
    video: Annotated[list[Path] | None, typer.Option(help="A video (repeatable).")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy. Default: the checkpoint's own.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Nucleus mass. Default: the checkpoint's own.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")] = None,
    effort: Annotated[str, typer.Option(help="How long to think: low, high or max.")] = "max",
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as it is, no chat.")
    ] = False,
    chat_template: Annotated[
        str, typer.Option(help="native, or checkpoint: its own chat_template.jinja, sandboxed.")
    ] = "native",
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON object at the end.")
    ] = False,
) -> None:
    """Answer a prompt, streaming.

    Thoughts are dimmed on a terminal. Pictures and videos come before the prompt's text, in the
    order pictures, videos.

    Examples:

      glmflash generate ./checkpoint "Why is the sky blue?" --effort low

      glmflash generate ./checkpoint "What is on it?" --image photo.jpg --max-tokens 100
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty; give some text")
    import glmflash
    from glmflash.cli.progress import loading, reading
    from glmflash.engine.types import SamplingParams
    from glmflash.settings import Settings

    params = SamplingParams(max_tokens, temperature, top_p, seed, effort)
    media = [*(image or []), *(video or [])]
    if raw and media:
        raise RequestError("--raw takes no media; leave --raw away, or the pictures")
    question = text if raw else [_question(text, image or [], video or [])]
    settings = Settings().override(dtype=dtype, chat_template=chat_template)
    with loading(checkpoint) as built, glmflash.open(checkpoint, settings, built) as engine:
        with reading() as read:
            deltas = engine.stream(question, params, progress=read)
            first = next(deltas)
        _print(first, deltas, json_)


def _question(text: str, images: list[Path], videos: list[Path]) -> Message:
    from glmflash.chat.messages import ImagePart, Message, Part, VideoPart

    parts: list[Part | str] = [ImagePart(path) for path in images]
    parts += [VideoPart(path) for path in videos]
    return Message(role="user", content=[*parts, text])


def _print(first: Delta, rest: Iterator[Delta], json_: bool) -> None:
    from itertools import chain

    from glmflash.cli.common import print_json
    from glmflash.engine.generation import collect

    if json_:
        print_json(_facts(collect(chain([first], rest))))
        return
    last = first
    dim = False
    coloured = sys.stdout.isatty()
    for delta in chain([first], rest):
        last = delta
        for piece, thought in ((delta.reasoning, True), (delta.text, False)):
            if not piece:
                continue
            if thought != dim and coloured:
                sys.stdout.write("\x1b[2m" if thought else "\x1b[0m\n\n")
            dim = thought
            sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\x1b[0m\n" if coloured and dim else "\n")
    sys.stdout.flush()
    sys.stderr.write(_summary(last) + "\n")


def _summary(last: Delta) -> str:
    if last.usage is None or last.timings is None:
        return "interrupted"
    prompt, answer, times = last.usage.prompt_tokens, last.usage.completion_tokens, last.timings
    # the first token comes out of reading the prompt
    speed = (answer - 1) / times.decode if answer > 1 else 0.0
    return (
        f"[{prompt} prompt tokens at {prompt / times.prefill:.1f}/s, "
        f"{answer} generated at {speed:.1f}/s, {last.finish_reason}]"
    )


def _facts(answer: Generation) -> dict[str, object]:
    return {
        "text": answer.text,
        "reasoning": answer.reasoning,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": asdict(answer.usage),
        "timings": asdict(answer.timings),
    }
