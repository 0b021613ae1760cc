"""A small byte-level tokenizer in the layout of the release, and a config that fits it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Library
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from glmflash.chat.segments import CONTROL_TOKENS
from glmflash.chat.tokenizer import Tokenizer
from glmflash.config import ModelConfig, TokenIds, shipped

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "Reasoning Effort: Max Low High. Reply with exactly: OK. 0.0 seconds 12.5 seconds",
    "You may call one or more functions to assist with the user query. The model's own words.",
    '{"name": "weather", "description": "Get weather", "parameters": {"type": "object"}}',
    "def f(x):\n    return x + 1\n\n\nprint(f(2))\n",
    "<|x|> <|y|> </b> </i> <tag> [MASKED] a || b // use think tool user system",
    "東京の天気は晴れです。東京は日本の首都です。Straße, café, naïve. Привет, мир! 🙂🙂🌍",
] * 4


def library_json(
    merges_until: int = 700, also_in_vocabulary: tuple[str, ...] = ()
) -> dict[str, Any]:
    """tokenizer.json as an object: a trained base vocabulary, then the 36 added tokens.

    also_in_vocabulary: texts that are ordinary entries too, as trainers leave them behind.
    """
    library = Library(BPE())
    library.pre_tokenizer = Sequence(
        [
            Split(Regex(SPLIT), "isolated"),
            ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ]
    )
    library.decoder = ByteLevelDecoder()
    library.train_from_iterator(
        CORPUS,
        BpeTrainer(
            vocab_size=merges_until,
            initial_alphabet=sorted(ByteLevel.alphabet()),
            special_tokens=list(also_in_vocabulary),
            show_progress=False,
        ),
    )
    data: dict[str, Any] = json.loads(library.to_str())
    data["model"]["ignore_merges"] = True
    vocabulary: dict[str, int] = data["model"]["vocab"]
    number = len(vocabulary)
    data["added_tokens"] = []
    for at, token in enumerate(CONTROL_TOKENS):
        known = vocabulary.get(token)
        data["added_tokens"].append(
            {
                "id": number if known is None else known,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": at < 18,
            }
        )
        number += known is None
    return data


def config_for(data: dict[str, Any], spare_rows: int = 24) -> ModelConfig:
    """The released config with the vocabulary and ids of a small tokenizer."""
    ids = {token["content"]: token["id"] for token in data["added_tokens"]}
    released = shipped("glm-5.3-flash")
    assert isinstance(released, ModelConfig)
    text = replace(
        released.text,
        vocab_size=1 + max(*ids.values(), *data["model"]["vocab"].values()) + spare_rows,
        eos_token_id=(ids["<|endoftext|>"], ids["<|user|>"], ids["<|observation|>"]),
        pad_token_id=ids["<|endoftext|>"],
    )
    media = TokenIds(
        image=ids["<|image|>"],
        video=ids["<|video|>"],
        image_start=ids["<|begin_of_image|>"],
        image_end=ids["<|end_of_image|>"],
        video_start=ids["<|begin_of_video|>"],
        video_end=ids["<|end_of_video|>"],
    )
    return replace(released, text=text, token_ids=media)


@pytest.fixture(scope="session")
def data() -> dict[str, Any]:
    return library_json()


@pytest.fixture(scope="session")
def config(data: dict[str, Any]) -> ModelConfig:
    return config_for(data)


@pytest.fixture(scope="session")
def directory(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def library(directory: Path) -> Library:
    """The same file read by the library alone: what the official pipeline would do."""
    return Library.from_file(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    return Tokenizer.from_dir(directory, config)


@pytest.fixture
def build(tmp_path: Path) -> Callable[[dict[str, Any], ModelConfig], Tokenizer]:
    """Write a tokenizer.json and read it."""

    def make(data: dict[str, Any], config: ModelConfig) -> Tokenizer:
        (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
        return Tokenizer.from_dir(tmp_path, config)

    return make
