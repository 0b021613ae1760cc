"""Typed settings of an engine. Knows defaults and ranges; knows nothing about the model."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from glmflash.errors import RequestError

Dtype = Literal["auto", "bfloat16", "float32"]
ChatTemplate = Literal["native", "checkpoint"]


@dataclass(frozen=True)
class Settings:
    """How to run a model.

    dtype: compute type. "auto" is the checkpoint's own (bfloat16 for the release).
    threads: CPU threads; None is the number of physical cores.
    prefill_chunk: tokens computed together while reading a prompt; bounds scratch memory.
    mtp: keep the MTP layer's caches current, so that sessions can draft tokens.
    round_weights: "none" takes FP8 weights as fp32(w8) * scale; "bf16" rounds that product once,
    as transformers does (to compare with it; the weights then take twice the memory).
    chat_template: who renders messages: "native" is this package, "checkpoint" the checkpoint's
    own chat_template.jinja, in a sandbox.
    """

    dtype: Dtype = "auto"
    threads: int | None = None
    prefill_chunk: int = 512
    mtp: bool = False
    round_weights: Literal["none", "bf16"] = "none"
    chat_template: ChatTemplate = "native"

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "bfloat16", "float32"):
            raise RequestError(
                f"dtype {self.dtype!r} is not known; use 'auto', 'bfloat16' or 'float32'"
            )
        if self.round_weights not in ("none", "bf16"):
            raise RequestError(
                f"round_weights {self.round_weights!r} is not known; use 'none' or 'bf16'"
            )
        if self.chat_template not in ("native", "checkpoint"):
            raise RequestError(
                f"chat_template {self.chat_template!r} is not known; use 'native' or 'checkpoint'"
            )
        if self.threads is not None and not 1 <= self.threads <= 4096:
            raise RequestError(f"threads must be 1..4096, not {self.threads}")
        if not 1 <= self.prefill_chunk <= 1 << 20:
            raise RequestError(f"prefill_chunk must be 1..1048576, not {self.prefill_chunk}")

    def override(self, **overrides: Any) -> Settings:
        """A copy with some fields replaced. Raises RequestError on an unknown name."""
        known = [f.name for f in fields(self)]
        for name in overrides:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise RequestError(f"there is no setting {name!r}{hint}")
        return replace(self, **overrides)
