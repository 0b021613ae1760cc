"""`glmflash info`: what runs here, and with what."""

from __future__ import annotations

import os
import platform
from typing import Annotated

import typer

from glmflash._version import __version__


def info(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Versions, processor, memory and optional parts: paste it into an issue.

    Example:

      glmflash info --json
    """
    from glmflash.cli.common import console, print_json

    facts = _facts()
    if json_:
        print_json(facts)
        return
    screen = console()
    for name, value in facts.items():
        screen.print(f"{name:12} {value}")


def _facts() -> dict[str, object]:
    import torch

    from glmflash import kernels
    from glmflash.engine.memory import available_bytes

    return {
        "glmflash": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "memory_free": available_bytes(),
        "kernels": kernels.report(),
        "media": _installed("PIL", "av"),
    }


def _installed(*modules: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(module) for module in modules)
