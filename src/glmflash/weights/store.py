"""The tensors of a checkpoint, as they lie in its files.

Knows how to map the shards and hand out views of them: no tensor is read before it is used, and
none is copied unless it must be. Knows nothing of what the tensors are for.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch
from torch import Tensor

from glmflash.config import ModelConfig
from glmflash.errors import CheckpointError, ConfigError
from glmflash.weights.fp8 import dequantize
from glmflash.weights.headers import TensorInfo
from glmflash.weights.index import Checkpoint, summarize
from glmflash.weights.table import SCALE_SUFFIX

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
}
# A private map may be larger than the memory: it holds file pages, which are never written.
_PRIVATE = mmap.MAP_PRIVATE | getattr(
    mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0
)


class WeightStore:
    """An open checkpoint of GLM-5.3-Flash. A context manager; treat its tensors as read-only.

    Tensors that were handed out stay valid after `close`; the files are unmapped with the last.
    """

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.config = config
        self.root: Path = checkpoint.root
        self.shards = checkpoint.shards
        self.has_mtp = checkpoint.has_mtp
        self.nbytes = sum(info.nbytes for _, info in checkpoint.tensors.values())
        self._tensors: dict[str, tuple[str, TensorInfo]] = checkpoint.tensors
        self._maps = {shard: _map(self.root / shard) for shard in checkpoint.shards}
        self._check_scales()

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> WeightStore:
        """Open a directory: checks all headers against the config, and all FP8 scales.

        Raises CheckpointError, or ConfigError for a config that cannot be run.
        """
        checkpoint = Checkpoint.open(path)
        if checkpoint.config is None:
            raise ConfigError(f"{checkpoint.root} holds no config.json, so it is not a checkpoint")
        if not isinstance(checkpoint.config, ModelConfig):
            raise ConfigError(
                f"{checkpoint.root}: model_type is {checkpoint.config.model_type!r}; "
                "expected 'glm5_next' (GLM-5.3 can be inspected and compared, but not run)"
            )
        checkpoint.check()
        return cls(checkpoint, checkpoint.config)

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget the maps; further reads raise RuntimeError. May be called twice."""
        self._maps = {}

    def drop_pages(self) -> None:
        """Give back the memory of what was read so far; a later read fetches it again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in self._maps.values():
                file.madvise(mmap.MADV_DONTNEED)

    def names(self) -> Iterable[str]:
        """All stored tensors, FP8 scales included."""
        return self._tensors.keys()

    def has(self, name: str) -> bool:
        """Whether the tensor is stored."""
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file in the stored type; a copy only if its offset is unaligned.

        Raises CheckpointError for a name that the checkpoint does not hold.
        """
        if name not in self._tensors:
            raise CheckpointError(f"{self.root} holds no tensor {name}")
        shard, info = self._tensors[name]
        if shard not in self._maps:
            raise RuntimeError(f"the weight store of {self.root} is closed")
        dtype = DTYPES[info.dtype]
        if not info.nbytes:
            return torch.empty(info.shape, dtype=dtype)
        raw = torch.frombuffer(
            self._maps[shard], dtype=torch.uint8, count=info.nbytes, offset=info.start
        )
        if info.start % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def scale(self, name: str) -> Tensor | None:
        """The scales of the FP8 weight `name`; None if it is not FP8."""
        scales = name + SCALE_SUFFIX
        return self.tensor(scales) if scales in self._tensors else None

    def dense(
        self, name: str, dtype: torch.dtype, round_to: Literal["bf16", "none"] = "bf16"
    ) -> Tensor:
        """The tensor in `dtype`: a view if it is stored so, else a copy.

        FP8 weights are dequantised and, before the cast, rounded once to bf16 as transformers does
        it; round_to="none" leaves that rounding out.
        """
        scale = self.scale(name)
        stored = self.tensor(name)
        return (stored if scale is None else dequantize(stored, scale, round_to=round_to)).to(dtype)

    def _check_scales(self) -> None:
        # Scales lie scattered between their weights: without this, the system reads ahead after
        # each (64 times slower on the released shards).
        for file in self._maps.values():
            file.madvise(mmap.MADV_RANDOM)
        wrong = [
            name
            for name in self._tensors
            if name.endswith(SCALE_SUFFIX) and not bool(self.tensor(name).isfinite().all())
        ]
        for file in self._maps.values():
            file.madvise(mmap.MADV_NORMAL)
        if wrong:
            raise CheckpointError(
                f"{self.root}: NaN or infinite scales in {summarize(wrong)}; "
                "the files are damaged: download them again"
            )


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(
                file.fileno(), 0, flags=_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
            )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be mapped: {error.strerror}") from error
