"""The rules that a conversation obeys before it is written down.

Knows where thoughts come from, in which order results go, and how schemas and values are spelled.
Knows no control tokens but the think tags that clients leave in an assistant's text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from glmflash.chat.messages import (
    AudioPart,
    ImagePart,
    Message,
    Part,
    TextPart,
    Tool,
    ToolOutputPart,
    ToolReferencePart,
    VideoPart,
)
from glmflash.errors import RequestError

# A run of content: text, or something that is not text. Two strings never touch.
Piece = str | ImagePart | VideoPart | AudioPart

_HIDDEN_SCHEMA_KEYS = ("defer_loading", "strict")


def to_json(value: object) -> str:
    """JSON as the format writes it: ", " and ": ", nothing escaped that need not be.

    Raises RequestError for a value that JSON cannot hold.
    """
    try:
        return json.dumps(value, ensure_ascii=False, default=_as_dict)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"a tool schema or argument cannot be written as JSON: {error}"
        ) from None


def _as_dict(value: object) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def schema_line(tool: Tool) -> str:
    """The schema of a tool as the model reads it: one line of JSON."""
    return to_json({k: v for k, v in tool.schema.items() if k not in _HIDDEN_SCHEMA_KEYS})


def value_text(value: object) -> str:
    """An argument or result: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else to_json(value)


def pieces(parts: Sequence[Part], tools: Sequence[Tool] = ()) -> list[Piece]:
    """Content with neighbouring text joined and tool references replaced by their schemas."""
    found: list[Piece] = []
    texts: list[str] = []
    for piece in _spelled(parts, tools):
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if text := "".join(texts):
            found.append(text)
        texts.clear()
        found.append(piece)
    if text := "".join(texts):
        found.append(text)
    return found


def _spelled(parts: Sequence[Part], tools: Sequence[Tool]) -> Iterator[Piece]:
    for is_reference, run in groupby(parts, lambda part: isinstance(part, ToolReferencePart)):
        if is_reference:
            yield "<tools>\n"
        for part in run:
            if isinstance(part, ToolReferencePart):
                yield from (schema_line(t) + "\n" for t in tools if t.name == part.name)
            elif isinstance(part, TextPart):
                yield part.text
            elif isinstance(part, ToolOutputPart):
                yield output_text(part)
            else:
                yield part
        if is_reference:
            yield "</tools>"


def output_text(part: ToolOutputPart) -> str:
    """One of several results of a call; a missing one is empty."""
    return "" if part.output is None else value_text(part.output)


def thought_and_answer(message: Message) -> tuple[list[Piece], list[Piece]]:
    """Split an assistant turn into its thought and its visible answer, the answer stripped.

    A turn without explicit reasoning is split at the think tags in its text: the thought stands
    between the last opening tag before the first closing one, and the answer after the last.
    """
    content = pieces(message.parts)
    if message.reasoning is not None:
        return ([message.reasoning] if message.reasoning else []), _strip(content)
    closing = [at for at, p in enumerate(content) if isinstance(p, str) and "</think>" in p]
    if not closing:
        return [], _strip(content)
    thought = _before(content, closing[0], "</think>")
    opening = [at for at, p in enumerate(thought) if isinstance(p, str) and "<think>" in p]
    if opening:
        thought = _after(thought, opening[-1], "<think>")
    return thought, _strip(_after(content, closing[-1], "</think>"))


def _before(content: list[Piece], at: int, tag: str) -> list[Piece]:
    text = str(content[at]).partition(tag)[0]
    return [*content[:at], *([text] if text else [])]


def _after(content: list[Piece], at: int, tag: str) -> list[Piece]:
    text = str(content[at]).rpartition(tag)[2]
    return [*([text] if text else []), *content[at + 1 :]]


def _strip(content: list[Piece]) -> list[Piece]:
    stripped = list(content)
    if stripped and isinstance(stripped[0], str):
        stripped[0] = stripped[0].lstrip()
    if stripped and isinstance(stripped[-1], str):
        stripped[-1] = stripped[-1].rstrip()
    return [piece for piece in stripped if piece != ""]


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each block of tool results in the order of the calls they answer.

    A block keeps its own order unless the turn before it has calls, every call and result has an
    id, no id repeats, and every result's id is that of a call.
    """
    ordered: list[Message] = []
    for is_tool, run in groupby(messages, lambda message: message.role == "tool"):
        block = list(run)
        if is_tool and ordered and ordered[-1].role == "assistant":
            block = _by_call([call.id for call in ordered[-1].tool_calls], block)
        ordered.extend(block)
    return ordered


def _by_call(calls: list[str | None], results: list[Message]) -> list[Message]:
    answered = [result.tool_call_id for result in results]
    complete = None not in calls and None not in answered
    unique = len(set(calls)) == len(calls) and len(set(answered)) == len(answered)
    if not (calls and complete and unique and set(answered) <= set(calls)):
        return results
    return sorted(results, key=lambda result: calls.index(result.tool_call_id))


def last_user_turn(messages: Sequence[Message]) -> int:
    """Index of the last user message; -1 if there is none."""
    return max((at for at, message in enumerate(messages) if message.role == "user"), default=-1)
