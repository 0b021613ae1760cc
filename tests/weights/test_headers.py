"""Safetensors headers: agreement with the safetensors library, faults by hand, and a fuzz."""

from __future__ import annotations

import copy
import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from glmflash.errors import CheckpointError
from glmflash.weights.headers import Header, header_size, parse_header, read_header


def pack(header: Any, data: int = 0) -> bytes:
    """A file: length, JSON (or raw bytes), and `data` bytes of tensors."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def entry(begin: int = 0, end: int = 4, dtype: Any = "F32", shape: Any = (1,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def parse(content: bytes) -> Header:
    return parse_header(content, len(content), "f.safetensors")


def test_reads_what_the_library_writes(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 7),
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp8": torch.randn(2, 9).to(torch.float8_e4m3fn),
        "odd.bytes": torch.arange(3, dtype=torch.uint8),
        "long name é": torch.ones(1, 1, 1, 2, dtype=torch.int64),
    }
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"format": "pt", "é": "\n"})
    header, content = read_header(path), path.read_bytes()
    assert header.metadata == {"format": "pt", "é": "\n"}
    assert set(header.tensors) == set(tensors)
    for name, tensor in tensors.items():
        info = header.tensors[name]
        assert info.shape == tuple(tensor.shape)
        stored = bytes(tensor.flatten().view(torch.uint8).tolist()) if tensor.numel() else b""
        assert content[info.start : info.end] == stored
    assert header.tensors["fp8"].dtype == "F8_E4M3"
    assert min(info.start for info in header.tensors.values()) == header.header_bytes


def test_a_file_without_tensors() -> None:
    assert parse(pack({})).tensors == {}
    assert parse(pack(b"{}      ")).header_bytes == 16


FAULTS: list[tuple[bytes, str]] = [
    (b"", "f.safetensors has no header, but the file has 0 bytes"),
    (b"\x02\0\0", "has no header"),
    (struct.pack("<Q", 2**63) + b"{}", "announces a header of 9223372036854775808 bytes"),
    (struct.pack("<Q", 2**64 - 1) + b"{}", "truncated or not a safetensors file"),
    (struct.pack("<Q", 3) + b"{}", "announces a header of 3 bytes, but the file has 10"),
    (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n",
        "is a Git LFS pointer of 63 bytes, not the weights; run 'git lfs pull'",
    ),
    (pack(b""), "no JSON header"),
    (pack(b" {}"), "no JSON header"),
    (pack(b"\xef\xbb\xbf{}"), "no JSON header"),
    (pack(b"[]"), "no JSON header"),
    (pack(b"{"), "damaged header"),
    (pack(b'{"\xff": 1}'), "damaged header"),
    (pack(b'{"\\ud800": 1}'), "damaged header"),
    (pack(b'{"a":' * 50_000), "damaged header"),
    (pack(b'{"a": 1, "a": 2}'), "names 'a' twice"),
    (pack(b'{"a": ' + json.dumps(entry()).encode()[:-1] + b', "dtype": "F32"}}', 4), "twice"),
    (pack(b'{"a": ' + b"9" * 5000 + b"}"), "holds the number 999"),
    (pack(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', 4), "number -1"),
    (pack({"a": 1}), "tensor 'a' is 1; expected an object"),
    (pack({"a": {}}), "has the type None"),
    (pack({"a": entry(dtype="F33")}, 4), "has the type 'F33', which is not known"),
    (pack({"a": entry(dtype=["F32"])}, 4), "has the type ['F32']"),
    (pack({"a": entry(shape=1)}, 4), "has the shape 1"),
    (pack({"a": entry(shape=[1.0])}, 4), "has the shape [1.0]"),
    (pack({"a": entry(shape=[True])}, 4), "has the shape [True]"),
    (pack({"a": entry(shape=[2])}, 4), "is F32 [2], which does not fit its 4 bytes"),
    (pack({"a": entry(shape=[2**62] * 999)}, 4), "does not fit its 4 bytes"),
    (pack({"a": entry(0, 1, "F4", [1])}, 1), "is F4 [1], which does not fit its 1 bytes"),
    (pack({"a": entry(4, 0)}, 4), "has data_offsets [4, 0]"),
    (pack({"a": entry() | {"data_offsets": [0]}}, 4), "has data_offsets [0]"),
    (pack({"a": entry() | {"data_offsets": None}}, 4), "has data_offsets None"),
    (pack({"a": entry(), "b": entry(2, 6)}, 6), "'b' overlaps tensor 'a'"),
    (pack({"a": entry(), "b": entry()}, 4), "overlaps"),
    (pack({"a": entry(), "b": entry(8, 12)}, 12), "'b' leaves a gap after tensor 'a'"),
    (pack({"a": entry(4, 8)}, 8), "'a' leaves a gap after the header"),
    (pack({"a": entry()}, 3), "is truncated: its tensors end at byte 73, but the file has 72"),
    (pack({"a": entry()}, 5), "has 1 bytes after its last tensor"),
    (pack({"__metadata__": []}), "__metadata__ is []; expected an object"),
    (pack({"__metadata__": {"k": 1}}), "__metadata__ 'k' is 1; expected a string"),
]


@pytest.mark.parametrize(("content", "message"), FAULTS)
def test_faults_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(content)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    path = tmp_path / "f.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_a_header_beyond_the_format_is_refused_unread() -> None:
    first = struct.pack("<Q", 100_000_001) + b"{"
    with pytest.raises(CheckpointError, match="at most 100000000"):
        header_size(first, 10**12, "f")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no file"):
        read_header(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_the_start_of_a_file_is_enough() -> None:
    """What a reader over the network does: sizes first, then the header, never the tensors."""
    content = pack({"a": entry(0, 4096, "F32", [32, 32])}, 4096)
    needed = header_size(content[:64], len(content), "f")
    header = parse_header(content[:needed], len(content), "f")
    assert header == parse(content)
    with pytest.raises(CheckpointError, match="header bytes arrived"):
        parse_header(content[: needed - 1], len(content), "f")


def test_an_announced_size_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in (90_000_000, 2**40, 2**63):
        path.write_bytes(struct.pack("<Q", length) + b'{"a": 1}')
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000


DTYPES = st.sampled_from(["F32", "BF16", "F8_E4M3", "F4", "BOOL", "I64", "F32", "X"])
NUMBERS = st.sampled_from([-1, 0, 1, 2, 4, 8, 2**31, 2**63, 2**64, 10**30, 1.5, True, None])


@st.composite
def valid(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A correct header and the number of data bytes it needs."""
    header: dict[str, Any] = {}
    position = 0
    for i in range(draw(st.integers(0, 4))):
        dtype, size = draw(st.sampled_from([("F32", 4), ("BF16", 2), ("F8_E4M3", 1), ("U8", 1)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = size
        for side in shape:
            nbytes *= side
        header[draw(st.text(max_size=4)) + str(i)] = entry(
            position, position + nbytes, dtype, shape
        )
        position += nbytes
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
    return header, position


CORRECT = [
    ({}, 0),
    ({"__metadata__": {"format": "pt"}, "a": entry()}, 4),
    ({"b": entry(4, 16, "BF16", [2, 3]), "a": entry(), "é": entry(16, 16, "I64", [0])}, 16),
]


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A correct file with something changed: a field, an entry, bytes, or its length."""
    header, size = draw(st.sampled_from(CORRECT))
    header = copy.deepcopy(header)
    change = draw(st.sampled_from(["field", "entry", "bytes", "length", "data"]))
    if change == "field" and "a" in header:
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        header["a"][field] = draw(DTYPES if field == "dtype" else st.lists(NUMBERS, max_size=3))
    if change == "entry":
        header[draw(st.sampled_from("abc\ud800"))] = draw(NUMBERS | st.just([]) | st.just({}))
    raw = json.dumps(header, ensure_ascii=change != "bytes").encode()
    if change == "bytes":
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=6)) + raw[draw(st.integers(at, len(raw))) :]
    content = bytearray(pack(raw, size))
    if change == "length":
        content[:8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1) | st.integers(0, 300)))
    if change == "data":
        content = content[: draw(st.integers(0, len(content)))] + draw(st.binary(max_size=9))
    return bytes(content)


@settings(max_examples=5_000, deadline=None)
@given(content=hostile() | st.binary(max_size=40) | st.binary(max_size=40).map(pack))
@example(content=pack(b'{"a":' + b"[" * 99_999))
@example(content=pack(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4e0]}}', 4))
@example(content=pack(b'{"a":NaN}'))
@example(content=pack(b'{"a":-0}'))
def test_fuzz_nothing_but_checkpoint_errors(content: bytes) -> None:
    """Whatever is accepted, the safetensors library accepts too and reads in the same way."""
    try:
        header = parse(content)
    except CheckpointError as error:
        message = str(error)
    else:
        message = ""
        theirs = dict(safetensors.deserialize(content))
        assert set(theirs) == set(header.tensors)
        for name, info in header.tensors.items():
            assert theirs[name]["dtype"] == info.dtype
            assert tuple(theirs[name]["shape"]) == info.shape
            assert bytes(theirs[name]["data"]) == content[info.start : info.end]
    assert "\n" not in message
    message.encode()


@settings(max_examples=300, deadline=None)
@given(made=valid())
def test_fuzz_every_correct_file_is_accepted(made: tuple[dict[str, Any], int]) -> None:
    header, size = made
    content = pack(header, size)
    safetensors.deserialize(content)
    tensors = {name: value for name, value in header.items() if name != "__metadata__"}
    assert {
        name: (info.dtype, list(info.shape)) for name, info in parse(content).tensors.items()
    } == {name: (value["dtype"], value["shape"]) for name, value in tensors.items()}
