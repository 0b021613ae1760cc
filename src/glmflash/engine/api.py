"""The engine: a checkpoint opened for use, and the few calls that everything else goes through.

Knows how a prompt becomes tokens, features and chunks; the arithmetic is the model's, the text
format is chat's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glmflash.chat.media import PreparedMedia, ProcessorConfig, prepare
from glmflash.chat.messages import Message
from glmflash.chat.template import JinjaTemplate, render
from glmflash.chat.tokenizer import Tokenizer
from glmflash.engine import generation
from glmflash.engine.loading import GenerationDefaults, fingerprint, locate, plan_memory
from glmflash.engine.placement import Placed, place
from glmflash.engine.session import Media, Session, restore
from glmflash.engine.types import Delta, Generation, SamplingParams
from glmflash.errors import MediaError, RequestError, TokenizerError
from glmflash.model.text import TextModel
from glmflash.model.vision import VisionTower
from glmflash.model.weights import Weights
from glmflash.settings import Settings
from glmflash.state.sequence import SequenceState
from glmflash.weights.store import WeightStore

Prompt = str | Sequence[int] | Sequence[Message]


def open_engine(
    target: str | os.PathLike[str],
    settings: Settings | None = None,
    progress: Callable[[int], None] = lambda _: None,
    **overrides: Any,
) -> Engine:
    """Open a checkpoint directory, or a hub id that is in the local hub cache.

    overrides: fields of Settings. progress: called with the number of layers built. Raises a
    GlmflashError that says what is missing or wrong.
    """
    chosen = (settings or Settings()).override(**overrides)
    return Engine(locate(target), chosen, progress)


class Engine:
    """An open checkpoint; a context manager."""

    def __init__(
        self,
        directory: Path,
        settings: Settings,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.directory, self.settings = directory, settings
        self.store = WeightStore.open(directory)
        try:
            self.config = self.store.config
            name = self.config.text.dtype if settings.dtype == "auto" else settings.dtype
            self.dtype = torch.float32 if name == "float32" else torch.bfloat16
            if settings.threads:
                torch.set_num_threads(settings.threads)
            exact = settings.round_weights == "none"
            resident = plan_memory(self.store, self.dtype, exact)
            weights = Weights(self.store, self.dtype, resident, exact)
            self.tokenizer = Tokenizer.find(directory, self.config)
            self.render = (
                JinjaTemplate.from_dir(directory).render
                if settings.chat_template == "checkpoint"
                else render
            )
            self.defaults = GenerationDefaults.from_dir(directory, self.config.text)
            self.processor = ProcessorConfig.from_dir(directory)
            if self.config.vision:
                self.processor.check(self.config.vision)
            self.fingerprint = fingerprint(self.store, settings, self.dtype)
            with torch.inference_mode():
                self.model = TextModel(weights, self.config.text, self._wants_mtp(), progress)
                self.vision = VisionTower(self.store, self.dtype) if self.config.vision else None
            if resident:
                self.store.drop_pages()
        except BaseException:
            self.store.close()
            raise

    def _wants_mtp(self) -> bool:
        if self.settings.mtp and not self.store.has_mtp:
            raise RequestError(
                f"mtp=True, but {self.directory} holds no MTP layer (config says "
                f"{self.config.text.num_nextn_predict_layers}); open it without"
            )
        return self.settings.mtp

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the weights; the engine and its sessions cannot be used afterwards."""
        del self.model, self.vision
        self.store.close()

    def session(self) -> Session:
        """A new, empty sequence."""
        return Session(self)

    def restore(self, path: str | os.PathLike[str]) -> Session:
        """A session saved by `Session.save` on an equal model and equal settings."""
        return restore(self, path)

    def logits(self, token_ids: Sequence[int], media: Sequence[Media] = ()) -> NDArray[np.float32]:
        """Logits `[T, vocab]` of a whole prompt, teacher forced. media: in order of appearance."""
        ids = self.check_tokens(token_ids)
        if not ids:
            raise RequestError("the prompt is empty: logits need at least one token id")
        parts = []
        for _, hidden in self.read(ids, 0, self.place(ids, media), self.model.new_state()):
            with torch.inference_mode():
                parts.append(self.model.head(hidden).numpy())
        return np.concatenate(parts)

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, media: Sequence[Media] = ()
    ) -> Generation:
        """Continue a prompt; see `stream`."""
        return generation.collect(self.stream(prompt, params, media))

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        media: Sequence[Media] = (),
        progress: Callable[[int], None] = lambda _: None,
    ) -> Iterator[Delta]:
        """Continue a prompt, piece by piece.

        prompt: messages (rendered as a chat), raw text (control tokens recognised), or ids.
        media: for ids and raw text, in order of appearance; messages carry their own. progress:
        called with prompt tokens read so far. Raises RequestError before the first piece.
        """
        params = params or SamplingParams()
        ids, prepared = generation.encode(self, prompt, params, media)
        return generation.run(self, ids, prepared, params, progress)

    # What sessions and generation share

    def check_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """The ids as plain ints. Raises RequestError if one is out of range or too many."""
        ids = [int(t) for t in token_ids]
        vocab = self.config.text.vocab_size
        for position, token in enumerate(ids):
            if not 0 <= token < vocab:
                raise RequestError(
                    f"token id {token} at position {position} is out of range 0..{vocab - 1}"
                )
        self.check_length(len(ids))
        return ids

    def check_length(self, length: int) -> None:
        """Raises RequestError if `length` tokens do not fit the context."""
        limit = self.config.text.max_position_embeddings
        if length > limit:
            raise RequestError(
                f"the prompt has {length} tokens, the context holds {limit}; shorten it"
            )

    def is_placeholder(self, token_id: int) -> bool:
        """Whether the id stands for a feature of a picture or video."""
        ids = self.config.token_ids
        return ids is not None and self.vision is not None and token_id in (ids.image, ids.video)

    def prepare(self, media: Sequence[Media]) -> list[PreparedMedia]:
        """Decode and cut pictures and videos. Raises MediaError."""
        return [m if isinstance(m, PreparedMedia) else prepare(m, self.processor) for m in media]

    def place(self, ids: list[int], media: Sequence[Media]) -> list[Placed]:
        """Media with the positions of their placeholders. Raises MediaError on a mismatch."""
        if self.vision is None or self.config.token_ids is None:
            if media:
                raise MediaError("this checkpoint is text-only: it has no vision tower")
            return []
        return place(ids, self.prepare(media), self.config.token_ids)

    def read(
        self, ids: list[int], start: int, placed: list[Placed], state: SequenceState
    ) -> Iterator[tuple[int, Tensor]]:
        """Advance `state` over the ids of positions start.., chunk by chunk.

        placed: media of the whole sequence. Yields the length so far and hidden states `[t, D]`.
        """
        with torch.inference_mode():
            features = self._features(placed, start)
        step = self.settings.prefill_chunk
        for first in range(start, start + len(ids), step):
            chunk = torch.tensor(ids[first - start : first - start + step])
            with torch.inference_mode():
                embeddings = self.model.embed(chunk)
                if features is not None:
                    positions, rows = features
                    inside = (positions >= first) & (positions < first + len(chunk))
                    embeddings[positions[inside] - first] = rows[inside]
                hidden = self.model.forward(embeddings, (state, len(chunk)))
            yield first + len(chunk), hidden

    def _features(self, placed: list[Placed], start: int) -> tuple[Tensor, Tensor] | None:
        """Positions `[n]` and features `[n, D]` of the media that begin at `start` or later."""
        if self.vision is None:
            return None
        new = [p for p in placed if p.positions[0] >= start]
        if not new:
            return None
        positions = torch.tensor([i for p in new for i in p.positions])
        rows = [self.vision(torch.from_numpy(p.media.pixel_values), p.media.grid) for p in new]
        return positions, torch.cat(rows)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError if the checkpoint has none."""
        if self.tokenizer is None:
            raise TokenizerError(
                f"{self.directory} has no tokenizer.json: text cannot be encoded; "
                "pass token ids, or add the file"
            )
        return self.tokenizer
