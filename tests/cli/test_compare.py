"""`glmflash compare` as a person runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ..verify.checkpoints import small_config, write_checkpoint
from .test_inspect import glmflash


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_checkpoint(path, small_config())
    return path


def test_published_pair_on_the_screen() -> None:
    done = glmflash("compare", "glm-5.3", "glm-5.3-flash")
    assert (done.returncode, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    for figure in (
        "118,629 + 76,108 = 194,737 tensors",
        "fp8 47,616 5,984 8.0x",
        "fp8, keys not pooled 47,616 7,040 6.8x",
        "49.9 GB against 6.3 GB + 0.07 GB of KDA state in bf16",
        '"about 4.4x less cache than GLM-5.3" is not reproduced by any layout here',
        "rope_theta 8,000,000",
        "21 + 1 of 78 + 1 own one (index_topk_freq 4)",
        "kv_b_proj.weight: F8_E4M3 -> BF16",
    ):
        assert figure in text, figure
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json(small: Path) -> None:
    done = glmflash("compare", small, small / "config.json", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["identical"] is True


def test_equal_copies(small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    done = glmflash("compare", small, copy)
    assert "nothing differs in config and headers; values were not compared" in done.stdout


def test_copies_that_differ(small: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config(quantised=False), "bf16")
    done = glmflash("compare", small, tmp_path)
    assert done.returncode == 0
    text = " ".join(done.stdout.split())
    assert "only in a, 98 tensors:" in text
    assert "type differs, 98 tensors:" in text
    assert "q_a_proj.weight and 1 like it F8_E4M3 -> BF16" in text
    assert "quantization_config (" in text


def test_one_side_is_missing(small: Path) -> None:
    done = glmflash("compare", small, "/no/such/place")
    assert done.returncode == 2
    assert "/no/such/place" in done.stderr
    assert done.stderr.count("\n") == 1
