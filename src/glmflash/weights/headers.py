"""The header of a safetensors file: which tensors it holds, of which type, where.

Knows the file format and every way a header can be wrong. Reads no tensor and trusts no number:
nothing is allocated or read before it is known to fit into the file.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from glmflash.config_values import shorten
from glmflash.errors import CheckpointError

LENGTH_BYTES = 8  # little-endian size of the JSON that follows
LARGEST_HEADER = 100_000_000  # the format's own limit
LFS_START = b"version https://git-lfs"
ITEM_BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file. start, end: byte offsets from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """A checked header. header_bytes: everything before the first tensor, length field included."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    header_bytes: int


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a local file. Raises CheckpointError."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(min(size, 64))
            wanted = header_size(first, size, str(path))
            return parse_header(first + file.read(wanted - len(first)), size, str(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {path}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def header_size(first_bytes: bytes, file_size: int, where: str) -> int:
    """How many bytes at the start of the file `parse_header` needs.

    first_bytes: 64 bytes or the whole file if it is shorter. where: names the file in messages.
    Raises CheckpointError for a file that is no safetensors file.
    """
    if first_bytes.startswith(LFS_START):
        raise CheckpointError(
            f"{where} is a Git LFS pointer of {file_size} bytes, not the weights; "
            "run 'git lfs pull' or download the file itself"
        )
    length = int.from_bytes(first_bytes[:LENGTH_BYTES], "little")
    if len(first_bytes) < LENGTH_BYTES or file_size < LENGTH_BYTES + length:
        found = (
            f"announces a header of {length} bytes" if len(first_bytes) >= 8 else "has no header"
        )
        raise CheckpointError(
            f"{where} {found}, but the file has {file_size} bytes: it is truncated or not a "
            "safetensors file; download it again"
        )
    if length > LARGEST_HEADER:
        raise CheckpointError(
            f"{where} announces a header of {length} bytes; at most {LARGEST_HEADER} are allowed, "
            "so this is not a safetensors file"
        )
    return LENGTH_BYTES + length


def parse_header(first_bytes: bytes, file_size: int, where: str) -> Header:
    """Check the start of a file: the length field, the JSON, and every entry against the size.

    first_bytes: at least as many bytes as `header_size` says. Raises CheckpointError.
    """
    end = header_size(first_bytes, file_size, where)
    if len(first_bytes) < end:
        raise CheckpointError(f"{where}: only {len(first_bytes)} of {end} header bytes arrived")
    entries = _parse_json(first_bytes[LENGTH_BYTES:end], where)
    metadata = _metadata(entries.pop("__metadata__", {}), where)
    tensors = {name: _tensor(name, entry, end, where) for name, entry in entries.items()}
    _check_layout(tensors, end, file_size, where)
    return Header(tensors, metadata, end)


def _parse_json(raw: bytes, where: str) -> dict[str, Any]:
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{where} has no JSON header: it is not a safetensors file")
    try:
        text = raw.decode("utf-8")
        return dict(json.loads(text, object_pairs_hook=_unique, parse_int=_natural))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{where} has a damaged header ({reason}); download it again"
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, unless a name occurs twice or a text is no valid Unicode, hence not printable."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        name.encode()
        if isinstance(value, str):
            value.encode()
        if name in found:
            raise CheckpointError(f"the header names {shorten(name)} twice; download it again")
        found[name] = value
    return found


def _natural(digits: str) -> int:
    """Sizes and offsets: no sign, and no more digits than 64 bits have."""
    if digits.startswith("-") or len(digits) > 20:
        raise CheckpointError(f"the header holds the number {digits[:24]}: it is damaged")
    return int(digits)


def _metadata(found: object, where: str) -> dict[str, str]:
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: __metadata__ is {shorten(found)}; expected an object")
    for key, value in found.items():
        if not isinstance(value, str):
            raise CheckpointError(
                f"{where}: __metadata__ {shorten(key)} is {shorten(value)}; expected a string"
            )
    return found


def _tensor(name: str, entry: object, data_start: int, where: str) -> TensorInfo:
    """Check one entry by itself: known type, a shape, and offsets as long as the shape needs."""
    label = f"{where}: tensor {shorten(name)}"
    if not isinstance(entry, dict):
        raise CheckpointError(f"{label} is {shorten(entry)}; expected an object")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise CheckpointError(f"{label} has the type {shorten(dtype)}, which is not known")
    if not _is_integers(shape):
        raise CheckpointError(f"{label} has the shape {shorten(shape)}; expected sizes >= 0")
    if not _is_integers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{label} has data_offsets {shorten(offsets)}; expected [begin, end]")
    begin, end = offsets
    if not _fills(shape, ITEM_BITS[dtype], end - begin):
        raise CheckpointError(
            f"{label} is {dtype} {shorten(shape)}, which does not fit its {end - begin} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_integers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _fills(shape: list[int], bits: int, nbytes: int) -> bool:
    """Whether a tensor takes exactly `nbytes`; stops before hostile sizes make huge products."""
    total = bits
    if 0 in shape:
        total = 0
    for size in shape:
        total *= size
        if total > 8 * nbytes:
            return False
    return total == 8 * nbytes


def _check_layout(tensors: dict[str, TensorInfo], start: int, file_size: int, where: str) -> None:
    """The tensors must follow one another without gap or overlap, up to the end of the file."""
    position, before = start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.end)):
        if info.start != position:
            fault = "overlaps" if info.start < position else "leaves a gap after"
            raise CheckpointError(
                f"{where}: tensor {shorten(info.name)} {fault} {before}: it begins at byte "
                f"{info.start}, expected {position}; download the file again"
            )
        position, before = info.end, f"tensor {shorten(info.name)}"
    if position > file_size:
        raise CheckpointError(
            f"{where} is truncated: its tensors end at byte {position}, but the file has "
            f"{file_size} bytes; download it again"
        )
    if position < file_size:
        raise CheckpointError(
            f"{where} has {file_size - position} bytes after its last tensor; download it again"
        )
