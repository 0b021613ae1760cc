"""Progress bars on stderr for what takes more than a moment; silent where it is no terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from glmflash.cli.common import console


@contextmanager
def loading(name: str) -> Iterator[Callable[[int], None]]:
    """While a checkpoint is opened: give the yielded function the number of layers built."""
    with _bar(f"opening {name}", "layers") as update:
        yield update


@contextmanager
def reading() -> Iterator[Callable[[int], None]]:
    """While a prompt is read: give the yielded function the number of tokens read."""
    with _bar("reading the prompt", "tokens") as update:
        yield update


@contextmanager
def writing(name: str) -> Iterator[Callable[[int, int], None]]:
    """While a checkpoint is written: give the yielded function bytes written and bytes in all."""
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    screen = console(stderr=True)
    title = TextColumn("{task.description}", markup=False)
    columns = (title, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(
        *columns, TimeRemainingColumn(), console=screen, transient=True,
        disable=not screen.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(f"writing {name}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def _bar(title: str, unit: str) -> Iterator[Callable[[int], None]]:
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        TextColumn(f"{{task.completed}} {unit}"),
        TimeElapsedColumn(),
    )
    screen = console(stderr=True)
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done: bar.update(task, completed=done)
