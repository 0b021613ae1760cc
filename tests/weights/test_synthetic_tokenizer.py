"""The stand-in tokenizer: size, ids, pipeline of the release, and no text lost."""

import hashlib
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glmflash.chat.segments import CONTROL_TOKENS
from glmflash.chat.tokenizer import Tokenizer
from glmflash.errors import TokenizerError
from glmflash.weights.presets import preset
from glmflash.weights.synthetic_tokenizer import added_token_ids, tokenizer_files

RELEASED_SIZE = 154_856
# from the published list of added tokens
RELEASED_IDS = {
    "<|endoftext|>": 154820, "[gMASK]": 154822, "<sop>": 154824, "<|system|>": 154826,
    "<|user|>": 154827, "<|assistant|>": 154828, "<|observation|>": 154829,
    "<|begin_of_image|>": 154830, "<|end_of_transcription|>": 154837, "<|code_prefix|>": 154838,
    "<think>": 154841, "</think>": 154842, "<tool_call>": 154843, "/nothink": 154851,
    "<|image|>": 154854, "<|video|>": 154855,
}  # fmt: skip


@pytest.fixture(scope="module")
def small() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_files(2024, 4096)["tokenizer.json"])


@pytest.fixture(scope="module")
def released() -> dict:
    return json.loads(tokenizer_files(RELEASED_SIZE, 1_048_576)["tokenizer.json"])


@pytest.mark.parametrize("size", [292, 293, 2024, 32_744, RELEASED_SIZE])
def test_exactly_the_asked_ids(size) -> None:
    made = tokenizers.Tokenizer.from_str(tokenizer_files(size, 4096)["tokenizer.json"])
    assert sorted(made.get_vocab().values()) == list(range(size))


def test_the_largest_can_be_made() -> None:
    made = json.loads(tokenizer_files(400_000, 4096)["tokenizer.json"])
    assert len(made["model"]["vocab"]) == 400_000 - 36


def test_real_size_has_the_real_ids(released) -> None:
    made = {token["content"]: token for token in released["added_tokens"]}
    assert len(released["model"]["vocab"]) == 154_820
    assert len(made) == 36
    assert {name: made[name]["id"] for name in RELEASED_IDS} == RELEASED_IDS
    assert added_token_ids(RELEASED_SIZE) == {name: token["id"] for name, token in made.items()}
    for token in made.values():
        assert token["special"] == (token["id"] <= 154837), token
        assert not any(token[key] for key in ("lstrip", "rstrip", "normalized", "single_word"))


def test_every_merge_joins_earlier_entries(released) -> None:
    ids = released["model"]["vocab"]
    assert len(released["model"]["merges"]) == len(ids) - 256
    for number, (left, right) in enumerate(released["model"]["merges"], 256):
        assert ids[left] < number
        assert ids[right] < number
        assert ids[left + right] == number


def test_tokenizer_config_is_the_released_file() -> None:
    text = tokenizer_files(RELEASED_SIZE, 1_048_576)["tokenizer_config.json"]
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "98b1271574f41abf89427ae2dda030d94dc9478f0edc5a8bd240db213c6fd5fc"
    )


def test_pipeline_settings(released) -> None:
    model = released["model"]
    assert (model["type"], model["ignore_merges"], model["byte_fallback"]) == ("BPE", True, False)
    assert model["unk_token"] is released["normalizer"] is released["post_processor"] is None
    assert released["decoder"]["type"] == "ByteLevel"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It's WE'LL we'vex", ["It", "'s", " WE", "'LL", " we", "'ve", "x"]),
        ("12345 a1", ["123", "45", " a", "1"]),
        ("(word) --ok\n\nx", ["(word", ")", " --", "ok", "\n\n", "x"]),
        (" !?\r\n\n-", [" !?\r\n\n", "-"]),
        ("a   b  \n c ", ["a", "  ", " b", "  \n", " c", " "]),
        ("naïve 漢字\t语", ["naïve", " 漢字", "\t语"]),
    ],
)
def test_splits_in_the_order_of_the_release(small, text, pieces) -> None:
    found = [text[begin:end] for _, (begin, end) in small.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


def test_common_words_and_numbers_are_one_token(small) -> None:
    assert small.encode(" the weather 123").tokens == ["Ġthe", "Ġweather", "Ġ", "123"]
    assert small.encode("Reasoning Effort: Max").tokens == ["Reasoning", "ĠEffort", ":", "ĠMax"]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_no_text_is_lost(small, text) -> None:
    ids = small.encode(text, add_special_tokens=True).ids
    assert small.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_are_dropped_and_others_kept(small) -> None:
    ids = small.encode("".join(CONTROL_TOKENS)).ids
    assert ids == list(added_token_ids(2024).values())
    assert small.decode(ids, skip_special_tokens=True) == "".join(CONTROL_TOKENS[18:])


def test_fits_the_config_and_knows_text_from_controls(tmp_path) -> None:
    made = preset("tiny")
    for name, text in tokenizer_files(made.tokenizer_size, 4096).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path, made.config)
    assert tokenizer.vocab_length == made.config.text.vocab_size - 24
    assert tokenizer.control("<|image|>") == made.config.token_ids.image
    first = tokenizer.control("<|endoftext|>")
    assert max(tokenizer.encode_text("<|user|><think>")) < first <= tokenizer.encode_raw("<sop>")[0]


@pytest.mark.parametrize("size", [-1, 0, 291, 400_001])
def test_impossible_sizes(size) -> None:
    with pytest.raises(TokenizerError, match="292 are the least"):
        tokenizer_files(size, 4096)
