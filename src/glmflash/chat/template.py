"""The chat format of GLM-5.3-Flash: a conversation becomes segments of a prompt.

Knows the grammar and wording of the released template (2026-09-04). Knows no token ids and no
media sizes. `JinjaTemplate` renders a checkpoint's own template instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from glmflash.chat import effort as efforts
from glmflash.chat.history import (
    Piece,
    in_call_order,
    last_user_turn,
    output_text,
    pieces,
    schema_line,
    thought_and_answer,
    value_text,
)
from glmflash.chat.jinja import JinjaTemplate
from glmflash.chat.messages import (
    AudioPart,
    ImagePart,
    Message,
    Tool,
    ToolCall,
    ToolOutputPart,
    VideoPart,
)
from glmflash.chat.segments import (
    Control,
    MediaSlot,
    Segment,
    Text,
    split_controls,
    to_text,
)

__all__ = ["Control", "JinjaTemplate", "MediaSlot", "Segment", "Text", "render", "to_text"]

_ROLES = ("system", "user", "assistant", "tool")

# The wording is part of what the model was trained on: every character counts.
_TOOLS_HEAD = """
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
"""
_TOOLS_TAIL = """</tools>

For each function call, output the function name and arguments within the following XML format:
"""
# the tags in this line are real control tokens, unlike <tools>, which is no token
_TOOLS_FORMAT = (
    "<tool_call>{function-name}"
    "<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}</arg_value>"
    "<arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>"
)


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    effort: str | None = "max",
    clear_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> list[Segment]:
    """The prompt of a conversation. Messages of unknown roles are left out.

    effort: low, high or max. clear_thinking: empty the thoughts of assistant turns before the
    last user message. add_generation_prompt: end with an open assistant turn.
    Raises RequestError for an unknown effort or a value that is not JSON.
    """
    writer = _Writer()
    writer.control("[gMASK]", "<sop>", "<|system|>")
    writer.text(f"Reasoning Effort: {efforts.normalise(effort).capitalize()}")
    if tools:
        _write_tools(writer, tools)
    turns = in_call_order([message for message in messages if message.role in _ROLES])
    last_user = last_user_turn(turns)
    previous = ""
    for at, turn in enumerate(turns):
        if turn.role == "assistant":
            _write_assistant(writer, turn, keep_thought=not clear_thinking or at > last_user)
        elif turn.role == "tool":
            if previous != "tool":
                writer.control("<|observation|>")
            _write_result(writer, turn, tools)
        else:
            writer.control(f"<|{turn.role}|>")
            writer.pieces(pieces(turn.parts, tools))
        previous = turn.role
    if add_generation_prompt:
        writer.control("<|assistant|>", "<think>")
    return writer.segments


class _Writer:
    """Collects segments; neighbouring text is joined, because it is encoded as one."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._media = 0

    def control(self, *tokens: str) -> None:
        self.segments += map(Control, tokens)

    def text(self, text: str) -> None:
        if not text:
            return
        if self.segments and isinstance(last := self.segments[-1], Text):
            self.segments[-1] = Text(last.text + text)
        else:
            self.segments.append(Text(text))

    def pieces(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, ImagePart | VideoPart):
                self.segments.append(MediaSlot(piece.kind, self._media, piece))
                self._media += 1
            elif isinstance(piece, AudioPart):
                self.control("<|begin_of_audio|>", "<|end_of_audio|>")
            else:
                self.text(piece)


def _write_tools(writer: _Writer, tools: Sequence[Tool]) -> None:
    schemas = "".join(schema_line(tool) + "\n" for tool in tools if not tool.deferred)
    writer.control("<|system|>")
    writer.text(_TOOLS_HEAD + schemas + _TOOLS_TAIL)
    writer.segments += split_controls(_TOOLS_FORMAT)


def _write_assistant(writer: _Writer, turn: Message, keep_thought: bool) -> None:
    thought, answer = thought_and_answer(turn)
    writer.control("<|assistant|>", "<think>")
    writer.pieces(thought if keep_thought else ())
    writer.control("</think>")
    writer.pieces(answer)
    for call in turn.tool_calls:
        _write_call(writer, call)


def _write_call(writer: _Writer, call: ToolCall) -> None:
    writer.control("<tool_call>")
    writer.text(call.name)
    for key, value in call.arguments.items():
        writer.control("<arg_key>")
        writer.text(key)
        writer.control("</arg_key>", "<arg_value>")
        writer.text(value_text(value))
        writer.control("</arg_value>")
    writer.control("</tool_call>")


def _write_result(writer: _Writer, turn: Message, tools: Sequence[Tool]) -> None:
    outputs = [part for part in turn.parts if isinstance(part, ToolOutputPart)]
    results: list[list[Piece]] = [pieces(turn.parts, tools)]
    if outputs and len(outputs) == len(turn.parts):
        results = [[output_text(part)] for part in outputs]
    for result in results:
        writer.control("<tool_response>")
        writer.pieces(result)
        writer.control("</tool_response>")
