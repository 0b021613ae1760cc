"""Messages of a conversation, their parts, calls and tools, and how clients spell them.

Knows chat-completions style dictionaries. Knows nothing about how a conversation is written into
a prompt (template.py) or how media are decoded (media.py), and fetches nothing.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import unquote_to_bytes

from glmflash.errors import MediaError, RequestError

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

MediaKind = Literal["image", "video"]

# two spellings that clients use for roles of the format
_ROLE_ALIASES = {"developer": "system", "function": "tool"}
_TEXT_TYPES = ("text", "input_text", "output_text")
_MEDIA_TYPES = {
    f"{before}{kind}{after}": kind
    for kind in ("image", "video", "audio")
    for before, after in (("", ""), ("", "_url"), ("input_", ""))
}


@dataclass(frozen=True)
class TextPart:
    """A run of text."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """A picture: a file, its bytes, or an open Pillow image."""

    source: str | Path | bytes | PillowImage
    kind: ClassVar[MediaKind] = "image"


@dataclass(frozen=True)
class VideoPart:
    """A video: a file or its bytes."""

    source: str | Path | bytes
    kind: ClassVar[MediaKind] = "video"


@dataclass(frozen=True)
class AudioPart:
    """A place for sound. The model has no audio encoder: only an empty pair of marks is written."""


@dataclass(frozen=True)
class ToolReferencePart:
    """In a tool's result: shows the model the schema of the tool of this name."""

    name: str


@dataclass(frozen=True)
class ToolOutputPart:
    """In a tool's result: one of several results. Anything but a string is written as JSON."""

    output: Any


Part = TextPart | ImagePart | VideoPart | AudioPart | ToolReferencePart | ToolOutputPart


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant made earlier. arguments: name to JSON value, in order."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.arguments, Mapping) or not all(
            isinstance(name, str) for name in self.arguments
        ):
            raise RequestError(
                f"the arguments of call {self.name!r} must be an object of names and values, "
                f"not {type(self.arguments).__name__}"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "tool call") -> ToolCall:
        """Reads {"id", "function": {"name", "arguments"}} or the inner object alone.

        Arguments may be an object or its JSON. JSON that is no object, such as a call that was
        cut off, is kept as one raw value named "arguments": one bad call in the history must not
        spoil every later request. Raises RequestError without a name.
        """
        function = data.get("function", data)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where} has no function name")
        call_id = data.get("id")
        arguments = _arguments(function.get("arguments"))
        return cls(name, arguments, call_id if isinstance(call_id, str) else None)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    schema: the function object (name, description, parameters, ...); its key order is kept.
    """

    schema: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.schema, Mapping) or not isinstance(self.schema.get("name"), str):
            raise RequestError(
                "a tool must be an object with a name, description and parameters; "
                f"got {str(self.schema)[:80]}"
            )

    @property
    def name(self) -> str:
        """The function's name."""
        return str(self.schema["name"])

    @property
    def deferred(self) -> bool:
        """Whether the tool stays out of the prompt's list until a result refers to it."""
        return bool(self.schema.get("defer_loading"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Tool:
        """Reads {"type": "function", "function": {...}} or the inner object alone."""
        if not isinstance(data, Mapping) or "function" not in data:
            return cls(data)
        schema = data["function"]
        if data.get("defer_loading") and isinstance(schema, Mapping):
            schema = {**schema, "defer_loading": True}
        return cls(schema)


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    role: system, user, assistant or tool; others are not rendered. content: text, parts (bare
    strings are text), or None. reasoning: the thought of an assistant turn; None takes it from
    the content's think tags, if there are any. tool_call_id: the call a tool's result answers.
    """

    role: str
    content: str | Sequence[Part | str] | None = None
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        if self.content is not None and not isinstance(self.content, str):
            if not isinstance(self.content, Sequence):
                raise RequestError(
                    f"message content must be text, a list of parts or None, "
                    f"not {type(self.content).__name__}"
                )
            parts = tuple(TextPart(p) if isinstance(p, str) else p for p in self.content)
            for part in parts:
                if not isinstance(part, Part):
                    raise RequestError(
                        f"{type(part).__name__} is no message part; use TextPart, ImagePart, "
                        "VideoPart, or Message.from_dict for dictionaries"
                    )
            object.__setattr__(self, "content", parts)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The content as parts; none for missing content."""
        if self.content is None:
            return ()
        if isinstance(self.content, str):
            return (TextPart(self.content),)
        return tuple(TextPart(p) if isinstance(p, str) else p for p in self.content)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "message") -> Message:
        """Reads a chat-completions style message; `where` names it in errors.

        Media may be data: URLs, bytes or pathlib paths. Strings are never read as file names,
        so that a remote client cannot name files of this machine, and http(s) URLs are refused.
        Raises RequestError, and MediaError for media.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("role"), str):
            raise RequestError(f"{where} must be an object with a role")
        role = data["role"].lower()
        reasoning = data.get("reasoning_content")
        if not isinstance(reasoning, str):
            reasoning = data.get("reasoning")
        call_id, name = data.get("tool_call_id"), data.get("name")
        return cls(
            role=_ROLE_ALIASES.get(role, role),
            content=_content(data.get("content"), where),
            reasoning=reasoning if isinstance(reasoning, str) else None,
            tool_calls=_calls(data.get("tool_calls"), where),
            tool_call_id=call_id if isinstance(call_id, str) else None,
            name=name if isinstance(name, str) else None,
        )


def _arguments(raw: object) -> Mapping[str, Any]:
    if isinstance(raw, Mapping):
        return raw
    if raw is None or raw == "":
        return {}
    try:
        value = json.loads(raw) if isinstance(raw, str) else raw
    except (ValueError, RecursionError):
        value = raw
    if value is None:
        return {}
    return value if isinstance(value, dict) else {"arguments": raw}


def _calls(calls: object, where: str) -> list[ToolCall]:
    if calls is None:
        return []
    if not isinstance(calls, list | tuple) or not all(isinstance(c, Mapping) for c in calls):
        raise RequestError(f"tool_calls of {where} must be a list of objects")
    return [
        ToolCall.from_dict(call, f"tool_calls[{at}] of {where}") for at, call in enumerate(calls)
    ]


def _content(content: object, where: str) -> str | list[Part] | None:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(
            f"content of {where} must be text, a list of parts or null, "
            f"not {type(content).__name__}"
        )
    return [_part(part, f"content[{at}] of {where}") for at, part in enumerate(content)]


def _part(part: object, where: str) -> Part:
    if isinstance(part, str):
        return TextPart(part)
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be text or an object, not {type(part).__name__}")
    kind = str(part.get("type"))
    if kind in _TEXT_TYPES:
        text = part.get("text")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"{where} has a text that is no string")
        return TextPart(text or "")
    if kind in _MEDIA_TYPES:
        return _media(part, _MEDIA_TYPES[kind], where)
    if kind == "tool_reference":
        name = part.get("name", part.get("tool_name"))
        if not isinstance(name, str):
            raise RequestError(f"{where} refers to a tool without naming it")
        return ToolReferencePart(name)
    if "output" in part:
        return ToolOutputPart(part["output"])
    raise RequestError(
        f"{where} has the unknown type {kind!r}; known are text, image_url, video_url, "
        "input_audio and tool_reference"
    )


def _media(part: Mapping[str, Any], kind: str, where: str) -> Part:
    if kind == "audio":
        return AudioPart()
    keys = (f"{kind}_url", kind, "url", "source")
    given = next((part[key] for key in keys if part.get(key) is not None), None)
    source = _source(given, kind, where)
    return ImagePart(source) if kind == "image" else VideoPart(source)


def _source(given: object, kind: str, where: str) -> Path | bytes:
    if isinstance(given, Mapping):
        data = given.get("data")
        if isinstance(data, str):
            return _base64(data, where)
        given = given.get("url")
    if isinstance(given, Path | bytes):
        return given
    if isinstance(given, str) and given[:5].lower() == "data:":
        return _data_url(given, where)
    if isinstance(given, str) and given[:8].lower().startswith(("http://", "https://")):
        raise MediaError(
            f"{where} is a link; nothing is fetched from the network, "
            f"so send the {kind} itself as a data: URL"
        )
    raise MediaError(
        f"{where} has no {kind} that can be read; send a data: URL "
        "(from Python also bytes or a pathlib.Path)"
    )


def _data_url(url: str, where: str) -> bytes:
    header, comma, payload = url[5:].partition(",")
    if not comma:
        raise MediaError(f"{where} has a data: URL without a comma, so without data")
    if header.lower().endswith(";base64"):
        return _base64(payload, where)
    return unquote_to_bytes(payload)


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise MediaError(f"{where} has broken base64 data: {error}") from None
