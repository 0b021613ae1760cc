"""Shards, index and the comparison with the table: each fault by hand on real small files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmflash.config import GlmMoeDsaConfig
from glmflash.errors import CheckpointError, ConfigError
from glmflash.weights.index import INDEX_NAME, Checkpoint, parse_index, summarize
from tests.oracle.tiny import make_tiny

Tensors = dict[str, torch.Tensor]
LAYER = "model.language_model.layers."
WEIGHT = f"{LAYER}1.mlp.experts.3.up_proj.weight"
SCALE = WEIGHT + "_scale_inv"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An FP8 checkpoint in one file, with MTP and vision."""
    folder = tmp_path_factory.mktemp("index")
    text = {"hidden_size": 160, "intermediate_size": 130}
    return make_tiny(folder / "made", seed=3, text=text, storage="fp8").path


@pytest.fixture
def sharded(made: Path, tmp_path: Path) -> Path:
    """The same in three shards."""
    return write_shards(load_file(made / "model.safetensors"), made, tmp_path / "sharded")


def write_shards(tensors: Tensors, made: Path, target: Path) -> Path:
    target.mkdir()
    shutil.copy(made / "config.json", target)
    weight_map = {}
    for i in range(3):
        shard = f"model-{i + 1:05d}-of-00003.safetensors"
        names = list(tensors)[i::3]
        save_file({name: tensors[name] for name in names}, target / shard)
        weight_map |= dict.fromkeys(names, shard)
    (target / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def edit_index(root: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((root / INDEX_NAME).read_text())
    change(index["weight_map"])
    (root / INDEX_NAME).write_text(json.dumps(index))


def refuse(path: Path) -> str:
    """The message with which opening or checking fails."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path).check()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_one_file_and_shards_are_the_same_checkpoint(made: Path, sharded: Path) -> None:
    one, three, file = (Checkpoint.open(p) for p in (made, sharded, made / "model.safetensors"))
    one.check()
    three.check()
    file.check()
    assert set(one.tensors) == set(three.tensors) == set(file.tensors)
    assert set(three.shards) == {shard(1), shard(2), shard(3)}
    assert one.shards == {"model.safetensors": (made / "model.safetensors").stat().st_size}
    assert one.storage == three.storage == "fp8"
    assert one.has_mtp
    place, info = three.tensors[WEIGHT]
    assert place in three.shards
    assert (info.dtype, info.shape) == ("F8_E4M3", (32, 160))


def test_headers_are_enough(sharded: Path) -> None:
    """Opening reads no tensor: files whose data are one hole are no slower and no larger."""
    for path in sharded.glob("*.safetensors"):
        size = path.stat().st_size
        header = path.read_bytes()[: 8 + int.from_bytes(path.read_bytes()[:8], "little")]
        path.write_bytes(header)
        with path.open("r+b") as file:
            file.truncate(size)
    Checkpoint.open(sharded).check()


@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("mtp", [True, False])
def test_other_storages_and_files_of_transformers(tmp_path: Path, storage: Any, mtp: bool) -> None:
    tiny = make_tiny(tmp_path / "made", seed=1, storage=storage, mtp=mtp)
    checkpoint = Checkpoint.open(tiny.path)
    checkpoint.check()
    assert checkpoint.storage == storage
    assert checkpoint.has_mtp == mtp


def test_bf16_as_transformers_saves_it_keeps_some_tensors_wide(tmp_path: Path) -> None:
    tiny = make_tiny(tmp_path / "made", seed=1, mtp=False)
    type(tiny.oracle).from_pretrained(tiny.path, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "saved"
    )
    checkpoint = Checkpoint.open(tmp_path / "saved")
    checkpoint.check()
    assert checkpoint.storage == "bf16"
    assert checkpoint.tensors[f"{LAYER}0.self_attn.q_conv1d.weight"][1].dtype == "F32"


def test_no_such_thing(made: Path, tmp_path: Path) -> None:
    assert "there is no" in refuse(tmp_path / "nowhere")
    assert "there is no" in refuse(tmp_path / "nowhere.safetensors")
    assert "is neither a directory nor a .safetensors file" in refuse(made / "config.json")
    assert "is not a checkpoint" in refuse(tmp_path)


def test_no_config_or_that_of_another_model(made: Path, tmp_path: Path) -> None:
    shutil.copy(made / "model.safetensors", tmp_path)
    assert Checkpoint.open(tmp_path).config is None
    assert "holds no config.json" in refuse(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="model_type is 'llama'"):
        Checkpoint.open(tmp_path)


def test_headers_of_glm_5_3_are_checked_too(tmp_path: Path) -> None:
    config = json.loads(
        (Path(__file__).parents[2] / "src/glmflash/data/glm-5.3.config.json").read_text()
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(6144)}, tmp_path / "model.safetensors")
    assert isinstance(Checkpoint.open(tmp_path).config, GlmMoeDsaConfig)
    # all but one of 59,585 weights; the MTP layer (791 of them) may be missing as a whole
    assert "missing 58793" in refuse(tmp_path)


def test_missing_index(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    message = refuse(sharded)
    assert f"holds 3 .safetensors files ({shard(1)}, …) but no {INDEX_NAME}" in message


def test_single_file_beside_an_index_of_others(sharded: Path) -> None:
    shutil.copy(sharded / shard(1), sharded / "model.safetensors")
    assert "holds both model.safetensors and" in refuse(sharded)


def test_missing_shards(sharded: Path) -> None:
    (sharded / shard(1)).unlink()
    (sharded / shard(3)).unlink()
    assert f"missing shards 2 ({shard(1)} and 1 like it) of 3; download them" in refuse(sharded)


def test_truncated_shards(sharded: Path) -> None:
    for number in (1, 2):
        path = sharded / shard(number)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1)
    message = refuse(sharded)
    assert f"{shard(1)} is truncated" in message
    assert "and 1 more damaged shards" in message


def test_lfs_pointer_instead_of_a_shard(sharded: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"
    (sharded / shard(2)).write_text(pointer)
    assert f"{shard(2)} is a Git LFS pointer" in refuse(sharded)


def test_index_and_shards_that_differ(sharded: Path) -> None:
    tensors = load_file(sharded / shard(2))
    extra = f"{LAYER}0.input_layernorm.weight"
    source = Checkpoint.open(sharded).tensors[extra][0]
    assert source != shard(2)
    save_file(tensors | {extra: torch.ones(160), "alien": torch.ones(1)}, sharded / shard(2))

    def change(weight_map: dict[str, Any]) -> None:
        weight_map["ghost.0"] = weight_map["ghost.1"] = shard(1)
        weight_map[next(iter(tensors))] = shard(1)

    edit_index(sharded, change)
    message = refuse(sharded)
    assert "names tensors that no shard holds: 2 (ghost.0 and 1 like it)" in message
    assert "does not name tensors of the shards: 1 (alien)" in message
    assert f"several shards hold the same tensor: 1 ({extra})" in message
    assert f"another shard than the one that holds the tensor: 1 ({next(iter(tensors))})" in message


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", "..", 5, None, "a\\b"],
)
def test_index_pointing_elsewhere(sharded: Path, name: Any) -> None:
    edit_index(sharded, lambda weight_map: weight_map.update({WEIGHT: name}))
    assert "expected the name of a .safetensors file in the same directory" in refuse(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"weight_map": {', "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "has no weight_map"),
        (b'{"weight_map": {}}', "has no weight_map"),
        (b'{"weight_map": ["a"]}', "has no weight_map"),
        (b'{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}', "'a' occurs twice"),
    ],
)
def test_damaged_index(content: bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_index(content, "model.safetensors.index.json")
    assert "\n" not in str(caught.value)


def rewritten(made: Path, target: Path, change: Callable[[Tensors], Any]) -> str:
    """The message for the checkpoint with changed tensors."""
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    target.mkdir(exist_ok=True)
    shutil.copy(made / "config.json", target)
    save_file(tensors, target / "model.safetensors")
    return refuse(target)


def test_everything_wrong_is_reported_at_once(made: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for expert in range(4):
            del tensors[f"{LAYER}2.mlp.experts.{expert}.gate_proj.weight"]
            del tensors[f"{LAYER}2.mlp.experts.{expert}.gate_proj.weight_scale_inv"]
        tensors[f"{LAYER}9.stranger"] = torch.ones(1)
        tensors["lm_head.weight"] = torch.ones(3, 4)
        tensors["model.language_model.norm.weight"] = torch.ones(160, dtype=torch.int32)
        del tensors[SCALE]

    message = rewritten(made, tmp_path / "x", change)
    gate = f"{LAYER}2.mlp.experts.0.gate_proj.weight"
    assert f"missing 4 ({gate} and 3 like it)" in message
    assert f"unexpected 1 ({LAYER}9.stranger)" in message
    assert "wrong shape 1 (lm_head.weight is [3, 4], expected [320, 160])" in message
    assert "wrong type 1 (model.language_model.norm.weight is I32, expected BF16)" in message
    assert f"wrong scales 1 ({WEIGHT} is FP8 without {SCALE})" in message
    assert len(message) < 1_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(WEIGHT), f"missing 1 ({WEIGHT}); wrong scales 1 ({SCALE} has no FP8"),
        (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), f"wrong scales 1 ({SCALE} has no FP8"),
        (
            lambda t: t.update({SCALE: torch.ones(2, 2)}),
            "is [2, 2], expected [1, 2] for the weight",
        ),
        (lambda t: t.update({SCALE: t[SCALE].bfloat16()}), f"{SCALE} is BF16, expected F32"),
        (lambda t: t.update({"x.weight_scale_inv": torch.ones(1)}), "unexpected 1 (x.weight_scale"),
        (
            lambda t: t.pop("model.visual.downsample.bias"),
            "missing 1 (model.visual.downsample.bias",
        ),
        (
            lambda t: t.update(
                {
                    f"{LAYER}0.hc_attn_base": torch.ones(24).to(torch.float8_e4m3fn),
                    f"{LAYER}0.hc_attn_base_scale_inv": torch.ones(1),
                }
            ),
            f"config.json: wrong type 1 ({LAYER}0.hc_attn_base is F8_E4M3, expected F32); fetch",
        ),
        (lambda t: t.pop(f"{LAYER}4.enorm.weight"), f"missing 1 ({LAYER}4.enorm.weight)"),
    ],
)
def test_single_faults(
    made: Path, tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    assert message in rewritten(made, tmp_path / "x", change)


def test_an_unquantised_weight_among_fp8_ones_is_fine(made: Path, tmp_path: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    tensors[WEIGHT] = tensors[WEIGHT].float().bfloat16()
    del tensors[SCALE]
    target = write_shards(tensors, made, tmp_path / "x")
    Checkpoint.open(target).check()


def test_vision_must_match_the_config(made: Path, tmp_path: Path) -> None:
    assert "missing 39 (model.visual" in rewritten(
        made,
        tmp_path / "x",
        lambda t: [t.pop(name) for name in list(t) if ".visual." in name],
    )
    config = json.loads((tmp_path / "x" / "config.json").read_text())
    del config["vision_config"]
    (tmp_path / "x" / "config.json").write_text(json.dumps(config))
    Checkpoint.open(tmp_path / "x").check()
    (made.parent / "blind").mkdir()
    shutil.copy(made / "model.safetensors", made.parent / "blind")
    shutil.copy(tmp_path / "x" / "config.json", made.parent / "blind")
    assert "unexpected 39 (model.visual" in refuse(made.parent / "blind")


def test_links_into_a_cache_are_followed(made: Path, tmp_path: Path) -> None:
    """The hub cache is made of links out of the directory."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(made / name)
    Checkpoint.open(tmp_path).check()


def test_summaries_are_short() -> None:
    assert summarize(["b"]) == "1 (b)"
    assert summarize(["a.1.x", "a.2.x", "b"]) == "3 (a.1.x and 1 like it, b)"
    assert summarize("abcdef") == "6 (a, b, c, and 3 more)"
