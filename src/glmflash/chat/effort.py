"""Thinking effort: the three depths the prompt format knows. Knows nothing about templates."""

from __future__ import annotations

from typing import Literal

from glmflash.errors import RequestError

Effort = Literal["low", "high", "max"]

_KNOWN: dict[str, Effort] = {"low": "low", "high": "high", "max": "max"}


def normalise(effort: str | None) -> Effort:
    """The effort by its known name; None is the format's own default, "max".

    Raises RequestError on any other word: the released template would silently render Max for
    it, which is rarely what "none" or "medium" was meant to say.
    """
    if effort is None:
        return "max"
    try:
        return _KNOWN[effort.lower()]
    except KeyError:
        raise RequestError(
            f"effort {effort!r} is not known; use {', '.join(_KNOWN)} (thinking has no off switch)"
        ) from None
