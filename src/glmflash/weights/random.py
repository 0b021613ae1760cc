"""Random checkpoints in the layout of the release, streamed to disk.

Knows which random values make mistakes visible (the usual initialisation hides most of them) and
how to write tensors one after another without holding them. Each tensor has a generator of its
own, so its values depend on the seed and its name alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glmflash.errors import CheckpointError, ResourceError
from glmflash.weights.fp8 import quantize
from glmflash.weights.presets import Preset
from glmflash.weights.synthetic_tokenizer import tokenizer_files
from glmflash.weights.table import BF16, F32, FP8, SCALE_SUFFIX, Storage, TensorSpec

SHARD_BYTES = 5_368_709_120  # of the release
BLOCK_ELEMENTS = 1 << 22  # values drawn at once, in whole FP8 block rows: 16 MiB in fp32
_TORCH = {BF16: torch.bfloat16, F32: torch.float32, FP8: torch.float8_e4m3fn}
_ROOM_LEFT = 1 << 20  # for config, index and tokenizer, beside the tensors
GIB = 1 << 30


@dataclass(frozen=True)
class Shard:
    """One file to write: its name and its tensors in order, a weight just before its scales."""

    name: str
    tensors: list[TensorSpec]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the header."""
        return sum(spec.nbytes for spec in self.tensors)

    def header(self) -> bytes:
        """The length of the header and the header, padded so that the data is aligned."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for spec in self.tensors:
            offsets = [start, start + spec.nbytes]
            entries[spec.name] = {
                "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets
            }  # fmt: skip
            start += spec.nbytes
        raw = json.dumps(entries, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        return len(raw).to_bytes(8, "little") + raw


def write_checkpoint(
    out: str | os.PathLike[str],
    preset: Preset,
    storage: Storage | None = None,
    seed: int = 0,
    shard_size: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Write a whole checkpoint into the new directory `out`; returns the bytes of its tensors.

    storage: None is the preset's own. progress: called with bytes written and bytes in all.
    Everything is written beside `out` and moved there at the end, so `out` is whole or absent.
    Raises CheckpointError if `out` holds something, ResourceError where the disk has no room.
    """
    target = Path(out)
    storage = storage or preset.storage
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target} exists and is not empty; give a new directory")
    shards = _shards(preset.tensors(storage), shard_size)
    total = sum(shard.nbytes for shard in shards)
    parent = target.absolute().parent
    partial = parent / f".{target.name}.{os.getpid()}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _check_room(parent, target, total)
        partial.mkdir()
        done = 0
        for shard in shards:
            for written in _write_shard(partial / shard.name, shard, seed):
                done += written
                progress(done, total)
        _write_texts(partial, preset, storage, shards, total)
        partial.replace(target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise ResourceError(
                f"the disk of {target} is full: the checkpoint needs {total:,} bytes; nothing was "
                "left behind; free some space or give another place"
            ) from error
        raise ResourceError(f"cannot write {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return total


def _check_room(parent: Path, target: Path, total: int) -> None:
    free = shutil.disk_usage(parent).free
    if total + _ROOM_LEFT > free:
        raise ResourceError(
            f"{target} needs {total / GIB:.2f} GiB, but {free / GIB:.2f} GiB is free there; "
            "give fewer --layers or --experts, or another place"
        )


def _shards(specs: dict[str, TensorSpec], shard_size: int) -> list[Shard]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for name, spec in specs.items():
        if name.endswith(SCALE_SUFFIX):
            continue
        scales = specs.get(name + SCALE_SUFFIX)
        group = [spec, scales] if scales else [spec]
        nbytes = sum(s.nbytes for s in group)
        if groups[-1] and size + nbytes > shard_size:
            groups.append([])
            size = 0
        groups[-1] += group
        size += nbytes
    count = len(groups)
    return [
        Shard(f"model-{i:05d}-of-{count:05d}.safetensors", group)
        for i, group in enumerate(groups, 1)
    ]


def _write_shard(path: Path, shard: Shard, seed: int) -> Iterator[int]:
    """Write one file, yielding bytes of tensor data as they are written."""
    with path.open("wb") as file:
        file.write(shard.header())
        scales: list[Tensor] = []
        for spec in shard.tensors:
            if spec.name.endswith(SCALE_SUFFIX):
                blocks = iter([torch.cat(scales)])
            else:
                scales = []
                blocks = _stored_blocks(spec, seed, scales)
            for block in blocks:
                yield file.write(block.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _stored_blocks(spec: TensorSpec, seed: int, scales: list[Tensor]) -> Iterator[Tensor]:
    """The tensor as it is stored, some rows at a time; an FP8 weight's scales go to `scales`."""
    for block in random_blocks(spec, seed):
        if spec.dtype == FP8:
            stored, scale = quantize(block)
            scales.append(scale)
            yield stored
        else:
            yield block.to(_TORCH[spec.dtype])


def random_blocks(spec: TensorSpec, seed: int) -> Iterator[Tensor]:
    """fp32 values of a tensor, whole rows at a time; the same for every call."""
    digest = hashlib.sha256(f"{seed} {spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    draw = _distribution(spec)
    width = max(1, torch.Size(spec.shape[1:]).numel())
    step = max(1, BLOCK_ELEMENTS // (width * 128)) * 128  # whole rows of FP8 blocks
    for start in range(0, spec.shape[0], step):
        rows = min(step, spec.shape[0] - start)
        yield draw(torch.empty(rows, *spec.shape[1:]), generator)


def _distribution(spec: TensorSpec) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Values that let every part matter: no norm is 1, no bias 0, gates spread over their range.

    Matrices have a deviation of 1.2 / sqrt(inputs), which is 0.15 at a width of 64.
    """

    def uniform(low: float, high: float) -> Callable[[Tensor, torch.Generator], Tensor]:
        return lambda t, g: t.uniform_(low, high, generator=g)

    def normal(deviation: float) -> Callable[[Tensor, torch.Generator], Tensor]:
        return lambda t, g: t.normal_(0, deviation, generator=g)

    last = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if last == "A_log":
        return uniform(-1, 1)
    if last == "dt_bias":
        return uniform(-3, 1)
    if last.endswith("_scale"):  # of mHC
        return uniform(0.5, 1.5)
    if last.endswith("_base"):
        return normal(0.5)
    if last == "index_kpool_compress_ape":
        return normal(0.15)
    if last.endswith("bias"):
        return normal(0.1)
    if len(spec.shape) == 1:  # norms
        return uniform(0.5, 1.5)
    return normal(1.2 * torch.Size(spec.shape[1:]).numel() ** -0.5)


def _write_texts(
    folder: Path, preset: Preset, storage: Storage, shards: list[Shard], total: int
) -> None:
    """Index, configs and tokenizer."""
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    config = preset.stored_config(storage)
    text = config.text
    generation = {
        "_from_model_config": True,
        "eos_token_id": list(text.eos_token_id),
        "pad_token_id": text.pad_token_id,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    files = {
        "model.safetensors.index.json": _json(index),
        "config.json": _json(config.to_dict()),
        "generation_config.json": _json(generation),
        **tokenizer_files(preset.tokenizer_size, text.max_position_embeddings),
    }
    if config.vision:
        from glmflash.chat.processor import FILE, ProcessorConfig

        files[FILE] = _json(ProcessorConfig().to_dict())
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
