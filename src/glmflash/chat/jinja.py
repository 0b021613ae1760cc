"""A checkpoint's own chat template, rendered in a sandbox.

Knows how to run chat_template.jinja with the helpers that transformers offers to templates, and
how to keep what users wrote apart from what the template wrote. Knows no grammar of its own.

A template gives one string, in which a user's "<|user|>" would look like the template's. So
before rendering, each character that can begin a control token is replaced, in every string of
the conversation, by a stand-in that occurs nowhere in it; afterwards control tokens are cut out
and the characters are put back in the text between them. However a template joins the strings
it was given, they cannot spell a control token.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glmflash.chat import effort as efforts
from glmflash.chat.history import Piece, in_call_order, output_text, pieces, thought_and_answer
from glmflash.chat.messages import (
    AudioPart,
    ImagePart,
    MediaKind,
    Message,
    Tool,
    ToolCall,
    ToolOutputPart,
    ToolReferencePart,
    VideoPart,
)
from glmflash.chat.segments import (
    CONTROL_TOKENS,
    Control,
    MediaSlot,
    Segment,
    Text,
    slot_tokens,
    split_controls,
)
from glmflash.errors import CheckpointError, MediaError, RequestError

if TYPE_CHECKING:
    from jinja2 import Template

FILE = "chat_template.jinja"

_FIRST_CHARACTERS = sorted({token[0] for token in CONTROL_TOKENS})
# Rare ideographs: unlike private-use characters, they survive a template that prints a list
_STAND_INS = range(0x20000, 0x2A6E0)


class JinjaTemplate:
    """A compiled chat template of a checkpoint."""

    def __init__(self, source: str, where: str) -> None:
        """Compile `source`; `where` names it in errors. Raises CheckpointError if it is broken."""
        self.where = where
        self._template = _compile(source, where)

    @classmethod
    def from_dir(cls, directory: str | Path) -> JinjaTemplate:
        """The template of a checkpoint directory. Raises CheckpointError if there is none."""
        path = Path(directory) / FILE
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); use the native chat format instead"
            ) from None
        return cls(source, str(path))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        effort: str | None = "max",
        clear_thinking: bool = False,
        add_generation_prompt: bool = True,
    ) -> list[Segment]:
        """The prompt of a conversation; same options as the native `render`.

        Raises RequestError if the template refuses the conversation, MediaError if it does not
        show each picture and video once and in order, CheckpointError if it fails.
        """
        turns = in_call_order(messages)
        chat = [_as_dict(turn, tools) for turn in turns]
        schemas = [{"type": "function", "function": dict(tool.schema)} for tool in tools]
        mask, unmask = _masks(_strings([chat, schemas]))
        try:
            prompt = self._template.render(
                messages=_masked(chat, mask),
                tools=_masked(schemas, mask) or None,
                reasoning_effort=efforts.normalise(effort),
                clear_thinking=clear_thinking,
                add_generation_prompt=add_generation_prompt,
            )
        except RequestError as error:
            raise RequestError(str(error).translate(unmask)) from None
        except Exception as error:
            # whatever else goes wrong inside is the template's doing: the code is the checkpoint's
            raise CheckpointError(
                f"{self.where} failed ({type(error).__name__}: {error})".translate(unmask)
                + "; use the native chat format instead"
            ) from error
        media = [p for turn in turns for p in turn.parts if isinstance(p, ImagePart | VideoPart)]
        segments = _with_media(split_controls(prompt), media, self.where)
        return [Text(s.text.translate(unmask)) if isinstance(s, Text) else s for s in segments]


def _compile(source: str, where: str) -> Template:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise CheckpointError(
            f"{where} is no valid template: line {error.lineno}: {error.message}; "
            "use the native chat format instead"
        ) from None


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which the model was not trained on
    if ensure_ascii:
        raise ValueError(
            "tojson(ensure_ascii=true) would hide the stand-ins that protect user text"
        )
    return json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> None:
    raise RequestError(f"the checkpoint's chat template refuses this conversation: {message}")


def _as_dict(turn: Message, tools: Sequence[Tool]) -> dict[str, Any]:
    data: dict[str, Any] = {"role": turn.role}
    if turn.role == "assistant":
        # the template could not find think tags in text whose characters are replaced
        thought, answer = thought_and_answer(turn)
        data["content"] = _content(answer)
        if thought:
            data["reasoning_content"] = "".join(p for p in thought if isinstance(p, str))
    else:
        data["content"] = _list_of_results(turn) or _content(pieces(turn.parts, tools))
    if turn.tool_calls:
        data["tool_calls"] = [_call(call) for call in turn.tool_calls]
    if turn.tool_call_id is not None:
        data["tool_call_id"] = turn.tool_call_id
    if turn.name is not None:
        data["name"] = turn.name
    return data


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    data: dict[str, Any] = {"type": "function", "function": function}
    return data if call.id is None else {"id": call.id, **data}


def _list_of_results(turn: Message) -> list[dict[str, Any]]:
    """Results that only a template can write: it knows the tools and how outputs are parted."""
    found: list[dict[str, Any]] = []
    for part in turn.parts:
        if isinstance(part, ToolOutputPart):
            found.append({"output": output_text(part)})
        elif isinstance(part, ToolReferencePart):
            found.append({"type": "tool_reference", "name": part.name})
        else:
            return []
    return found


def _content(content: Sequence[Piece]) -> str | list[dict[str, str]]:
    texts = [piece for piece in content if isinstance(piece, str)]
    if len(texts) == len(content):
        return "".join(texts)
    return [_entry(piece) for piece in content]


def _entry(piece: Piece) -> dict[str, str]:
    if isinstance(piece, str):
        return {"type": "text", "text": piece}
    return {"type": "audio" if isinstance(piece, AudioPart) else piece.kind}


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _masks(strings: Iterator[str]) -> tuple[dict[int, str], dict[int, str]]:
    used = set().union(*strings)
    free = (chr(code) for code in _STAND_INS if chr(code) not in used)
    pairs = list(zip(_FIRST_CHARACTERS, free, strict=False))
    if len(pairs) < len(_FIRST_CHARACTERS):
        raise RequestError("the conversation uses every stand-in character there is")
    return {ord(c): f for c, f in pairs}, {ord(f): c for c, f in pairs}


def _masked(value: Any, mask: dict[int, str]) -> Any:
    if isinstance(value, str):
        return value.translate(mask)
    if isinstance(value, Mapping):
        return {_masked(key, mask): _masked(item, mask) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(item, mask) for item in value]
    return value


def _with_media(
    segments: Sequence[Control | Text], media: Sequence[ImagePart | VideoPart], where: str
) -> list[Segment]:
    """Fold begin, placeholder and end tokens into slots."""
    found: list[Segment] = []
    shown: list[MediaKind] = []
    at = 0
    while at < len(segments):
        kind = _kind_at(segments[at : at + 3])
        if kind is None:
            found.append(segments[at])
            at += 1
            continue
        if len(shown) < len(media):
            found.append(MediaSlot(kind, len(shown), media[len(shown)]))
        shown.append(kind)
        at += 3
    wanted = [part.kind for part in media]
    if shown != wanted:
        raise MediaError(
            f"{where} shows {', '.join(shown) or 'no media'} where the messages hold "
            f"{', '.join(wanted) or 'none'}; use the native chat format instead"
        )
    return found


def _kind_at(three: Sequence[Control | Text]) -> MediaKind | None:
    tokens = tuple(s.token if isinstance(s, Control) else "" for s in three)
    kinds: tuple[MediaKind, ...] = ("image", "video")
    return next((kind for kind in kinds if tokens == slot_tokens(kind)), None)
