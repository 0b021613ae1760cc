"""Text to token ids and back.

Knows the checkpoint's tokenizer.json, which ids are control tokens, and how media slots expand.
Knows no chat rules. Ordinary text never yields the id of an added token, whatever it spells.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from glmflash.chat.segments import Control, MediaSlot, Segment, Text, slot_tokens
from glmflash.errors import MediaError, RequestError, TokenizerError

if TYPE_CHECKING:
    import tokenizers

    from glmflash.config import ModelConfig

FILE = "tokenizer.json"

_MEDIA_TOKENS = {
    "image": "<|image|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "video": "<|video|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
}
_EOS_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Prepared(Protocol):
    """What a slot needs to know of a medium: see `glmflash.chat.media.PreparedMedia`."""

    @property
    def kind(self) -> str: ...
    @property
    def slices(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def timestamps(self) -> Sequence[float]: ...


class Tokenizer:
    """A byte-level BPE tokenizer with added tokens.

    vocab_length: ids below it stand for something; the model's vocabulary may have more rows.
    """

    def __init__(self, path: Path, config: ModelConfig) -> None:
        """Read tokenizer.json. Raises TokenizerError if it is broken or does not fit `config`."""
        self._path = path
        self._full = _load(path)
        self._plain = _without_added_tokens(self._full)
        added = self._full.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._added = {token.content: number for number, token in added.items()}
        self._special = {number for number, token in added.items() if token.special}
        self._bytes = {number: token.content.encode() for number, token in added.items()}
        self.vocab_length: int = 1 + max(self._full.get_vocab(with_added_tokens=True).values())
        self._rows = config.text.vocab_size
        self._check(config)

    @classmethod
    def from_dir(cls, directory: str | Path, config: ModelConfig) -> Tokenizer:
        """The tokenizer of a checkpoint directory. Raises TokenizerError if there is none."""
        found = cls.find(directory, config)
        if found is None:
            raise TokenizerError(
                f"{directory} has no {FILE}: text cannot be encoded; add the file of the release, "
                "or pass token ids, which need none"
            )
        return found

    @classmethod
    def find(cls, directory: str | Path, config: ModelConfig) -> Tokenizer | None:
        """The tokenizer of a checkpoint directory, or None if it has no tokenizer.json."""
        path = Path(directory) / FILE
        return cls(path, config) if path.exists() else None

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; never those of added tokens. Lone surrogates become U+FFFD."""
        return self._ordinary(_encodable(text))

    def encode_raw(self, text: str) -> list[int]:
        """Ids of text in which added tokens are recognised. Not for text of unknown origin."""
        return list(self._full.encode(_encodable(text), add_special_tokens=False).ids)

    def encode_segments(
        self, segments: Iterable[Segment], prepared: Sequence[Prepared] = ()
    ) -> list[int]:
        """Ids of a rendered prompt, each slot expanded to the tokens of its medium.

        prepared: the media in order of appearance. Raises MediaError where slots and media do
        not match.
        """
        ids: list[int] = []
        texts: list[str] = []
        slots = 0
        for segment in segments:
            if isinstance(segment, Text):
                # neighbouring text is one piece for BPE
                texts.append(segment.text)
                continue
            if texts:
                ids += self.encode_text("".join(texts))
                texts.clear()
            if isinstance(segment, Control):
                ids.append(self.control(segment.token))
                continue
            if slots < len(prepared):
                ids += self._expand(segment, prepared[slots])
            slots += 1
        if slots != len(prepared):
            raise MediaError(
                f"the prompt has {slots} places for media, but {len(prepared)} were given"
            )
        return ids + self.encode_text("".join(texts)) if texts else ids

    def control(self, token: str) -> int:
        """Id of an added token. Raises TokenizerError if the tokenizer has none of this name."""
        try:
            return self._added[token]
        except KeyError:
            raise TokenizerError(
                f"{self._path} has no token {token!r}, which the chat format needs; "
                f"it has {len(self._added)} added tokens"
            ) from None

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of ids; bytes that are no UTF-8 become U+FFFD. Raises RequestError (range)."""
        parts = [self.token_bytes(number, skip_special) for number in ids]
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_special: bool = False) -> bytes:
        """Bytes that one token stands for; none for unused ids of the vocabulary.

        Raises RequestError if the id is outside the model's vocabulary.
        """
        if skip_special and token_id in self._special:
            return b""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self._rows:
                raise RequestError(f"token id {token_id} is out of range 0..{self._rows - 1}")
            known = self._bytes[token_id] = _spelled_bytes(self._full.id_to_token(token_id) or "")
        return known

    def _ordinary(self, text: str) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = list(encoding.ids)
        if self._added_ids.isdisjoint(ids):
            return ids
        # This vocabulary also holds an added token's text as an ordinary entry, and a whole word
        # that is an entry is not split by BPE: encode such a word in two parts.
        safe: list[int] = []
        for number, (start, end) in zip(ids, encoding.offsets, strict=True):
            if number not in self._added_ids:
                safe.append(number)
            elif end - start > 1:
                safe += self._ordinary(text[start : start + 1])
                safe += self._ordinary(text[start + 1 : end])
            else:
                raise TokenizerError(
                    f"{self._path} makes the single character {text[start:end]!r} an added token, "
                    "so text that holds it cannot be told from the token"
                )
        return safe

    def _expand(self, slot: MediaSlot, medium: Prepared) -> list[int]:
        if slot.kind != medium.kind:
            raise MediaError(
                f"medium {slot.index + 1} is of kind {medium.kind}, its place of kind {slot.kind}"
            )
        begin, patch, end = map(self.control, slot_tokens("image"))
        picture = [begin, *[patch] * medium.tokens, end]
        if slot.kind == "image":
            return picture
        if len(medium.timestamps) != medium.slices:
            raise MediaError(
                f"the video has {medium.slices} slices but {len(medium.timestamps)} times"
            )
        begin, _, end = map(self.control, slot_tokens("video"))
        # every slice is shown like a picture, followed by its time
        times = (self.encode_text(f"{seconds:.1f} seconds") for seconds in medium.timestamps)
        return [begin, *(number for time in times for number in (*picture, *time)), end]

    def _check(self, config: ModelConfig) -> None:
        if self.vocab_length > self._rows:
            raise TokenizerError(
                f"{self._path} has {self.vocab_length} tokens, but the model's vocabulary ends at "
                f"{self._rows} (text_config.vocab_size); it belongs to another model"
            )
        ends = {self._added[token] for token in _EOS_TOKENS if token in self._added}
        for number in config.text.eos_token_id:
            if ends and number not in ends:
                raise TokenizerError(
                    f"eos_token_id of config.json is {number}, but in {self._path} the tokens that "
                    f"end a turn have the ids {sorted(ends)}; config and tokenizer do not belong "
                    "together"
                )
        if config.token_ids is None:
            return
        for key, number in asdict(config.token_ids).items():
            token = _MEDIA_TOKENS[key]
            there = self._full.id_to_token(number)
            if self._added.get(token, number) != number or there not in (token, None):
                raise TokenizerError(
                    f"{key}_token_id of config.json is {number}, but in {self._path} {token} is "
                    f"{self._added.get(token, 'missing')} and {number} is {there!r}; "
                    "config and tokenizer do not belong together"
                )


class Detokenizer:
    """Text of a stream of tokens, piece by piece; the pieces joined are `decode` of all ids.

    A character whose bytes are spread over tokens comes out once, when it is whole.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; often empty. Raises RequestError."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, self._skip_special))

    def flush(self) -> str:
        """What was held back, at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


def _encodable(text: str) -> str:
    return _LONE_SURROGATE.sub("\ufffd", text)


def _load(path: Path) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise TokenizerError(f"{path} is no tokenizer: {error}; fetch the file again") from None
    if not isinstance(loaded.decoder, tokenizers.decoders.ByteLevel):
        raise TokenizerError(
            f"{path} is not a byte-level tokenizer as GLM-5.3-Flash has one; "
            "it belongs to another model"
        )
    # a file saved for training may ask for cut or padded text
    loaded.no_truncation()
    loaded.no_padding()
    return loaded


def _without_added_tokens(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A tokenizer that shares vocabulary and splitting with `full` but knows no added token."""
    import tokenizers

    plain = tokenizers.Tokenizer(full.model)
    if full.normalizer is not None:
        plain.normalizer = full.normalizer
    if full.pre_tokenizer is not None:
        plain.pre_tokenizer = full.pre_tokenizer
    return plain


@cache
def _byte_of() -> dict[str, int]:
    """The byte that each character of the byte-level alphabet stands for.

    Visible characters of Latin-1 stand for themselves; the 68 other bytes, in order, are the
    characters from U+0100 on (the alphabet of GPT-2).
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(b): b for b in visible} | {chr(0x100 + at): b for at, b in enumerate(others)}


def _spelled_bytes(token: str) -> bytes:
    byte_of = _byte_of()
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:
        return token.encode()
