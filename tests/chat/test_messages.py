"""Messages as clients spell them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glmflash.chat.effort import normalise
from glmflash.chat.messages import (
    AudioPart,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolCall,
    ToolOutputPart,
    ToolReferencePart,
    VideoPart,
)
from glmflash.errors import MediaError, RequestError

DATA_URL = "data:image/png;base64," + base64.b64encode(b"pixels").decode()


def read(content: Any) -> Any:
    return Message.from_dict({"role": "user", "content": content}).content


def test_plain_messages() -> None:
    assert Message.from_dict({"role": "user", "content": "hi"}) == Message("user", "hi")
    assert Message.from_dict({"role": "tool"}) == Message("tool")
    assert Message.from_dict({"role": "Developer", "content": ""}).role == "system"
    assert Message.from_dict({"role": "function", "name": "f"}) == Message("tool", name="f")
    assert Message.from_dict({"role": "critic"}).role == "critic"


def test_reasoning() -> None:
    both = {"role": "assistant", "reasoning_content": "", "reasoning": "other"}
    assert Message.from_dict(both).reasoning == ""
    assert Message.from_dict({"role": "assistant", "reasoning": "r"}).reasoning == "r"
    assert Message.from_dict({"role": "assistant", "reasoning_content": None}).reasoning is None
    assert (
        Message.from_dict({"role": "assistant", "reasoning": {"effort": "low"}}).reasoning is None
    )


def test_text_parts() -> None:
    parts = ["a", {"type": "text", "text": "b"}, {"type": "input_text", "text": "c"}]
    more = [{"type": "output_text", "text": "d"}, {"type": "text", "text": None}]
    assert read(parts + more) == tuple(map(TextPart, ("a", "b", "c", "d", "")))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": DATA_URL, "detail": "high"}},
        {"type": "image_url", "image_url": DATA_URL},
        {"type": "input_image", "image_url": DATA_URL},
        {"type": "image", "image": b"pixels"},
        {"type": "image", "url": "DATA:,pixels"},
        {"type": "image", "image": "data:image/png;base64,cGl4\nZWxz"},
        {"type": "image", "source": {"type": "base64", "data": "cGl4ZWxz"}},
    ],
)
def test_spellings_of_pictures(part: dict[str, Any]) -> None:
    assert read([part]) == (ImagePart(b"pixels"),)


def test_other_parts() -> None:
    path = Path("film.mp4")
    assert read([{"type": "image_url", "image_url": {"url": path}}]) == (ImagePart(path),)
    assert read([{"type": "video_url", "video_url": {"url": path}}]) == (VideoPart(path),)
    assert read([{"type": "input_video", "video_url": "data:,x"}]) == (VideoPart(b"x"),)
    assert read([{"type": "input_audio", "input_audio": {}}]) == (AudioPart(),)
    references = [
        {"type": "tool_reference", "name": "f"},
        {"type": "tool_reference", "tool_name": "g"},
    ]
    assert read(references) == (ToolReferencePart("f"), ToolReferencePart("g"))
    assert read([{"output": {"a": 1}}]) == (ToolOutputPart({"a": 1}),)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.org/a.png", r"content\[1\] of message is a link; nothing is fetched"),
        ("HTTP://example.org/a.png", "is a link"),
        ("file:///etc/hostname", "no image that can be read"),
        ("/etc/hostname", "no image that can be read"),
        ("", "no image that can be read"),
        (None, "no image that can be read"),
        (7, "no image that can be read"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,####", "broken base64"),
        ("data:image/png;base64,cGl4ZWx", "broken base64"),
        ("data:image/png;base64,é", "broken base64"),
    ],
)
def test_media_that_cannot_be_read(url: object, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        read(["x", {"type": "image_url", "image_url": {"url": url}}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "must be an object with a role"),
        ({"role": None}, "must be an object with a role"),
        ({"role": "user", "content": 5}, "must be text, a list of parts or null, not int"),
        ({"role": "user", "content": [5]}, r"content\[0\] of message must be text or an object"),
        ({"role": "user", "content": [{"type": "smell"}]}, "unknown type 'smell'"),
        ({"role": "user", "content": [{"type": ["x"]}]}, "unknown type"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "a text that is no string"),
        ({"role": "tool", "content": [{"type": "tool_reference"}]}, "without naming it"),
        ({"role": "assistant", "tool_calls": "x"}, "must be a list of objects"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            r"tool_calls\[0\] of message has no",
        ),
        ({"role": "assistant", "tool_calls": [{"function": "f"}]}, "has no function name"),
    ],
)
def test_messages_that_cannot_be_read(data: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Message.from_dict(data)


def test_errors_name_the_message() -> None:
    with pytest.raises(RequestError, match=r"content\[0\] of messages\[3\] has the unknown type"):
        Message.from_dict({"role": "user", "content": [{"type": "x"}]}, "messages[3]")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"b": 1, "a": "é"}', {"b": 1, "a": "é"}),
        ({"x": [1]}, {"x": [1]}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ('{"value": ', {"arguments": '{"value": '}),
        ("[1, 2]", {"arguments": "[1, 2]"}),
        ([1, 2], {"arguments": [1, 2]}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments(arguments: Any, expected: dict[str, Any]) -> None:
    call = ToolCall.from_dict({"id": "a", "function": {"name": "f", "arguments": arguments}})
    assert call == ToolCall("f", expected, "a")
    assert list(call.arguments) == list(expected)


def test_flat_calls() -> None:
    message = Message.from_dict(
        {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}}]}
    )
    assert message.tool_calls == (ToolCall("f", {}),)


def test_tools() -> None:
    schema = {"name": "f", "strict": True, "description": "d"}
    tool = Tool.from_dict({"type": "function", "function": schema})
    assert (tool.name, tool.deferred, tool.schema) == ("f", False, schema)
    assert Tool.from_dict(schema) == tool
    assert Tool.from_dict({"function": schema, "defer_loading": True}).deferred
    assert Tool({"name": "f", "defer_loading": True}).deferred
    for broken in ({}, {"function": {}}, {"function": None}, {"name": 3}, None):
        with pytest.raises(RequestError, match="a tool must be an object with a name"):
            Tool.from_dict(broken)  # type: ignore[arg-type]


def test_records_refuse_what_they_cannot_hold() -> None:
    with pytest.raises(RequestError, match="must be text, a list of parts or None, not int"):
        Message("user", 3)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"dict is no message part.*Message\.from_dict"):
        Message("user", [{"type": "text"}])  # type: ignore[list-item]
    for arguments in ("{}", None, {1: 2}):
        with pytest.raises(RequestError, match="arguments of call 'f' must be an object"):
            ToolCall("f", arguments)  # type: ignore[arg-type]
    assert Message("user", ["a", ImagePart(b"")]).parts == (TextPart("a"), ImagePart(b""))
    assert Message("user").parts == ()


def test_effort() -> None:
    assert [normalise(word) for word in ("low", "High", "MAX", None)] == [
        "low",
        "high",
        "max",
        "max",
    ]
    for word in ("none", "medium", "", "off"):
        with pytest.raises(RequestError, match="use low, high, max"):
            normalise(word)


KEYS = st.sampled_from(
    [
        *("role", "content", "type", "text", "image_url", "url", "source", "data", "output"),
        *("tool_calls", "function", "name", "arguments", "reasoning", "id"),
    ]
)
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "text",
        "image",
        "image_url",
        "video",
        "tool_reference",
        "data:,x",
        "{}",
        "",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None)
@given(data=st.dictionaries(KEYS, JSON))
def test_any_json_is_read_or_refused(data: dict[str, Any]) -> None:
    try:
        message = Message.from_dict({"role": "assistant", **data})
    except RequestError:
        return
    assert isinstance(message.parts, tuple)
