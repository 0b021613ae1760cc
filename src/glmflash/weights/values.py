"""Random values of a tensor: which ones make mistakes visible, and how to draw them.

The usual initialisation hides most mistakes (norms of 1, biases of 0, gates all alike); these
values hide none and stay finite at any width. Each tensor has a generator of its own, so its values
depend on the seed and its name alone, not on order, block size, threads or processor. Knows no
file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from torch import Tensor

from glmflash.weights.table import BF16, TensorSpec

LEVELS = 1 << 16  # a value is one of so many quantiles, chosen by 16 random bits
BLOCK_ROWS = 128  # an FP8 scale covers so many rows
BLOCK_VALUES = 1 << 20  # drawn at once, but at least BLOCK_ROWS rows: 4 MiB in fp32
CACHED_VALUES = 1 << 16  # looked up at once, so that their indices stay in the cache of a core
DEVIATION = 1.2  # of a matrix's outputs for inputs of 1; its values deviate by 0.15 at width 64

_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Normal:
    """Mean 0. The tails end at 4.3 deviations."""

    deviation: float


@dataclass(frozen=True)
class Uniform:
    """Between low and high, both excluded."""

    low: float
    high: float


def distribution(spec: TensorSpec) -> Normal | Uniform:
    """How the values of a tensor are spread, by its name and shape (specification, 9.2)."""
    last = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last == "A_log":
        return Uniform(-1, 1)
    if last == "dt_bias":
        return Uniform(-3, 1)
    if last in ("hc_attn_scale", "hc_ffn_scale"):
        return Uniform(0.5, 1.5)
    if last in ("hc_attn_base", "hc_ffn_base"):
        return Normal(0.5)
    if last in ("index_kpool_compress_ape", "embed_tokens"):
        return Normal(0.15)
    if last.endswith("bias"):
        return Normal(0.1)
    if len(spec.shape) == 1:
        return Uniform(0.5, 1.5)  # norms
    return Normal(DEVIATION / math.sqrt(math.prod(spec.shape[1:])))


def draw(spec: TensorSpec, seed: int) -> Iterator[Tensor]:
    """The values as `[rows, columns]`, some rows at a time, in row-major order.

    bf16 for a tensor that is stored so, else fp32. Every block but the last has a multiple of
    BLOCK_ROWS rows.
    """
    dtype = torch.bfloat16 if spec.dtype == BF16 else torch.float32
    table = _quantiles(distribution(spec)).to(dtype)
    # numpy knows no bf16; a lookup only moves bits
    bits = table.view(torch.int16).numpy() if spec.dtype == BF16 else table.numpy()
    digest = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    generator = np.random.SFC64(int.from_bytes(digest, "little"))
    rows, columns = spec.shape[0], math.prod(spec.shape[1:])
    step = max(1, BLOCK_VALUES // (BLOCK_ROWS * columns)) * BLOCK_ROWS
    for begin in range(0, rows, step):
        block = np.empty((min(step, rows - begin), columns), bits.dtype)
        _fill(block.reshape(-1), bits, generator)
        yield torch.from_numpy(block).view(dtype)


def _fill(out: _Array, table: _Array, generator: np.random.SFC64) -> None:
    for begin in range(0, out.size, CACHED_VALUES):
        part = out[begin : begin + CACHED_VALUES]
        # four choices from each 64-bit number; all blocks but the last hold a multiple of four
        words = generator.random_raw(-(-part.size // 4))
        choices = words.astype("<u8", copy=False).view("<u2")[: part.size]
        np.take(table, choices, out=part, mode="clip")


def _quantiles(spread: Normal | Uniform) -> Tensor:
    """LEVELS equally likely values, fp32."""
    if isinstance(spread, Normal):
        return torch.from_numpy(_standard_normal() * spread.deviation).float()
    middle = (np.arange(LEVELS) + 0.5) / LEVELS
    return torch.from_numpy(spread.low + (spread.high - spread.low) * middle).float()


@cache
def _standard_normal() -> _Array:
    inverse = NormalDist().inv_cdf
    upper = [inverse((level + 0.5) / LEVELS) for level in range(LEVELS // 2, LEVELS)]
    return np.array([-value for value in reversed(upper)] + upper)
