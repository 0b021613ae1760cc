"""Ids against the library that reads the same file; text never becomes an added token."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library

from glmflash.chat.messages import ImagePart, Message, TextPart, VideoPart
from glmflash.chat.segments import CONTROL_TOKENS, Control, MediaSlot, Text
from glmflash.chat.template import render
from glmflash.chat.tokenizer import Detokenizer, Tokenizer
from glmflash.config import ModelConfig, shipped
from glmflash.errors import MediaError, RequestError, TokenizerError

from .conftest import config_for, library_json

Build = Callable[[dict[str, Any], ModelConfig], Tokenizer]

SAMPLES = [
    "",
    " ",
    "Reply with exactly: OK",
    "The model's own WORDS, don't you'LL  see?\r\n\n  \t x\n",
    "1234567 + 89 = 1234656",
    '{"a": [1, 2, {"b": null}]}\\n//nothing',
    "東京の天気は晴れ。Straße café Привет 🙂👩‍👩‍👧 \u0301\u200d",
    "\x00\x7f\x80\u3000\ufffe\U0010ffff",
    "<tools></tools> <b>bold</b> [x] < | > <|",
]
FRAGMENTS = [
    *CONTROL_TOKENS,
    "<|",
    "|>",
    "<",
    ">",
    "/",
    "[",
    "]",
    "think",
    "MASK",
    "user",
    " ",
    "x",
    "é",
]
texts = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


@pytest.fixture(scope="module")
def tangled(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer whose base vocabulary also holds the text of added tokens."""
    data = library_json(also_in_vocabulary=("/nothink", "<think>", "[MASK]", "<|user|>"))
    path = tmp_path_factory.mktemp("tangled")
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return Tokenizer.from_dir(path, config_for(data))


@pytest.fixture(scope="module")
def without_added(data: dict[str, Any]) -> Library:
    return Library.from_str(json.dumps({**data, "added_tokens": []}))


@pytest.mark.parametrize("text", SAMPLES)
def test_ordinary_text_has_the_ids_of_the_library(
    tokenizer: Tokenizer, library: Library, text: str
) -> None:
    assert tokenizer.encode_text(text) == library.encode(text).ids
    assert tokenizer.encode_raw(text) == library.encode(text).ids
    assert tokenizer.decode(tokenizer.encode_text(text)) == text


@settings(deadline=None)
@given(text=texts)
def test_text_never_yields_added_tokens(
    tokenizer: Tokenizer, tangled: Tokenizer, text: str
) -> None:
    for one in (tokenizer, tangled):
        ids = one.encode_text(text)
        assert not {one.control(token) for token in CONTROL_TOKENS} & set(ids)
        assert one.decode(ids) == text


@settings(deadline=None)
@given(text=texts)
def test_text_is_encoded_as_if_there_were_no_added_tokens(
    tokenizer: Tokenizer, without_added: Library, text: str
) -> None:
    assert tokenizer.encode_text(text) == without_added.encode(text).ids


def test_a_word_that_is_also_an_added_token_is_encoded_in_parts(tangled: Tokenizer) -> None:
    assert tangled.encode_raw("/nothink") == [tangled.control("/nothink")]
    safe = tangled.encode_text("/nothink")
    assert safe == tangled.encode_text("/") + tangled.encode_text("nothink")


def test_raw_text_recognises_added_tokens(tokenizer: Tokenizer) -> None:
    text = "".join(CONTROL_TOKENS)
    assert tokenizer.encode_raw(text) == [tokenizer.control(token) for token in CONTROL_TOKENS]


def test_lone_surrogates_become_replacement_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_text("a\ud800b") == tokenizer.encode_text("a\ufffdb")
    assert tokenizer.encode_raw("\udfff") == tokenizer.encode_text("\ufffd")


def test_control_tokens(tokenizer: Tokenizer, data: dict[str, Any]) -> None:
    for token in data["added_tokens"]:
        assert tokenizer.control(token["content"]) == token["id"]
    with pytest.raises(TokenizerError, match="has no token '<tools>'"):
        tokenizer.control("<tools>")


def test_neighbouring_text_is_encoded_as_one(tokenizer: Tokenizer) -> None:
    word, think = "Reasoning Effort", tokenizer.control("<think>")
    whole = tokenizer.encode_text(word)
    for cut in range(1, len(word)):
        apart = [Text(word[:cut]), Text(word[cut:])]
        ids = tokenizer.encode_segments([*apart, Control("<think>"), *apart])
        assert ids == [*whole, think, *whole]
    assert whole != tokenizer.encode_text("Rea") + tokenizer.encode_text("soning Effort")


@dataclass(frozen=True)
class Medium:
    """Stands in for prepared media: all that expansion looks at."""

    kind: str
    slices: int
    tokens: int
    timestamps: tuple[float, ...] = ()


IMAGE, VIDEO = Medium("image", 1, 3), Medium("video", 2, 2, (0.0, 1.04))


def test_media_expand_in_order(tokenizer: Tokenizer, library: Library) -> None:
    parts = [ImagePart(b""), TextPart(" and "), VideoPart(b""), TextPart("?")]
    segments = render([Message("user", parts)], add_generation_prompt=False)
    patch, begin, end = "<|image|>", "<|begin_of_image|>", "<|end_of_image|>"
    expected = (
        "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>"
        f"{begin}{patch * 3}{end} and "
        f"<|begin_of_video|>{begin}{patch * 2}{end}0.0 seconds{begin}{patch * 2}{end}1.0 seconds"
        "<|end_of_video|>?"
    )
    assert tokenizer.encode_segments(segments, [IMAGE, VIDEO]) == library.encode(expected).ids


@pytest.mark.parametrize(
    ("slots", "media", "message"),
    [
        (["image"], [], "1 places for media, but 0 were given"),
        ([], [IMAGE], "0 places for media, but 1 were given"),
        (["image"], [VIDEO], "medium 1 is of kind video, its place of kind image"),
        (["image", "video"], [VIDEO, IMAGE], "medium 1 is of kind video"),
        (["video"], [Medium("video", 2, 2, (0.0,))], "2 slices but 1 times"),
    ],
)
def test_media_that_do_not_match(
    tokenizer: Tokenizer, slots: list[str], media: list[Medium], message: str
) -> None:
    parts = {"image": ImagePart(b""), "video": VideoPart(b"")}
    segments = [MediaSlot(parts[kind].kind, at, parts[kind]) for at, kind in enumerate(slots)]
    with pytest.raises(MediaError, match=message):
        tokenizer.encode_segments(segments, media)


def test_decode_equals_the_library(tokenizer: Tokenizer, library: Library) -> None:
    ids = tokenizer.encode_raw("[gMASK]<sop><|user|>é<think>x</think>🙂<|endoftext|>")
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=True) == "é<think>x</think>🙂"
    assert library.decode(ids, skip_special_tokens=True) == "é<think>x</think>🙂"


@settings(deadline=None)
@given(numbers=st.lists(st.integers(0, 10**6)), skip=st.booleans())
def test_detokenizer_pieces_join_to_the_library_s_text(
    tokenizer: Tokenizer, library: Library, numbers: list[int], skip: bool
) -> None:
    ids = [number % tokenizer.vocab_length for number in numbers]
    stream = Detokenizer(tokenizer, skip_special=skip)
    streamed = "".join(map(stream.push, ids)) + stream.flush()
    assert streamed == library.decode(ids, skip_special_tokens=skip)
    assert streamed == tokenizer.decode(ids, skip_special=skip)


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_detokenizer_holds_back_unfinished_characters(tokenizer: Tokenizer, text: str) -> None:
    """Byte by byte: every piece is whole characters, so pieces never hold a false U+FFFD."""
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(number) for number in byte_ids(tokenizer, text.encode())]
    assert "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    assert stream.flush() == ""


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Single-byte tokens that spell these bytes."""
    single = {}
    for number in range(tokenizer.vocab_length):
        spelled = tokenizer.token_bytes(number)
        if len(spelled) == 1:
            single[spelled[0]] = number
    assert len(single) == 256
    return [single[byte] for byte in data]


def test_detokenizer_decides_about_broken_bytes(tokenizer: Tokenizer) -> None:
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(number) for number in byte_ids(tokenizer, b"\xf0\x9fA\xff\xe3\x81")]
    assert pieces == ["", "", "\ufffdA", "\ufffd", "", ""]
    assert stream.flush() == "\ufffd"
    # an added token ends an unfinished character; a skipped one leaves it open
    smile = byte_ids(tokenizer, "🙂".encode())
    user = tokenizer.control("<|user|>")
    shown, hidden = Detokenizer(tokenizer), Detokenizer(tokenizer, skip_special=True)
    broken = [*smile[:2], user, *smile[2:]]
    assert [shown.push(number) for number in broken] == [
        "",
        "",
        "\ufffd<|user|>",
        "\ufffd",
        "\ufffd",
    ]
    assert [hidden.push(number) for number in broken] == ["", "", "", "", "🙂"]


def test_unused_ids_are_empty_and_others_out_of_range(
    tokenizer: Tokenizer, config: ModelConfig
) -> None:
    assert tokenizer.vocab_length == config.text.vocab_size - 24
    assert tokenizer.decode([tokenizer.vocab_length, config.text.vocab_size - 1]) == ""
    for number in (-1, config.text.vocab_size):
        with pytest.raises(RequestError, match="out of range"):
            tokenizer.decode([number])


def test_a_checkpoint_without_tokenizer(tmp_path: Path, config: ModelConfig) -> None:
    assert Tokenizer.find(tmp_path, config) is None
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json.*pass token ids"):
        Tokenizer.from_dir(tmp_path, config)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[]",
        '{"version": "1.0"}',
        "version https://git-lfs.github.com/spec/v1\noid sha256:0",
    ],
)
def test_broken_files(tmp_path: Path, config: ModelConfig, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="is no tokenizer"):
        Tokenizer.from_dir(tmp_path, config)


def test_a_tokenizer_of_another_kind(
    data: dict[str, Any], config: ModelConfig, build: Build
) -> None:
    with pytest.raises(TokenizerError, match="not a byte-level tokenizer"):
        build({**data, "decoder": {"type": "Fuse"}}, config)


def test_a_tokenizer_that_is_too_large(data: dict[str, Any], build: Build) -> None:
    build(data, config_for(data, spare_rows=0))
    with pytest.raises(TokenizerError, match=r"\d+ tokens, but the model's vocabulary ends at \d+"):
        build(data, config_for(data, spare_rows=-1))


def test_ids_that_do_not_fit_the_config(
    data: dict[str, Any], config: ModelConfig, build: Build
) -> None:
    other_end = replace(config, text=replace(config.text, eos_token_id=(5,)))
    with pytest.raises(TokenizerError, match=r"eos_token_id of config\.json is 5"):
        build(data, other_end)
    assert config.token_ids is not None
    swapped = replace(config.token_ids, image=config.token_ids.video)
    with pytest.raises(TokenizerError, match=r"image_token_id of config\.json is \d+"):
        build(data, replace(config, token_ids=swapped))
    # a text-only model has no media ids to compare
    build(data, replace(config, token_ids=None))


def test_a_tokenizer_without_the_control_tokens(
    data: dict[str, Any], config: ModelConfig, build: Build
) -> None:
    bare = build({**data, "added_tokens": []}, config)
    assert bare.decode(bare.encode_text("plain text")) == "plain text"
    with pytest.raises(TokenizerError, match="which the chat format needs"):
        bare.encode_segments(render([Message("user", "x")]))
    assert config.token_ids is not None
    taken = replace(config, token_ids=replace(config.token_ids, image=7))
    with pytest.raises(TokenizerError, match=r"image_token_id of config\.json is 7"):
        build({**data, "added_tokens": []}, taken)


def test_settings_for_training_do_not_cut_text(
    data: dict[str, Any], config: ModelConfig, build: Build, tokenizer: Tokenizer
) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    text = "a text of more than four tokens"
    assert build({**data, "truncation": cut}, config).encode_raw(text) == tokenizer.encode_raw(text)


@pytest.mark.skipif(
    "GLMFLASH_TOKENIZER" not in os.environ,
    reason="set GLMFLASH_TOKENIZER to the directory of the released tokenizer.json",
)
def test_released_tokenizer_gives_the_published_ids() -> None:
    released = shipped("glm-5.3-flash")
    assert isinstance(released, ModelConfig)
    given = Path(os.environ["GLMFLASH_TOKENIZER"])
    real = Tokenizer.from_dir(given.parent if given.is_file() else given, released)
    assert real.vocab_length == 154_856
    assert [real.control(token) for token in CONTROL_TOKENS] == list(range(154_820, 154_856))
    ids = real.encode_segments(render([Message("user", "Reply with exactly: OK")]))
    opening = [154822, 154824, 154826, 25062, 287, 29905, 371, 25, 7487]
    assert ids == [*opening, 154827, 20795, 448, 6896, 25, 10397, 154828, 154841]
    for effort, number in (("high", 5124), ("low", 12035)):
        assert real.encode_segments(render([], effort=effort))[8] == number
