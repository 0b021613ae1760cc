"""How `inspect` and `compare` show facts: borderless tables, short numbers, a bar for headers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from glmflash.cli.common import console

if TYPE_CHECKING:
    from rich.table import Table


@contextmanager
def fetching() -> Iterator[Callable[[int, int], None]]:
    """A progress bar on stderr that appears with the first remote header; terminals only."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = console(stderr=True)
    columns = (TextColumn("reading headers"), BarColumn(), MofNCompleteColumn())
    bar = Progress(*columns, console=screen, transient=True)
    task = bar.add_task("")

    def update(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if screen.is_terminal:
            bar.start()

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()


def table(*columns: str, wrap: str | None = None) -> Table:
    """A borderless table: the first column left, the others right; `wrap` names one of prose."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    found = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title_justify="left")
    for place, name in enumerate(columns):
        prose = name == wrap
        left = prose or place == 0
        found.add_column(name, justify="left" if left else "right", no_wrap=not prose)
    return found


def short(value: float) -> str:
    """1234567 as 1.23 M; nothing for numbers that are short by themselves."""
    for unit, letter in ((10**9, "B"), (10**6, "M")):
        if value >= unit:
            return f"{value / unit:.2f} {letter}"
    return ""


def size(nbytes: float) -> str:
    """1234567 as 1.23 MB: decimal units."""
    for unit, letters in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {letters}"
    return f"{nbytes:g} B"


@contextmanager
def uncollected() -> Iterator[None]:
    """Without garbage collection: half a million small objects come to be, and none is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
