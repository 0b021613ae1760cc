"""What a rendered prompt is made of: control tokens, text, and places for media.

Knows the 36 added tokens of the released tokenizer by name; knows no ids and no chat rules.
Keeping control tokens apart from text is what makes it impossible for a user to write one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from glmflash.chat.messages import ImagePart, MediaKind, VideoPart

# ids 154820..154855 of the release, in order
CONTROL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)

_ANY_CONTROL = re.compile("(" + "|".join(map(re.escape, CONTROL_TOKENS)) + ")")


@dataclass(frozen=True)
class Control:
    """One control token, by its text."""

    token: str


@dataclass(frozen=True)
class Text:
    """Ordinary text; encoded without ever yielding a control token, whatever it spells."""

    text: str


@dataclass(frozen=True)
class MediaSlot:
    """The place of a picture or video, its begin and end tokens included.

    index: position among all media of the prompt, in order of appearance.
    """

    kind: MediaKind
    index: int
    part: ImagePart | VideoPart


Segment = Control | Text | MediaSlot


def slot_tokens(kind: MediaKind) -> tuple[str, str, str]:
    """Begin, placeholder and end token of a medium."""
    return f"<|begin_of_{kind}|>", f"<|{kind}|>", f"<|end_of_{kind}|>"


def split_controls(literal: str) -> list[Control | Text]:
    """Split a template's own text; every control token it spells becomes one."""
    pieces = enumerate(_ANY_CONTROL.split(literal))
    return [Control(piece) if at % 2 else Text(piece) for at, piece in pieces if piece]


def to_text(segments: Iterable[Segment]) -> str:
    """The prompt as one string, media as their unexpanded placeholders."""
    return "".join(_spelled(segment) for segment in segments)


def _spelled(segment: Segment) -> str:
    if isinstance(segment, Control):
        return segment.token
    if isinstance(segment, Text):
        return segment.text
    return "".join(slot_tokens(segment.kind))
