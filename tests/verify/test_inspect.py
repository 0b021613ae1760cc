"""Reports from configs, headers and servers: equal figures, stable keys, honest claims."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glmflash.config import shipped
from glmflash.errors import CheckpointError, ConfigError, GlmflashError, RequestError
from glmflash.verify import inspect
from glmflash.verify.inspect import report
from glmflash.verify.subject import open_subject

from ..weights.server import serving
from .checkpoints import small_config, write_checkpoint

FIGURES = ("parameters", "tensors", "tensors_by_dtype", "cache", "quantisation", "claims", "model")


def facts(target: object) -> dict[str, Any]:
    return report(open_subject(str(target)))


@pytest.fixture(scope="module")
def released() -> dict[str, Any]:
    return facts("glm-5.3-flash")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_checkpoint(path, small_config())
    return path


def assert_agree(alone: dict[str, Any], headers: dict[str, Any]) -> None:
    for key in FIGURES:
        assert alone[key] == headers[key], key
    for key in ("total", "by_dtype", "by_component"):
        assert alone["bytes"][key] == headers["bytes"][key], key
    assert alone["bytes"]["assumed_from_config"] is True
    assert headers["bytes"]["assumed_from_config"] is False
    assert sum(headers["bytes"]["by_shard"].values()) == alone["bytes"]["total"]


def test_released_model_from_the_config(released: dict[str, Any]) -> None:
    assert released["parameters"]["total"] == 321_323_031_390
    assert released["parameters"]["trunk"] == 313_326_811_966
    assert released["parameters"]["active"] == 16_742_333_246
    assert released["parameters"]["by_component"]["mhc"] == 35_391_870
    assert released["bytes"]["total"] == 328_326_771_576
    assert released["bytes"]["by_dtype"].keys() == {"BF16", "F32", "F8_E4M3"}
    assert released["tensors"] == 76_108
    assert released["shards"] is None
    cache = released["cache"]
    assert cache["bytes_per_token_bf16"] == 11_968
    assert cache["bytes_per_token_fp8"] == 5_984
    assert cache["bytes_per_token_fp8_mtp"] == 6_528
    assert cache["state_bytes_fp32"] == 142_606_336
    assert cache["conv_bytes_bf16"] == 5_013_504
    plain = cache["layouts"][0]
    fixed = 142_606_336 + 5_013_504 + 22_528
    assert plain["totals"] == {
        "4096": 4_096 * 5_984 + fixed,
        "131072": 131_072 * 5_984 + fixed,
        "1048576": 6_274_678_784 + fixed,
    }


def test_released_model_from_headers(released: dict[str, Any], tmp_path: Path) -> None:
    """All 76,108 tensors in 62 shards of their real sizes; the tensors are holes in the files."""
    config = shipped("glm-5.3-flash").to_dict()
    sizes = write_checkpoint(tmp_path, config, shards=62)
    headers = facts(tmp_path)
    assert_agree(released, headers)
    assert headers["shards"] == 62
    assert headers["bytes"]["by_shard"] == sizes
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize(
    ("config", "storage"),
    [
        ({}, "fp8"),
        ({"quantised": False}, "bf16"),
        ({"quantised": False, "dtype": "float32"}, "fp32"),
        ({"vision": False}, "fp8"),
        ({"vision": False, "quantised": False, "num_nextn_predict_layers": 0}, "bf16"),
        (
            {
                "layer_types": ["deepseek_sparse_attention"] * 4 + ["linear_attention"],
                "indexer_types": ["full", "shared", "full", "shared", "full"],
            },
            "fp8",
        ),
        ({"hidden_size": 192, "q_lora_rank": 200, "kv_lora_rank": 33}, "fp8"),
    ],
)
def test_config_and_headers_agree(config: dict[str, Any], storage: str, tmp_path: Path) -> None:
    values = small_config(**config)
    if "vision_config" in values:
        values["vision_config"]["out_hidden_size"] = values["text_config"]["hidden_size"]
    write_checkpoint(tmp_path, values, storage)
    assert_agree(facts(tmp_path / "config.json"), facts(tmp_path))


def test_remote_reports_as_local(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    with serving(small) as server:
        far = facts(server.url)
        alone = facts(f"{server.url}/config.json")
        shard = facts(f"{server.url}/model-00002-of-00003.safetensors")
    near = facts(small)
    assert {**far, "target": ""} == {**near, "target": ""}
    assert alone["parameters"] == near["parameters"]
    assert shard["tensors"] == facts(small / "model-00002-of-00003.safetensors")["tensors"]


def test_one_file_tells_what_it_holds(small: Path) -> None:
    parts = [facts(path) for path in sorted(small.glob("*.safetensors"))]
    whole = facts(small)
    assert sum(part["parameters"]["total"] for part in parts) == whole["parameters"]["total"]
    assert sum(part["bytes"]["total"] for part in parts) == whole["bytes"]["total"]
    assert sum(part["tensors"] for part in parts) == whole["tensors"]
    assert parts[0]["cache"] is None
    assert parts[0]["parameters"]["active"] is None
    assert parts[0]["model"] is None
    assert "kda" in parts[0]["parameters"]["by_component"]


def test_transformers_leaves_the_mtp_layer_out(small: Path, tmp_path: Path) -> None:
    """Files without it are complete for transformers; nothing is counted that is not there."""
    values = small_config(quantised=False)
    write_checkpoint(
        tmp_path,
        values | {"text_config": values["text_config"] | {"num_nextn_predict_layers": 0}},
        "bf16",
    )
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = facts(tmp_path)
    assert found["parameters"]["mtp"] == 0
    assert found["model"]["mtp_layers"] == 1
    assert "bytes_per_token_fp8_mtp" not in found["cache"]
    assert [row["name"] for row in found["parameters"]["active_definitions"]] == [
        "active",
        "with_embedding",
        "vision",
        "everything",
    ]


@pytest.mark.parametrize("name", ["glm-5.3", "GLM-5.3"])
def test_larger_sibling(name: str) -> None:
    found = facts(name)
    assert found["parameters"]["total"] == 753_329_940_480
    assert found["tensors"] == 118_629
    assert found["cache"]["bytes_per_token_fp8"] == 47_616
    assert found["claims"] == []


def test_claims(released: dict[str, Any], small: Path) -> None:
    claims = {claim["id"]: claim for claim in released["claims"]}
    assert list(claims) == list("abcdef")
    assert "11.97 GB" in claims["a"]["arithmetic"]
    assert claims["a"]["verdict"] == "wrong, 51 times too much"
    assert "34 KDA" in claims["b"]["arithmetic"]
    assert "11 sparse" in claims["b"]["arithmetic"]
    assert "BF16 642.6 GB" in claims["c"]["arithmetic"]
    assert "305.8 GiB (328.3 GB)" in claims["d"]["arithmetic"]
    assert claims["d"]["verdict"] == "right"
    for number in ("16.74", "17.38", "18.33"):
        assert number in claims["e"]["arithmetic"]
    for number in ("47,616", "5,984", "8.0x", "6.8x"):
        assert number in claims["f"]["arithmetic"]
    assert "4.4x" in claims["f"]["verdict"]
    assert facts(small)["claims"] == []


def test_what_is_quantised(released: dict[str, Any], tmp_path: Path) -> None:
    found = released["quantisation"]
    assert (found["method"], found["format"], found["block"]) == ("fp8", "e4m3", [128, 128])
    assert found["not_converted"] == 1_509
    assert found["components"]["mla"] == ["kv_a_proj_with_mqa", "o_proj", "q_a_proj", "q_b_proj"]
    assert found["components"].keys() == {
        "dense_mlp",
        "mla",
        "mtp",
        "routed_experts",
        "shared_experts",
    }
    write_checkpoint(tmp_path, small_config(quantised=False), "bf16")
    assert facts(tmp_path)["quantisation"]["components"] == {}


def test_template_revisions(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(small, tmp_path / "with-template")
    assert facts(folder)["template"] == {"status": "absent", "sha256": None, "revision": None}
    (folder / "chat_template.jinja").write_bytes(b"hello\n")
    digest = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"  # sha256sum
    assert facts(folder)["template"] == {"status": "unknown", "sha256": digest, "revision": None}
    monkeypatch.setitem(inspect.TEMPLATES, digest, "a published one")
    assert facts(folder)["template"]["revision"] == "a published one"
    assert sum("690b7052" in text for text in inspect.TEMPLATES.values()) == 2


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        ("missing shard", CheckpointError, "model-00002-of-00003.safetensors"),
        ("truncated shard", CheckpointError, "truncated"),
        ("pointer", CheckpointError, "LFS pointer"),
        ("no config", CheckpointError, "no config.json"),
        ("other model", ConfigError, "llama"),
        ("other sizes", CheckpointError, "shape"),
        ("no index", CheckpointError, "index"),
        ("template is a folder", CheckpointError, "cannot be read"),
        ("empty folder", GlmflashError, "not a checkpoint"),
    ],
)
def test_damaged_folders(
    small: Path, tmp_path: Path, damage: str, kind: type[GlmflashError], words: str
) -> None:
    folder = shutil.copytree(small, tmp_path / "damaged")
    shard = folder / "model-00002-of-00003.safetensors"
    if damage == "missing shard":
        shard.unlink()
    elif damage == "truncated shard":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif damage == "pointer":
        shard.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    elif damage == "no config":
        (folder / "config.json").unlink()
    elif damage == "other model":
        (folder / "config.json").write_text('{"model_type": "llama"}')
    elif damage == "other sizes":
        (folder / "config.json").write_text(json.dumps(small_config(vocab_size=520)))
    elif damage == "template is a folder":
        (folder / "chat_template.jinja").mkdir()
    elif damage == "no index":
        (folder / "model.safetensors.index.json").unlink()
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    with pytest.raises(kind, match=words) as caught:
        facts(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["no-such-thing", "a/b/c", "x/model.safetensors", "", "x" * 9999, "\0"]
)
def test_names_of_nothing(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = (RequestError, CheckpointError)  # "" is the current, empty folder
    with pytest.raises(kinds):
        facts(target)


def test_a_folder_wins_over_a_shipped_name(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(small, tmp_path / "glm-5.3-flash")
    monkeypatch.chdir(tmp_path)
    assert facts("glm-5.3-flash")["shards"] == 3


def test_half_precision_keeps_its_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(small_config(quantised=False, dtype="float16"))
    )
    found = facts(tmp_path / "config.json")
    assert found["bytes"]["by_dtype"].keys() == {"F16", "F32"}
