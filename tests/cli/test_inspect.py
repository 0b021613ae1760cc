"""`glmflash inspect` as a person runs it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..verify.checkpoints import small_config, write_checkpoint
from ..weights.server import serving

COMMAND = "from glmflash.cli.main import main; main()"
HEAVY = ("torch", "numpy", "tokenizers", "PIL", "jinja2", "transformers", "safetensors")


def glmflash(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "NO_PROXY": "*", **variables}
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_checkpoint(path, small_config())
    return path


def test_released_model_on_the_screen() -> None:
    done = glmflash("inspect", "glm-5.3-flash")
    assert (done.returncode, done.stderr) == (0, "")
    for figure in (
        "321,323,031,390",
        "313,326,811,966",
        "35.39 M",
        "16,742,333,246",
        "17,376,721,726",
        "386,161,696",
        "76,108",
        "328,326,771,576",
        "5,984",
        "11,968",
        "142,606,336",
        "1,048,576",
    ):
        assert figure in done.stdout, figure
    assert "\x1b" not in done.stdout, "colours in a pipe"
    assert "…" not in done.stdout, "something was cut off"
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_all_there_is_on_stdout(small: Path) -> None:
    done = glmflash("inspect", small, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["parameters"].keys() >= {"total", "trunk", "mtp", "vision", "active"}
    assert found["parameters"].keys() >= {"by_component"}
    assert found["bytes"].keys() >= {"total", "by_dtype"}
    assert found.keys() >= {"tensors", "shards"}
    assert found["cache"].keys() >= {
        "bytes_per_token_bf16",
        "bytes_per_token_fp8",
        "state_bytes_fp32",
        "conv_bytes_bf16",
    }


def test_shards_on_the_screen(small: Path) -> None:
    done = glmflash("inspect", small)
    assert re.search(r"00001 +[\d,]+ +00002 +[\d,]+ +00003 +[\d,]+", done.stdout)
    assert "chat template: absent" in done.stdout
    done = glmflash("inspect", small / "model-00001-of-00003.safetensors")
    assert done.returncode == 0
    assert "components are guessed from names" in done.stdout


def test_a_path_in_brackets_is_printed_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "[/red]"
    write_checkpoint(folder, small_config(), shards=1)
    done = glmflash("inspect", folder)
    assert done.returncode == 0
    assert "[/red]" in done.stdout.replace("\n", "")


def test_hub_id_with_a_token(small: Path) -> None:
    with serving(small, prefix="/org/name/resolve/main", token="secret") as server:
        done = glmflash("inspect", "org/name", "--json", HF_ENDPOINT=server.url, HF_TOKEN="secret")
        refused = glmflash("inspect", "org/name", HF_ENDPOINT=server.url, HF_HOME="/nowhere")
    assert done.returncode == 0
    assert json.loads(done.stdout)["source"] == "checkpoint"
    assert refused.returncode == 2
    assert "org/name is no path here; as a hub id:" in refused.stderr
    assert "HF_TOKEN" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("target", ["/no/such/place", "no-such-name", "no/such/file.safetensors"])
def test_nothing_there(target: str) -> None:
    done = glmflash("inspect", target)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_missing_shard(small: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    done = glmflash("inspect", tmp_path, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "model-00002-of-00003.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments", [["inspect", "glm-5.3-flash"], ["compare", "glm-5.3", "glm-5.3-flash"]]
)
def test_nothing_heavy_is_loaded(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['glmflash', *{arguments}]\ntry: {COMMAND}\nfinally: "
    code += f"sys.stderr.write(repr(sorted(set({HEAVY}) & set(sys.modules))))"
    code = code.replace("; main()", "\n    main()").replace("try: ", "try:\n    ")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr == "[]"
