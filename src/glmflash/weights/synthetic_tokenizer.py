"""A stand-in for the released tokenizer, of any size: same pipeline, same added tokens.

Knows how to make a valid byte-level BPE out of nothing: bytes, common English words, numbers,
then pairs of letters until the asked size is reached. It encodes every text without loss; its ids
have nothing in common with those of the released vocabulary except the 36 added tokens, which are
the last ones, as in the release (154820..154855 at full size). Knows nothing of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from string import ascii_lowercase, digits
from typing import Any

from glmflash.chat.segments import CONTROL_TOKENS
from glmflash.errors import TokenizerError

SPECIAL_COUNT = 18  # the first ones are removed when decoding without special tokens
SMALLEST = 256 + len(CONTROL_TOKENS)
LARGEST = 400_000  # below what the pairs of pairs of letters give

# Tried from left to right at each place (released tokenizer, described in words by its publishers).
_SPLITS = (
    "(?i:'(?:s|t|re|ve|m|ll|d))",  # suffix of an English contraction
    r"[^\r\n\p{L}\p{N}]?\p{L}+",  # letters, with one character in front that is no line end
    r"\p{N}{1,3}",  # up to three digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # symbols, with the line ends behind them
    r"\s*[\r\n]+",  # white space up to the last line end
    r"\s+(?!\S)",  # white space but for the last one, which belongs to the next word
    r"\s+",
)
_SPACE = "\u0120"  # how the byte-level alphabet writes a space
_WORDS = """
    the of and to in is that it for was on are as with be at this have from or by not but what all
    were when we there can an your which their if do will each about how up out them then she many
    some so these would other into has more her two like him see time could no make than first been
    its who now people my made over did down only way find use may water long little very after
    words called just where most know get through back much before go good new write our used me
    man too any day same right look think also around another came come work three word must because
    does part even place well such here take why things help put years different away again off went
    old number great tell men say small every found still between name should home big give air line
    set own under read last never us left end along while might next sound below saw something
    thought both few those always show large often together asked house world going want school
    important until form food keep children feet land side without boy once animal life enough took
    four head above kind began almost live page got earth need far hand high year mother light
    country father let night picture being study second soon story since white ever paper hard
    near sentence
    better best across during today however sure knew try told young sun thing whole hear example
    heard several change answer room sea against top turned learn point city play toward five using
    himself usually money seen car morning image video seconds color red green blue black square
    circle return import class self value list string number function tool call weather file error
    Reasoning Effort Low High Max The You What Answer Tools
"""


def tokenizer_files(size: int, context: int) -> dict[str, str]:
    """`tokenizer.json` and `tokenizer_config.json` of a tokenizer with `size` ids.

    context: longest prompt in tokens. Raises TokenizerError for a size that cannot be.
    """
    base = size - len(CONTROL_TOKENS)
    config = {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": CONTROL_TOKENS[0],
        "extra_special_tokens": CONTROL_TOKENS[:SPECIAL_COUNT],
        "is_local": True,
        "model_max_length": context,
        "model_specific_special_tokens": {},
        "pad_token": CONTROL_TOKENS[0],
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "TokenizersBackend",
    }
    if not SMALLEST <= size <= LARGEST:
        raise TokenizerError(
            f"no synthetic tokenizer of {size:,} tokens can be made: {SMALLEST} are the least "
            f"(256 bytes and {len(CONTROL_TOKENS)} added tokens), {LARGEST:,} the most"
        )
    return {
        "tokenizer.json": json.dumps(_tokenizer(base), ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
    }


def added_token_ids(size: int) -> dict[str, int]:
    """Ids of the 36 added tokens of a tokenizer with `size` ids: the last ones, in fixed order."""
    return {token: size - len(CONTROL_TOKENS) + at for at, token in enumerate(CONTROL_TOKENS)}


def _tokenizer(base: int) -> dict[str, Any]:
    vocabulary, merges = _vocabulary(base)
    added = [
        {
            "id": base + at,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": at < SPECIAL_COUNT,
        }
        for at, token in enumerate(CONTROL_TOKENS)
    ]
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": "|".join(_SPLITS)}, "behavior": "Isolated"}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{**split, "invert": False}, {**bytes_, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**bytes_, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _vocabulary(base: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """`base` entries, every one beyond the 256 bytes the result of one merge of earlier ones."""
    from tokenizers.pre_tokenizers import ByteLevel

    vocabulary = {byte: at for at, byte in enumerate(sorted(ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    candidates = _candidates()
    while len(vocabulary) < base:
        left, right = next(candidates)
        if left + right not in vocabulary:
            vocabulary[left + right] = len(vocabulary)
            merges.append((left, right))
    return vocabulary, merges


def _candidates() -> Iterator[tuple[str, str]]:
    """Merges in order of use; the parts of each were made by earlier ones."""
    for word in _WORDS.split():
        for spelled in (_SPACE + word, word) if word.istitle() else (_SPACE + word,):
            yield from ((spelled[:at], spelled[at]) for at in range(1, len(spelled)))
    pairs = list(product(digits, digits))
    yield from pairs
    yield from ((a + b, c) for a, b in pairs for c in digits)
    letters = [a + b for a, b in product(ascii_lowercase, ascii_lowercase)]
    yield from product(ascii_lowercase, ascii_lowercase)
    yield from product(letters, letters)
