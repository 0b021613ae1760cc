"""What all commands share: the console, JSON output, one place that prints errors."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def console(stderr: bool = False) -> Console:
    """A rich console; colours only on a terminal (NO_COLOR is honoured), text in brackets kept."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False)


def print_json(facts: Any) -> None:
    """Write `facts` as indented JSON on stdout, nothing else."""
    json.dump(facts, sys.stdout, indent=2, ensure_ascii=False)
    sys.stdout.write("\n")


def print_error(message: str) -> None:
    """One line on stderr: `error: message`, red on a terminal only."""
    head = "\x1b[31merror:\x1b[0m" if sys.stderr.isatty() else "error:"
    sys.stderr.write(f"{head} {message}\n")
