"""`glmflash checkpoint random` as a person runs it."""

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from glmflash.cli.main import main
from glmflash.config import ModelConfig
from glmflash.weights.index import Checkpoint

COMMAND = [sys.executable, "-m", "glmflash.cli.main", "checkpoint", "random"]


@dataclass(frozen=True)
class Done:
    """What a person is left with: exit code and both outputs."""

    code: int
    out: str
    err: str


@pytest.fixture
def glmflash(monkeypatch, capsys) -> Callable[..., Done]:
    """Runs a whole command line in this process: loading torch once is enough."""

    def run(*arguments: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["glmflash", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        assert isinstance(exit.value.code, int)
        return Done(exit.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def random(glmflash) -> Callable[..., Done]:
    return partial(glmflash, "checkpoint", "random")


def test_writes_what_was_asked(random, tmp_path) -> None:
    out = tmp_path / "a directory whose name alone is nearly as long as a line of a narrow terminal"
    done = random(
        out, "--like", "tiny", "--layers", "8", "--experts", "4", "--hidden", "96",
        "--vocab", "1000", "--index-topk", "12", "--no-vision", "--no-mtp", "--dtype", "fp32",
        "--seed", "3", "--shard-size", "300KB",
    )  # fmt: skip
    assert done.code == 0, done.err
    opened = Checkpoint.open(out)
    opened.check()
    nbytes = sum(info.nbytes for _, info in opened.tensors.values())
    assert (done.out, done.err) == ("", f"wrote {out}: {nbytes:,} bytes of tensors\n")
    assert len(opened.shards) > 4
    config = ModelConfig.from_dir(out)
    text = config.text
    assert (text.num_hidden_layers, text.n_routed_experts, text.hidden_size) == (8, 4, 96)
    assert (text.vocab_size, text.index_topk, text.num_nextn_predict_layers) == (1000, 12, 0)
    assert (text.dtype, config.vision) == ("float32", None)


def test_the_model_decides_the_type_and_seed_0_is_meant(random, tmp_path) -> None:
    for name, options in (("a", []), ("b", ["--like", "tiny", "--dtype", "bf16", "--seed", "0"])):
        assert random(tmp_path / name, *options).code == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_generate_needs_no_other_file(random, glmflash, tmp_path) -> None:
    assert random(tmp_path / "x").code == 0
    done = glmflash("generate", tmp_path / "x", "Hello", "--max-tokens", "3")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--like", "tinny"], "did you mean 'tiny'?"),
        (["--layers", "0"], "--layers is 0; give at least 1"),
        (["--experts", "1"], "1 experts are too few: every token uses 2; give at least 2"),
        (["--hidden", "-64"], "--hidden is -64; give at least 1"),
        (["--vocab", "100"], "--vocab is 100; give at least 316"),
        (["--vocab", "900000"], "400,000 the most"),
        (["--index-topk", "6"], "expected a multiple of index_kpool (4)"),
        (["--dtype", "int4"], "--dtype is 'int4'; give fp8, bf16, fp32"),
        (["--shard-size", "big"], "--shard-size is 'big'; give a size such as 5GiB or 500MB"),
        (["--shard-size", "0"], "--shard-size is '0'"),
        (["--shard-size", "-1GB"], "--shard-size is '-1GB'"),
        (["--shard-size", "9" * 400], "give a size such as 5GiB or 500MB"),
        (["--hidden", "2000000000"], "is free there; give fewer --layers"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(random, tmp_path, options, message) -> None:
    done = random(tmp_path / "x", *options)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [["--seed", "-1"], ["--seed", "x"], ["--layers", "two"], ["y"]])
def test_what_is_no_command_line_leaves_nothing(random, tmp_path, options) -> None:
    done = random(tmp_path / "x", *options)
    assert (done.code, done.out) == (2, "")
    assert "Usage" in done.err
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept(random, tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    for out in (tmp_path, tmp_path / "mine.txt"):
        done = random(out)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert "exists and is not empty" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_control_c_leaves_nothing(tmp_path) -> None:
    options = ["--like", "bench", "--layers", "6"]  # 0.9 GB: enough to be caught in the middle
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "x"), *options], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".x.*/*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []


def test_a_bar_on_a_terminal_only(tmp_path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path / "x")], stderr=theirs, stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux reports the end so
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    out, _ = process.communicate()
    assert process.returncode == 0
    assert b"writing " in shown
    assert b"bytes of tensors" in shown
    assert out == b""
