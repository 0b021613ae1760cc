"""Quiet transformers, one thread a worker, and one checkpoint per variant and session."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

import glmflash

with warnings.catch_warnings():  # importing transformers warns of its own affairs
    warnings.simplefilter("ignore")
    import torch
    from transformers.utils import logging as transformers_logging

    from .cases import BY_NAME, Case
    from .runs import trusted_logits
    from .tiny import Tiny

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


@dataclass
class Specimen:
    """One variant: its checkpoint and oracle, its prompt, the oracle's answer, and our engine."""

    case: Case
    tiny: Tiny
    stack: ExitStack

    @cached_property
    def ids(self) -> list[int]:
        return self.case.ids

    @cached_property
    def expected(self) -> np.ndarray:
        """The oracle's fp32 logits [T, vocab], after the check that they may be trusted."""
        return trusted_logits(self.tiny.oracle, self.ids)

    @cached_property
    def engine(self) -> glmflash.Engine:
        return self.open()

    def open(self, **settings: object) -> glmflash.Engine:
        """A further engine, closed when the session ends."""
        settings = {"dtype": "float32", **settings}
        return self.stack.enter_context(glmflash.open(self.tiny.path, **settings))


class Zoo:
    """Makes each variant when it is first asked for."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root, self.stack = root, stack
        self.made: dict[str, Specimen] = {}

    def __getitem__(self, name: str) -> Specimen:
        if name not in self.made:
            case = BY_NAME[name]
            tiny = case.make(self.root / name.replace(" ", "-").replace(",", ""))
            self.made[name] = Specimen(case, tiny, self.stack)
        return self.made[name]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zoo]:
    with ExitStack() as stack:
        yield Zoo(tmp_path_factory.mktemp("zoo"), stack)
