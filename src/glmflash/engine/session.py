"""One sequence: make its state equal to a prompt, step by tokens, copy, save, restore."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glmflash.chat.media import Image, PreparedMedia, Video
from glmflash.engine.placement import Placed
from glmflash.errors import CheckpointError, RequestError, ResourceError
from glmflash.state.sequence import SequenceState

if TYPE_CHECKING:
    from glmflash.engine.api import Engine

Media = Image | Video | PreparedMedia
FORMAT = "glmflash-session-1"


class Session:
    """The state of one sequence on an engine. Not safe for use from several threads at once.

    logits: fp32 `[vocab]`, of the position after the last token; None before the first.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.state: SequenceState = engine.model.new_state()
        self.tokens: list[int] = []
        self.media: list[tuple[int, str]] = []  # first placeholder's position, digest
        self._hidden: Tensor | None = None

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """See the class; computed from the last hidden state."""
        if self._hidden is None:
            return None
        with torch.inference_mode():
            logits: NDArray[np.float32] = self.engine.model.head(self._hidden)[0].numpy()
        return logits

    def sync(
        self,
        token_ids: Sequence[int],
        media: Sequence[Media] = (),
        progress: Callable[[int], None] = lambda _: None,
    ) -> int:
        """Make the state equal to exactly these tokens; returns how many were reused.

        media: in order of appearance. The state is kept where the old tokens and media are a
        prefix of the new ones, and built anew otherwise (a KDA state cannot be cut back). Only
        the last position's logits are computed. progress: called with tokens read so far.
        """
        ids = self.engine.check_tokens(token_ids)
        placed = self.engine.place(ids, media)
        spans = [(p.positions[0], p.media.digest) for p in placed]
        reused = len(self.tokens)
        if self.tokens != ids[:reused] or [s for s in spans if s[0] < reused] != self.media:
            self.reset()
            reused = 0
        progress(reused)
        self._read(ids[reused:], placed, progress)
        self.media = spans
        return reused

    def _read(self, new: list[int], placed: list[Placed], progress: Callable[[int], None]) -> None:
        try:
            for done, hidden in self.engine.read(new, len(self.tokens), placed, self.state):
                self._hidden = hidden[-1:]
                progress(done)
        except BaseException:
            self.reset()  # some layers have read the chunk and some have not
            raise
        self.tokens += new

    def reset(self) -> None:
        """Forget everything: the state before the first token."""
        self.state = self.engine.model.new_state()
        self.tokens, self.media, self._hidden = [], [], None

    def step(self, token_id: int) -> NDArray[np.float32]:
        """Append one token; returns the fp32 logits `[vocab]` of the next position."""
        new = self.engine.check_tokens([token_id])
        self.engine.check_length(len(self.tokens) + 1)
        if self.engine.is_placeholder(token_id):
            raise RequestError(
                f"token {token_id} is a media placeholder; media come in through sync"
            )
        self._read(new, [], lambda _: None)
        logits = self.logits
        if logits is None:
            raise RuntimeError("a step left no logits")
        return logits

    def draft(self, count: int, after: int | None = None) -> list[int]:
        """Greedy MTP drafts of the `count` tokens that follow `after`; the state stays as it is.

        after: the token chosen for the next position; None is the most likely one. Needs an
        engine opened with mtp=True.
        """
        if self.engine.model.mtp is None:
            raise RequestError("drafts need the MTP layer: open the checkpoint with mtp=True")
        logits = self.logits
        if logits is None:
            raise RequestError("drafts need at least one token in the session")
        token = int(logits.argmax()) if after is None else self.engine.check_tokens([after])[0]
        with torch.inference_mode():
            return self.engine.model.draft(self.state, token, count)

    def fork(self) -> Session:
        """An independent session that continues from here."""
        other = Session(self.engine)
        other.state = self.state.fork()
        other.tokens, other.media = list(self.tokens), list(self.media)
        other._hidden = self._hidden
        return other

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the session to a file, whole or not at all. Raises ResourceError if it cannot."""
        from safetensors.torch import save_file

        tensors = {k: t.contiguous() for k, t in self.state.tensors().items()}
        tensors["tokens"] = torch.tensor(self.tokens, dtype=torch.int64)
        if self._hidden is not None:
            tensors["hidden"] = self._hidden.contiguous()
        metadata = {
            "format": FORMAT,
            "model": self.engine.fingerprint,
            "media": json.dumps(self.media),
        }
        target = Path(path)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            save_file({k: t.clone() for k, t in tensors.items()}, partial, metadata)
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(target)
        except Exception as error:  # safetensors wraps I/O errors in a type of its own
            raise ResourceError(f"cannot write the session to {target}: {error}") from error
        finally:
            partial.unlink(missing_ok=True)


def restore(engine: Engine, path: str | os.PathLike[str]) -> Session:
    """A session from a file written by `Session.save` on an equal model and equal settings."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a saved session: {error}") from error
    if metadata.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a saved session (format {metadata.get('format')})")
    if metadata.get("model") != engine.fingerprint:
        raise CheckpointError(
            f"{path} was saved with another model or other settings (fingerprint "
            f"{metadata.get('model')}, here {engine.fingerprint}); read the prompt anew"
        )
    session = Session(engine)
    try:
        session.tokens = [int(t) for t in tensors["tokens"]]
        session.media = [(int(p), str(d)) for p, d in json.loads(metadata["media"])]
        session.state.load(tensors, len(session.tokens))
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is a damaged session: {error} is missing") from error
    session._hidden = tensors.get("hidden")
    return session


__all__ = ["Media", "Placed", "Session", "restore"]
