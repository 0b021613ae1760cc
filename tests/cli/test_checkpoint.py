"""`glmflash checkpoint random` as a person runs it."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from glmflash.config import ModelConfig
from glmflash.weights.index import Checkpoint

COMMAND = [sys.executable, "-m", "glmflash.cli.main", "checkpoint", "random"]


def random(*arguments: str | Path, **options) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_writes_what_was_asked(tmp_path) -> None:
    out = tmp_path / "x"
    done = random(
        out, "--like", "tiny", "--layers", "8", "--experts", "4", "--hidden", "96",
        "--vocab", "1000", "--index-topk", "12", "--no-vision", "--no-mtp", "--dtype", "fp32",
        "--seed", "3", "--shard-size", "300KB",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    opened = Checkpoint.open(out)
    opened.check()
    nbytes = sum(info.nbytes for _, info in opened.tensors.values())
    assert done.stdout == ""
    assert " ".join(done.stderr.split()) == f"wrote {out}: {nbytes:,} bytes of tensors"
    assert len(opened.shards) > 4
    config = ModelConfig.from_dir(out)
    text = config.text
    assert (text.num_hidden_layers, text.n_routed_experts, text.hidden_size) == (8, 4, 96)
    assert (text.vocab_size, text.index_topk, text.num_nextn_predict_layers) == (1000, 12, 0)
    assert (text.dtype, config.vision) == ("float32", None)


def test_the_model_decides_the_type_and_seed_0_is_meant(tmp_path) -> None:
    for name, options in (("a", []), ("b", ["--dtype", "bf16", "--seed", "0"])):
        assert random(tmp_path / name, "--like", "tiny", *options).returncode == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_its_answer_to_a_prompt_with_no_other_file(tmp_path) -> None:
    """The written directory is all that `generate` needs."""
    assert random(tmp_path / "x").returncode == 0
    command = [*COMMAND[:3], "generate", str(tmp_path / "x"), "Hello", "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


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
        (["--hidden", "2000000000"], "is free there; give fewer --layers"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(tmp_path, options, message) -> None:
    done = random(tmp_path / "x", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept(tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    done = random(tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "exists and is not empty" in done.stderr
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
