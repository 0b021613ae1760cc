"""Random conversations in the spelling of clients."""

from __future__ import annotations

from random import Random
from typing import Any

WORDS = [
    *(
        "hello",
        " world",
        "\n",
        "\n\n",
        "  ",
        "\t",
        "東京",
        " é",
        "🙂",
        "don't",
        " 123456",
        "...",
        '"',
    ),
    *("<b>", "</b>", "<tools>", "</tools>", "[x]", "{{ x }}", "{% if %}", "a/b", "<", "|>", "\\n"),
]
# text that spells control tokens, whole and in halves
HOSTILE = [
    *("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>", "[gMASK]", "<sop>", "/nothink"),
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "<tool_response>", "<|image|>"),
    *("<|begin_of_image|><|image|><|end_of_image|>", "<|video|>", "<|endoftext|>", "<|us", "er|>"),
    *("<|begin_of", "_image|>", "[gM", "ASK]", "\U00020000", "\U00020001\U00020002", "\ufdd0"),
]
THINK_TAGS = ["<think>", "</think>"]
VALUES = [0, -7, 1.5, True, False, None, [], {}, [1, "two", None], {"k": {"n": ["é", 2]}}, 10**20]


class Writer:
    """Draws conversations; `hostile` lets their text spell control tokens."""

    def __init__(self, seed: int, hostile: bool) -> None:
        self.random = Random(seed)
        self.hostile = hostile

    def text(self, extra: list[str] | None = None) -> str:
        words = WORDS + (HOSTILE + THINK_TAGS if self.hostile else []) + (extra or [])
        return "".join(self.random.choices(words, k=self.random.randint(0, 6)))

    def name(self) -> str:
        return "tool" + (self.text() if self.hostile else str(self.random.randint(0, 5)))

    def value(self) -> Any:
        return self.random.choice([self.text(), self.text(), self.random.choice(VALUES)])

    def tools(self) -> list[dict[str, Any]]:
        tools = []
        for at in range(self.random.choice([0, 0, 1, 2, 3])):
            schema = {
                "name": f"tool{at}",
                "description": self.text(),
                "parameters": {
                    "type": "object",
                    "properties": {self.text(): {"enum": [self.value()]}},
                },
            }
            if self.random.random() < 0.3:
                schema["strict"] = True
            if self.random.random() < 0.4:
                schema["defer_loading"] = self.random.random() < 0.7
            tools.append({"type": "function", "function": schema})
        return tools

    def content(self) -> Any:
        kind = self.random.randint(0, 5)
        if kind == 0:
            return None
        if kind < 4:
            return self.text()
        return [self.part() for _ in range(self.random.randint(0, 5))]

    def part(self) -> Any:
        picture = {"url": "data:image/png;base64,aWJlZw=="}
        return self.random.choice(
            [
                self.text(),
                {"type": "text", "text": self.text()},
                {"type": "text", "text": self.text()},
                {"type": "image_url", "image_url": picture},
                {"type": "video_url", "video_url": picture},
                {"type": "input_audio", "input_audio": {}},
            ]
        )

    def assistant(self) -> list[dict[str, Any]]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text(THINK_TAGS)}
        if self.random.random() < 0.4:
            message["reasoning_content"] = self.text()
        if self.random.random() < 0.2:
            del message["content"]
        if self.random.random() < 0.5:
            return [message]
        calls = self.random.randint(1, 3)
        ids = [self.random.choice([f"call{at}", f"call{at}", "call0", None]) for at in range(calls)]
        message["tool_calls"] = [
            {
                "id": one,
                "type": "function",
                "function": {"name": self.name(), "arguments": self.arguments()},
            }
            for one in ids
        ]
        self.random.shuffle(ids)
        if self.random.random() < 0.2:
            ids.append("unknown")
        return [message, *(self.result(one) for one in ids[self.random.randint(0, 1) :])]

    def arguments(self) -> dict[str, Any]:
        return {f"key{at}{self.text()}": self.value() for at in range(self.random.randint(0, 3))}

    def result(self, call: str | None) -> dict[str, Any]:
        content: Any = self.content()
        kind = self.random.randint(0, 5)
        if kind == 0:
            content = [{"output": self.text()} for _ in range(self.random.randint(1, 3))]
        elif kind == 1:
            names = [f"tool{self.random.randint(0, 3)}" for _ in range(self.random.randint(1, 2))]
            content = [{"type": "tool_reference", "name": name} for name in names]
        message = {"role": "tool", "content": content}
        return message if call is None else {**message, "tool_call_id": call}

    def conversation(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for _ in range(self.random.randint(0, 6)):
            role = self.random.choice(
                ["system", "user", "user", "assistant", "assistant", "critic"]
            )
            if role == "assistant":
                messages += self.assistant()
            else:
                messages.append(
                    {"role": role, "content": self.text() if role == "critic" else self.content()}
                )
        return messages
