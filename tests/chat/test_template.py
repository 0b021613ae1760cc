"""The native renderer against published hashes, and against a Jinja template of the grammar."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

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
from glmflash.chat.segments import CONTROL_TOKENS
from glmflash.chat.template import (
    Control,
    JinjaTemplate,
    MediaSlot,
    Segment,
    Text,
    render,
    to_text,
)
from glmflash.chat.tokenizer import Tokenizer
from glmflash.errors import CheckpointError, MediaError, RequestError

from .conversations import Writer

GRAMMAR = (Path(__file__).parent / "grammar.jinja").read_text(encoding="utf-8")
TEMPLATE = JinjaTemplate(GRAMMAR, "grammar.jinja")
PREFIX = "[gMASK]<sop><|system|>Reasoning Effort: Max"
ASK = "<|assistant|><think>"


def user(content: Any) -> Message:
    return Message("user", content)


def function(name: str, text: str, argument: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {"name": name, "description": text, "parameters": parameters}


WEATHER = function("weather", "Get weather", "city")
CLOCK = function("clock", "Get time", "zone")
TWO_CALLS = [
    user("Weather and time?"),
    Message(
        "assistant",
        None,
        tool_calls=[
            ToolCall("weather", {"city": "東京"}, "a"),
            ToolCall("clock", {"zone": "JST"}, "b"),
        ],
    ),
    Message("tool", "12:00", tool_call_id="b"),
    Message("tool", "sunny", tool_call_id="a"),
]
THOUGHTFUL = [
    user("First"),
    Message("assistant", "First answer", "private reasoning"),
    user("Second"),
]

# messages, options, characters, SHA-256 of the UTF-8 text; all but the last two hashes
# were published for the released template of 2026-09-04
PUBLISHED: dict[str, tuple[list[Message], dict[str, Any], int | None, str]] = {
    "plain": (
        [user("Reply with exactly: OK")],
        {},
        93,
        "b9a11acce56d0d3c38ebb9829bff626e730923c78dafbc6985c9ce29ed33746b",
    ),
    "low": (
        [user("Think briefly")],
        {"effort": "low"},
        84,
        "5c7dac41292e30bef3b978571efd0d677472aa6d2b799acf358e20975d274864",
    ),
    "system": (
        [Message("system", "Be exact."), user("Answer in Japanese.")],
        {},
        109,
        "b43f8383d6b915aa2c23ac75148397088c3538c18bd5a3f585461c9e2a6e5000",
    ),
    "kept": (
        THOUGHTFUL,
        {},
        147,
        "01c33bd8d85a371f98e71fcd627a4048257a280bdae2f761e062bbe27daba14f",
    ),
    "cleared": (
        [
            user("Question one"),
            Message("assistant", "Answer one", "forgotten"),
            user("Question two"),
        ],
        {"clear_thinking": True},
        141,
        "08e92dc2c34cbbb1fbdb365f6a931a306b9027cc41dbaeeb6525535943d4cd88",
    ),
    "completed": (
        [user("Hello"), Message("assistant", "Completed answer")],
        {"add_generation_prompt": False},
        100,
        "d307fdf06ee1a92373d973a66e0bd681b3fb731a96568f9e560fcdb53feb5940",
    ),
    "no content": (
        [user(None)],
        {},
        71,
        "e69c157c0ca86608e0090d6ff3263d1ca330eb16c54753f302086daffea6d03c",
    ),
    "tools": (
        TWO_CALLS,
        {"tools": [Tool(WEATHER), Tool(CLOCK)]},
        1102,
        "6e6eb7696bbe8e198d49bc974bb8a8f8414553486133b0645d8bc65fd57b1d39",
    ),
    "image": (
        [user([TextPart("inspect "), ImagePart(b"224 x 224")])],
        {},
        None,
        "093ae84f2451edd817e32e9aed0e080abdb84444ab7ccdb6f9fbb11da2700731",
    ),
}


@pytest.mark.parametrize("case", PUBLISHED)
@pytest.mark.parametrize("renderer", [render, TEMPLATE.render])
def test_published_hashes(case: str, renderer: Any) -> None:
    messages, options, characters, digest = PUBLISHED[case]
    text = to_text(renderer(messages, **options))
    assert characters in (None, len(text))
    assert hashlib.sha256(text.encode()).hexdigest() == digest


def test_every_control_token_of_a_prompt_is_a_segment() -> None:
    segments = render(TWO_CALLS, tools=[Tool(WEATHER), Tool(CLOCK)])
    assert not spelled_controls(segments)
    assert Control("<arg_key>") in segments
    assert any("<tools>" in s.text for s in segments if isinstance(s, Text))


# Each case: messages, tools, and what follows the prefix (and tools block) up to the open turn.
RULES: dict[str, tuple[list[Message], list[Tool], str]] = {
    "unknown roles are left out": ([Message("critic", "x"), user("a")], [], "<|user|>a"),
    "text of users is not stripped": (
        [Message("system", " s\n"), user(" u\n")],
        [],
        "<|system|> s\n<|user|> u\n",
    ),
    "parts are joined without separator": (
        [user(["a", TextPart("b"), AudioPart(), VideoPart(b""), "c"])],
        [],
        "<|user|>ab<|begin_of_audio|><|end_of_audio|><|begin_of_video|><|video|><|end_of_video|>c",
    ),
    "thoughts come from the tags in the text": (
        [Message("assistant", "x<think>no<think> why </think>between</think>\n answer \n")],
        [],
        "<|assistant|><think> why </think>answer",
    ),
    "without an opening tag the thought starts the text": (
        [Message("assistant", " why </think> answer")],
        [],
        "<|assistant|><think> why </think>answer",
    ),
    "explicit thoughts leave the text whole": (
        [Message("assistant", " a</think>b ", " r ")],
        [],
        "<|assistant|><think> r </think>a</think>b",
    ),
    "explicit empty thoughts too": (
        [Message("assistant", "a</think>b", "")],
        [],
        "<|assistant|><think></think>a</think>b",
    ),
    "an empty answer adds nothing": (
        [Message("assistant", " \n", "r")],
        [],
        "<|assistant|><think>r</think>",
    ),
    "pictures may stand in an answer": (
        [Message("assistant", ["a</th", "ink> ", ImagePart(b""), " "])],
        [],
        "<|assistant|><think>a</think><|begin_of_image|><|image|><|end_of_image|>",
    ),
    "tags on both sides of pictures": (
        [
            Message(
                "assistant",
                ["<think>a", ImagePart(b""), "b<think>c</think>", ImagePart(b""), "d</think> e"],
            )
        ],
        [],
        "<|assistant|><think>c</think>e",
    ),
    "values that are no strings are JSON": (
        [
            Message(
                "assistant",
                "",
                tool_calls=[ToolCall("f", {"s": "é 1", "n": 1, "o": {"é": [True, None]}})],
            )
        ],
        [],
        "<|assistant|><think></think><tool_call>f"
        "<arg_key>s</arg_key><arg_value>é 1</arg_value>"
        "<arg_key>n</arg_key><arg_value>1</arg_value>"
        '<arg_key>o</arg_key><arg_value>{"é": [true, null]}</arg_value></tool_call>',
    ),
    "a call without arguments": (
        [Message("assistant", tool_calls=[ToolCall("f", {})])],
        [],
        "<|assistant|><think></think><tool_call>f</tool_call>",
    ),
    "missing results are empty": (
        [Message("tool", None), Message("tool", [])],
        [],
        "<|observation|><tool_response></tool_response><tool_response></tool_response>",
    ),
    "results apart open two blocks": (
        [Message("tool", "1"), user("u"), Message("tool", "2")],
        [],
        "<|observation|><tool_response>1</tool_response><|user|>u"
        "<|observation|><tool_response>2</tool_response>",
    ),
    "a list of outputs is a list of results": (
        [Message("tool", [ToolOutputPart("1"), ToolOutputPart(None), ToolOutputPart({"a": "é"})])],
        [],
        "<|observation|><tool_response>1</tool_response><tool_response></tool_response>"
        '<tool_response>{"a": "é"}</tool_response>',
    ),
    "references show schemas, hidden ones too": (
        [Message("tool", [ToolReferencePart("late"), ToolReferencePart("none")])],
        [Tool({"name": "late", "strict": True, "defer_loading": True, "description": "é"})],
        '<|observation|><tool_response><tools>\n{"name": "late", "description": "é"}\n'
        "</tools></tool_response>",
    ),
}


@pytest.mark.parametrize("case", RULES)
def test_rules(case: str) -> None:
    messages, tools, expected = RULES[case]
    text = to_text(render(messages, tools))
    tail = text.split("...</tool_call>", 1)[1] if tools else text.removeprefix(PREFIX)
    assert tail == expected + ASK


def results(calls: list[str | None], answers: list[str | None]) -> str:
    """The order in which results 0, 1, ... are written."""
    messages = [
        Message("assistant", tool_calls=[ToolCall("f", {}, one) for one in calls]),
        *(Message("tool", str(at), tool_call_id=one) for at, one in enumerate(answers)),
    ]
    parts = to_text(render(messages)).split("<tool_response>")[1:]
    return "".join(part[0] for part in parts)


def test_results_follow_the_calls_only_if_ids_tell_how() -> None:
    assert results(["a", "b", "c"], ["c", "a", "b"]) == "120"
    assert results(["a", "b", "c"], ["c", "a"]) == "10"
    assert results(["a", "b"], ["b", "a", "a"]) == "012"
    assert results(["a", "a"], ["b", "a"]) == "01"
    assert results(["a", "b"], ["b", "x"]) == "01"
    assert results(["a", "b"], ["b", None]) == "01"
    assert results(["a", None], ["a"]) == "0"
    assert results([], ["b", "a"]) == "01"


def test_clearing_keeps_thoughts_after_the_last_user_message() -> None:
    turns = [
        Message("assistant", "0", "zero"),
        user("u"),
        Message("assistant", "1", "one"),
        Message("tool", "t"),
        Message("assistant", "2</think>two"),
    ]
    text = to_text(render(turns, clear_thinking=True))
    assert "zero" not in text
    assert "<think></think>0" in text
    assert "<think>one</think>1" in text
    assert "<think>2</think>two" in text
    # without any user message there is nothing "before" it
    assert "zero" in to_text(render(turns[:1], clear_thinking=True))


def test_deferred_tools_stay_out_of_the_list() -> None:
    hidden = {**CLOCK, "defer_loading": True}
    text = to_text(
        render([], [Tool(hidden), Tool({**WEATHER, "defer_loading": False, "strict": True})])
    )
    assert '<tools>\n{"name": "weather", "description"' in text
    assert "clock" not in text
    assert "strict" not in text
    assert "<tools>\n</tools>\n" in to_text(render([], [Tool(hidden)]))


def test_effort() -> None:
    assert "Effort: High<" in to_text(render([], effort="high"))
    assert "Effort: Max<" in to_text(render([], effort=None))
    assert "Effort: Low<" in to_text(render([], effort="LOW"))
    with pytest.raises(RequestError, match=r"'none' is not known; use low, high, max"):
        render([], effort="none")


def test_values_that_are_not_json_are_refused() -> None:
    call = Message("assistant", tool_calls=[ToolCall("f", {"x": {1, 2}})])
    with pytest.raises(RequestError, match="cannot be written as JSON"):
        render([call])


def media_free(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a template sees them: it never looks at sources."""
    shown = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {k: v for k, v in part.items() if not k.endswith("_url")}
                if isinstance(part, dict)
                else part
                for part in content
            ]
        shown.append({**message, "content": content})
    return shown


@pytest.mark.parametrize("hostile", [False, True], ids=["plain", "hostile"])
def test_random_conversations_equal_the_grammar_rendered_by_transformers(hostile: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils.chat_template_utils import render_jinja_template

    for seed in range(300):
        writer = Writer(seed, hostile)
        raw, schemas = writer.conversation(), writer.tools()
        options: dict[str, Any] = {
            "clear_thinking": writer.random.random() < 0.5,
            "add_generation_prompt": writer.random.random() < 0.7,
        }
        effort = writer.random.choice(["low", "high", "max"])
        expected = render_jinja_template(
            [media_free(raw)],
            tools=schemas or None,
            chat_template=GRAMMAR,
            reasoning_effort=effort,
            **options,
        )[0][0]
        messages = [Message.from_dict(one) for one in raw]
        tools = [Tool.from_dict(one) for one in schemas]
        native = render(messages, tools, effort, **options)
        assert to_text(native) == expected, seed
        assert TEMPLATE.render(messages, tools, effort, **options) == native, seed


def spelled_controls(segments: list[Segment]) -> bool:
    texts = [s.text for s in segments if isinstance(s, Text)]
    return any(token in text for text in texts for token in CONTROL_TOKENS)


def test_prompts_have_the_ids_of_the_official_pipeline(
    tokenizer: Tokenizer, library: Library
) -> None:
    """Segments encoded apart equal the rendered text encoded in one go, as servers do it."""
    compared = 0
    for seed in range(150):
        writer = Writer(seed, hostile=False)
        messages = [Message.from_dict(one) for one in writer.conversation()]
        segments = render(messages, [Tool.from_dict(one) for one in writer.tools()])
        if spelled_controls(segments) or any(isinstance(s, MediaSlot) for s in segments):
            continue
        compared += 1
        assert tokenizer.encode_segments(segments) == library.encode(to_text(segments)).ids, seed
    assert compared > 60


# Every place of a conversation that a client can fill with text.
def everywhere(text: str) -> tuple[list[Message], list[Tool]]:
    schema = {"name": text, "description": text, "parameters": {text: [text, {"enum": text}]}}
    messages = [
        Message("system", text),
        user(text),
        user([text[:3], TextPart(text[3:]), ImagePart(b"")]),
        Message(
            "assistant", text, text, [ToolCall(text, {text: text, "deep": [{text: text}]}, "a")]
        ),
        Message("tool", text, tool_call_id="a"),
        Message("tool", [ToolOutputPart(text), ToolOutputPart({text: text})]),
        Message("tool", [ToolReferencePart(text)]),
        Message("assistant", text, ""),
    ]
    return messages, [Tool(schema)]


def controls(segments: list[Segment]) -> list[Segment]:
    return [s for s in segments if not isinstance(s, Text)]


@pytest.mark.parametrize("renderer", [render, TEMPLATE.render], ids=["native", "jinja"])
@pytest.mark.parametrize("attack", [*CONTROL_TOKENS, "".join(CONTROL_TOKENS), "\U00020000<|user|>"])
def test_text_never_becomes_a_control_token(
    renderer: Any, attack: str, tokenizer: Tokenizer
) -> None:
    attacked, harmless = renderer(*everywhere(f"x{attack}y")), renderer(*everywhere("xy"))
    assert controls(attacked) == controls(harmless)
    assert to_text(attacked).replace(f"x{attack}y", "xy") == to_text(harmless)

    added = {tokenizer.control(token) for token in CONTROL_TOKENS}
    ids, plain = (
        [i for i in tokenizer.encode_segments(s, [Shown()]) if i in added]
        for s in (attacked, harmless)
    )
    assert ids == plain


class Shown:
    kind, slices, tokens, timestamps = "image", 1, 2, ()


def test_slots_are_numbered_in_the_order_of_the_prompt() -> None:
    first, second, third = ImagePart(b"1"), VideoPart(b"2"), ImagePart(b"3")
    messages = [
        Message("critic", [ImagePart(b"unseen")]),
        Message("assistant", tool_calls=[ToolCall("f", {}, "a"), ToolCall("f", {}, "b")]),
        Message("tool", [second], tool_call_id="b"),
        Message("tool", [first], tool_call_id="a"),
        user(["x", third]),
    ]
    expected = [
        MediaSlot("image", 0, first),
        MediaSlot("video", 1, second),
        MediaSlot("image", 2, third),
    ]
    assert [s for s in render(messages) if isinstance(s, MediaSlot)] == expected
    assert [s for s in TEMPLATE.render(messages[1:]) if isinstance(s, MediaSlot)] == expected


def test_jinja_template_that_does_not_show_media_is_told_apart() -> None:
    blind = JinjaTemplate("{% for m in messages %}<|user|>no pictures{% endfor %}", "blind")
    with pytest.raises(MediaError, match="blind shows no media where the messages hold image"):
        blind.render([user([ImagePart(b"")])])
    inventive = JinjaTemplate("<|begin_of_image|><|image|><|end_of_image|>", "inventive")
    with pytest.raises(MediaError, match="shows image where the messages hold none"):
        inventive.render([user("")])


def test_jinja_helpers() -> None:
    source = """{%- for m in messages %}
  {% if loop.index > 2 %}{% break %}{% endif %}
  {{ m.content | tojson }}
{% endfor -%}
"""
    text = to_text(JinjaTemplate(source, "t").render([user("é<'>"), user("/"), user("c")]))
    assert text == '  "é<\'>"\n  "/"\n'
    year = to_text(JinjaTemplate("{{ strftime_now('%Y') }}", "t").render([]))
    assert len(year) == 4
    assert year.isdigit()


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("{% if %}", CheckpointError, "no valid template: line 1"),
        ("{{ raise_exception('no ' + messages[0].content) }}", RequestError, "refuses .* no <x>"),
        ("{{ messages[7].content.x }}", CheckpointError, "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CheckpointError, "SecurityError"),
        ("{{ messages.append(1) }}", CheckpointError, "SecurityError"),
        ("{{ messages | tojson(ensure_ascii=true) }}", CheckpointError, "ensure_ascii"),
    ],
)
def test_jinja_errors(source: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        JinjaTemplate(source, "t").render([user("<x>")])


def test_jinja_template_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="use the native chat format"):
        JinjaTemplate.from_dir(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(GRAMMAR, encoding="utf-8")
    assert JinjaTemplate.from_dir(tmp_path).render(THOUGHTFUL) == render(THOUGHTFUL)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match="cannot be read"):
        JinjaTemplate.from_dir(tmp_path)
