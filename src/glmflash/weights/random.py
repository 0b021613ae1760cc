"""Random checkpoints in the layout of the release, streamed to disk.

Knows how to write tensors one after another without holding them, and how to leave nothing behind
when that fails. What the values are is in `glmflash.weights.values`, which models there are in
`glmflash.weights.presets`.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from glmflash.chat.processor import FILE as PROCESSOR_FILE
from glmflash.chat.processor import ProcessorConfig
from glmflash.errors import CheckpointError, ResourceError
from glmflash.weights.fp8 import quantize
from glmflash.weights.index import INDEX_NAME
from glmflash.weights.presets import Preset
from glmflash.weights.synthetic_tokenizer import tokenizer_files
from glmflash.weights.table import FP8, ITEM_BYTES, SCALE_SUFFIX, Storage, TensorSpec
from glmflash.weights.values import draw

SHARD_BYTES = 5 << 30  # as the release
GIB = 1 << 30
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Shard:
    """One file to write. places: byte offset of each tensor from the start of the file."""

    name: str
    header: bytes
    tensors: tuple[TensorSpec, ...]
    places: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.tensors)


def write_checkpoint(
    out: str | os.PathLike[str],
    preset: Preset,
    storage: Storage | None = None,
    seed: int = 0,
    shard_size: int = SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> int:
    """Write a whole checkpoint into the new directory `out`; returns the bytes of its tensors.

    storage: None is the preset's own. shard_size: most bytes of tensors in a file; a larger tensor
    has a file to itself. progress: called with bytes of tensors written and in all. Equal arguments
    give equal files. Everything is written beside `out` and moved there at the end, so `out` is
    whole or absent. Raises CheckpointError if `out` holds something, ResourceError where the disk
    has no room or refuses.
    """
    target = Path(out).resolve()
    if target.is_mount() or (target.exists() and not (target.is_dir() and _is_empty(target))):
        raise CheckpointError(f"{out} exists and is not empty; give a new directory")
    storage = storage or preset.storage
    specs = preset.tensors(storage)
    shards = _shards(specs, shard_size)
    texts = _texts(preset, storage, shards)
    total = sum(spec.nbytes for spec in specs.values())
    needed = sum(shard.nbytes for shard in shards) + sum(map(len, texts.values()))
    # closing: after Ctrl-C no worker may be left when the folder is removed
    with _place(target, needed) as folder, closing(_write_shards(folder, shards, seed)) as steps:
        done = 0
        for written in steps:
            done += written
            progress(done, total)
        for name, text in texts.items():
            (folder / name).write_bytes(text)
    return total


def _is_empty(directory: Path) -> bool:
    return not any(directory.iterdir())


@contextmanager
def _place(target: Path, needed: int) -> Iterator[Path]:
    """A directory that becomes `target` if all goes well, and vanishes otherwise."""
    try:
        _check_room(target, needed)
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            yield folder
            folder.chmod(0o777 & ~_umask())  # mkdtemp makes it private
            folder.replace(target)
        finally:  # on Ctrl-C too
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceError(
                f"the disk of {target} is full, or files there are limited: the checkpoint needs "
                f"{_size(needed)}; nothing was left behind; free some space or give another place"
            ) from error
        raise ResourceError(
            f"cannot write {target}: {error.strerror}; nothing was left behind"
        ) from error


def _check_room(target: Path, needed: int) -> None:
    there = next(parent for parent in target.parents if parent.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ResourceError(
            f"{target} needs {_size(needed)}, but {_size(free)} is free there; "
            "give fewer --layers or --experts, or another place"
        )


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.2f} MiB"


def _shards(specs: Mapping[str, TensorSpec], shard_size: int) -> list[Shard]:
    """Share the tensors among files in their order; a weight and its scales stay together."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for name, spec in specs.items():
        if _is_scale(spec):
            continue
        group = [spec, specs[name + SCALE_SUFFIX]] if spec.dtype == FP8 else [spec]
        nbytes = sum(member.nbytes for member in group)
        if groups[-1] and size + nbytes > shard_size:
            groups.append([])
            size = 0
        groups[-1] += group
        size += nbytes
    count = len(groups)
    return [
        _shard(f"model-{number:05}-of-{count:05}.safetensors", group)
        for number, group in enumerate(groups, 1)
    ]


def _shard(name: str, tensors: list[TensorSpec]) -> Shard:
    # wide types first: then each tensor is aligned to its own type, whatever the shapes
    tensors = sorted(tensors, key=lambda spec: -ITEM_BYTES[spec.dtype])
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    offsets = {}
    for spec in tensors:
        offsets[spec.name] = position
        end = position + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [position, end]
        }  # fmt: skip
        position = end
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    header = len(raw).to_bytes(8, "little") + raw
    places = {name: len(header) + offset for name, offset in offsets.items()}
    return Shard(name, header, tuple(tensors), places)


def _write_shards(folder: Path, shards: list[Shard], seed: int) -> Generator[int, None, None]:
    """Write the files, as many tensors at once as there are cores; yields bytes of tensors."""
    for shard in shards:
        (folder / shard.name).write_bytes(shard.header)
    with _workers() as pool:
        yield from pool.map(
            lambda job: _write_tensor(folder / job[0].name, job[1], job[0].places, seed),
            ((shard, s) for shard in shards for s in shard.tensors if not _is_scale(s)),
        )
    for shard in shards:
        with (folder / shard.name).open("rb") as file:
            os.fsync(file.fileno())  # a full disk must show itself before the move


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """One per thread of torch, which gets a single one: blocks are too small to be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _is_scale(spec: TensorSpec) -> bool:
    return spec.name.endswith(SCALE_SUFFIX)


def _write_tensor(path: Path, spec: TensorSpec, places: Mapping[str, int], seed: int) -> int:
    """Write a tensor, and its scales if it is FP8, into its places. Returns the bytes written."""
    scales: list[Tensor] = []
    written = 0
    with path.open("r+b") as file:
        file.seek(places[spec.name])
        for block in draw(spec, seed):
            stored = block
            if spec.dtype == FP8:
                stored, scale = quantize(block)
                scales.append(scale)
            written += _write(file, stored)
        if scales:
            file.seek(places[spec.name + SCALE_SUFFIX])
            written += _write(file, torch.cat(scales))
    return written


def _write(file: IO[bytes], values: Tensor) -> int:
    return file.write(values.view(torch.uint8).numpy().data)


def _texts(preset: Preset, storage: Storage, shards: list[Shard]) -> dict[str, bytes]:
    """All other files by name: index, configs, tokenizer."""
    config = preset.stored_config(storage)
    text = config.text
    weights = sorted((spec.name, shard.name) for shard in shards for spec in shard.tensors)
    total = sum(spec.nbytes for shard in shards for spec in shard.tensors)
    released = resources.files("glmflash") / "data" / "glm-5.3-flash.generation_config.json"
    generation = json.loads(released.read_text(encoding="utf-8"))
    generation |= {"eos_token_id": list(text.eos_token_id), "pad_token_id": text.pad_token_id}
    texts = {
        INDEX_NAME: _json({"metadata": {"total_size": total}, "weight_map": dict(weights)}),
        "config.json": _json(config.to_dict()),
        "generation_config.json": _json(generation),
        **tokenizer_files(preset.tokenizer_size, text.max_position_embeddings),
    }
    if config.vision:
        texts[PROCESSOR_FILE] = _json(ProcessorConfig().to_dict())
    return {name: content.encode() for name, content in texts.items()}


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"
