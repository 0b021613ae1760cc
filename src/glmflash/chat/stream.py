"""From generated tokens to text, with thoughts apart from the answer.

Knows the two tags that open and close a thought, by token id; other tags stay in the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from glmflash.chat.tokenizer import Detokenizer, Tokenizer


class ThoughtSplitter:
    """Turns tokens into pieces of (answer, reasoning).

    The prompt decides where it starts: inside a thought if its last think tag opens one. Without
    a tokenizer every piece is empty.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._thinking = False
        if tokenizer is None:
            return
        self._open, self._close = tokenizer.control("<think>"), tokenizer.control("</think>")
        self._detokenizer = Detokenizer(tokenizer, skip_special=True)
        tags = [token for token in prompt if token in (self._open, self._close)]
        self._thinking = bool(tags) and tags[-1] == self._open

    def push(self, token: int) -> tuple[str, str]:
        """The text that `token` adds, as (answer, reasoning); either may be empty."""
        if self._tokenizer is None:
            return "", ""
        if token in (self._open, self._close):
            piece = self._piece(self._detokenizer.flush())
            self._thinking = token == self._open
            return piece
        return self._piece(self._detokenizer.push(token))

    def end(self, token: int | None) -> tuple[str, str]:
        """The last piece: `token` where it belongs to the text, and whatever was held back."""
        if self._tokenizer is None:
            return "", ""
        first = ("", "") if token is None else self.push(token)
        rest = self._piece(self._detokenizer.flush())
        return first[0] + rest[0], first[1] + rest[1]

    def _piece(self, text: str) -> tuple[str, str]:
        return ("", text) if self._thinking else (text, "")
