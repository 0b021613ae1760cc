"""What goes wrong at a person's desk: one line that says what to do, exit code 2, no traceback.

The commands run in this process, through the same `main` as the installed script; the files are
real checkpoints, each damaged in one way.
"""

from __future__ import annotations

import json
import shutil
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from glmflash.cli import main as cli
from glmflash.weights.presets import Overrides, preset
from glmflash.weights.random import write_checkpoint
from glmflash.weights.synthetic_tokenizer import tokenizer_files

INDEX = "model.safetensors.index.json"
SCALE = "model.language_model.layers.0.mlp.gate_proj.weight_scale_inv"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_checkpoint(folder / "bf16", preset("tiny"), seed=0)
    write_checkpoint(folder / "fp8", preset("tiny"), storage="fp8", seed=0)
    write_checkpoint(folder / "text", preset("tiny", Overrides(vision=False)), seed=0)
    return folder


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Run a command; its exit code and what it said on stderr."""

    def command(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["glmflash", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return int(stop.value.code or 0), capsys.readouterr().err

    return command


def refused(outcome: tuple[int, str], says: str) -> None:
    code, err = outcome
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert says in err


def shard(directory: Path) -> Path:
    return next(directory.glob("*.safetensors"))


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], dict[str, Any] | str]) -> None:
    raw = shard(directory).read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = edit(json.loads(raw[8 : 8 + size]))
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    shard(directory).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def truncate(d: Path) -> None:
    shard(d).write_bytes(shard(d).read_bytes()[:-1000])


def point_to_lfs(d: Path) -> None:
    shard(d).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")


def name_absent_tensor(d: Path) -> None:
    edit_json(d / INDEX, lambda i: i["weight_map"].update({"model.absent": shard(d).name}))


def announce(size: int) -> Callable[[Path], None]:
    def damage(d: Path) -> None:
        shard(d).write_bytes(struct.pack("<Q", size) + shard(d).read_bytes()[8:])

    return damage


def name_twice(d: Path) -> None:
    def edit(header: dict[str, Any]) -> str:
        name = next(n for n in header if n != "__metadata__")
        entry = f", {json.dumps(name)}: {json.dumps(header[name])}}}"
        return json.dumps(header)[:-1] + entry

    edit_header(d, edit)


def overlap(d: Path) -> None:
    def edit(header: dict[str, Any]) -> dict[str, Any]:
        norms = [n for n in header if n.endswith("layernorm.weight") and "0." in n][:2]
        header[norms[1]]["data_offsets"] = header[norms[0]]["data_offsets"]
        return header

    edit_header(d, edit)


def beyond_the_end(d: Path) -> None:
    def edit(header: dict[str, Any]) -> dict[str, Any]:
        last = max((n for n in header if n != "__metadata__"),
                   key=lambda n: header[n]["data_offsets"][1])  # fmt: skip
        start, end = header[last]["data_offsets"]
        header[last]["data_offsets"] = [start + 10**12, end + 10**12]
        return header

    edit_header(d, edit)


def other_model(d: Path) -> None:
    (d / "config.json").write_text('{"model_type": "llama"}')


def absurd_config(d: Path) -> None:
    edit_json(d / "config.json", lambda c: c["text_config"].update(n_routed_experts=10**9))


def other_tokenizer(d: Path) -> None:
    (d / "tokenizer.json").write_text(tokenizer_files(4000, 1000)["tokenizer.json"])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (other_model, "model_type is 'llama'"),
        (lambda d: shard(d).unlink(), "missing shards"),
        (truncate, "truncated"),
        (point_to_lfs, "Git LFS pointer"),
        (name_absent_tensor, "model.absent"),
        (announce(2**63), "announces a header"),
        (announce(10**7), "announces a header"),
        (name_twice, "twice"),
        (overlap, "overlap"),
        (beyond_the_end, "begins at byte"),
        (other_tokenizer, "belongs to another model"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "not JSON"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "is no tokenizer"),
        (lambda d: (d / "processor_config.json").write_text("{"), "not JSON"),
        (lambda d: (d / "generation_config.json").write_text("[]"), "cannot be read"),
        (absurd_config, "n_routed_experts is 1000000000"),
    ],
)  # fmt: skip
def test_damaged_checkpoints(made, tmp_path, run, damage, says) -> None:
    shutil.copytree(made / "bf16", tmp_path / "x")
    damage(tmp_path / "x")
    refused(run("generate", tmp_path / "x", "hi", "--max-tokens", "2"), says)


def test_fp8_weight_without_scale(made, tmp_path, run) -> None:
    shutil.copytree(made / "fp8", tmp_path / "x")
    tensors = load_file(shard(tmp_path / "x"))
    del tensors[SCALE]
    save_file(tensors, shard(tmp_path / "x"))
    edit_json(tmp_path / "x" / INDEX, lambda i: i["weight_map"].pop(SCALE))
    refused(run("generate", tmp_path / "x", "hi"), "FP8 without")


def test_nan_scale(made, tmp_path, run) -> None:
    shutil.copytree(made / "fp8", tmp_path / "x")
    tensors = {name: t.clone() for name, t in load_file(shard(tmp_path / "x")).items()}
    tensors[SCALE][0] = float("nan")
    save_file(tensors, shard(tmp_path / "x"))
    refused(run("generate", tmp_path / "x", "hi"), "NaN or infinite scales")


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + b"\xff" * 3 * min(width, 64)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("option", "content", "says"),
    [
        ("--image", b"no picture", "not a picture"),
        ("--image", png(0, 0), "not a picture"),
        ("--image", png(100_000, 100_000), "100000 x 100000 pixels"),
        ("--image", None, "does not exist"),
        ("--video", b"\0\0\0\x18ftypmp42", "cannot be read as a video"),
        ("--video", None, "does not exist"),
    ],
)
def test_bad_media(made, tmp_path, run, option, content, says) -> None:
    if content is not None:
        (tmp_path / "medium").write_bytes(content)
    refused(run("generate", made / "bf16", "hi", option, tmp_path / "medium"), says)


def test_media_on_a_text_only_checkpoint(made, tmp_path, run) -> None:
    (tmp_path / "dot.png").write_bytes(png(1, 1))
    refused(run("generate", made / "text", "hi", "--image", tmp_path / "dot.png"), "text-only")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("",), "the prompt is empty"),
        (("word " * 40_000, "--raw"), "the context holds 32768"),
        (("hi", "--effort", "off"), "effort 'off'"),
        (("hi", "--temperature", "nan"), "temperature must be"),
        (("hi", "--dtype", "int4"), "dtype 'int4'"),
        (("hi", "--chat-template", "mine"), "chat_template 'mine'"),
        (("hi", "--raw", "--image", "x.png"), "--raw takes no media"),
    ],
)
def test_bad_requests(made, run, arguments, says) -> None:
    refused(run("generate", made / "bf16", *arguments), says)


@pytest.mark.parametrize("command", ["generate", "inspect", "compare"])
def test_no_such_place(run, tmp_path, command) -> None:
    more = {"generate": ["hi"], "compare": ["glm-5.3"], "inspect": []}[command]
    code, err = run(command, tmp_path / "absent", *more)
    assert code == 2
    assert err.startswith("error: ")
    assert "absent" in err
