"""Chooses the kernels of this process and says which they are.

Knows the compiled modules, one per instruction set, and which of them the processor can run;
knows nothing about any operation. The choice is made once, at import: the best set there is, or
the one that GLMFLASH_KERNELS names (reference, portable, avx2, avx512).
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import torch  # noqa: F401  (first: the kernels then share its OpenMP runtime)

from glmflash.errors import ResourceError

REFERENCE = "reference"


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(f"glmflash._native_{name}")
    except ModuleNotFoundError:
        return None


def _load() -> dict[str, ModuleType]:
    portable = _import("portable")
    names: list[str] = portable.supported() if portable else []
    modules = {name: _import(name) for name in names}
    return {name: module for name, module in modules.items() if module}


_modules = _load()


def available() -> list[str]:
    """Kernel sets that run here, best first; always ends with "reference"."""
    return [*_modules, REFERENCE]


def _choose() -> str:
    wanted = os.environ.get("GLMFLASH_KERNELS", "")
    if not wanted:
        return available()[0]
    if wanted not in available():
        raise ResourceError(
            f"GLMFLASH_KERNELS={wanted!r}: no such kernels here; there are {', '.join(available())}"
        )
    return wanted


_active = _choose()


def active() -> str:
    """Name of the kernel set in use: avx512, avx2, portable or reference."""
    return _active


def native(name: str | None = None) -> ModuleType | None:
    """The compiled module of kernel set `name` (default: the active one); None for "reference".

    Raises ResourceError if `name` does not run here.
    """
    name = name or _active
    if name not in available():
        raise ResourceError(f"no {name!r} kernels here; there are {', '.join(available())}")
    return _modules.get(name)


def report() -> str:
    """One line for people: the kernel set in use, and why where it is not the best."""
    if _active != REFERENCE:
        return f"{_active} (native)"
    if _modules:
        return "reference (torch), as GLMFLASH_KERNELS asks"
    return (
        "reference (torch): installed without a C++ compiler, so slow; reinstall with g++ present"
    )


def set_threads(count: int) -> None:
    """Threads of every native kernel; 0 is OpenMP's default, which torch.set_num_threads sets."""
    for module in _modules.values():
        module.set_threads(count)
