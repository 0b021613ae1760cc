"""The mapped store: views of real files, bit for bit, without copies where none are needed."""

from __future__ import annotations

import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glmflash.errors import CheckpointError, ConfigError
from glmflash.weights.store import WeightStore
from tests.oracle.tiny import Tiny, dequantise, make_tiny

NORM = "model.language_model.norm.weight"
EXPERT = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("store")
    text = {"hidden_size": 160, "intermediate_size": 130}
    return make_tiny(folder / "made", seed=3, text=text, storage="fp8")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def test_tensors_are_the_stored_ones(made: Tiny) -> None:
    with WeightStore.open(made.path) as store:
        assert set(store.names()) == set(made.tensors)
        assert store.has_mtp
        assert store.has(NORM)
        assert not store.has("x")
        for name, wanted in made.tensors.items():
            got = store.tensor(name)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
            assert torch.equal(bits(got), bits(wanted)), name
        sizes = [tensor.numel() * tensor.element_size() for tensor in made.tensors.values()]
        assert store.nbytes == sum(sizes)


def test_views_share_the_mapped_memory(made: Tiny) -> None:
    with WeightStore.open(made.path) as store:
        for name in (NORM, EXPERT, EXPERT + "_scale_inv"):
            first, second = store.tensor(name), store.tensor(name)
            assert first.data_ptr() == second.data_ptr()
        norm = store.tensor(NORM)
        assert store.dense(NORM, norm.dtype).data_ptr() == norm.data_ptr()
        assert store.dense(NORM, torch.float32).data_ptr() != norm.data_ptr()


def test_dense_is_rounded_once_and_cast(made: Tiny) -> None:
    with WeightStore.open(made.path) as store:
        assert store.scale(NORM) is None
        scale = store.scale(EXPERT)
        assert scale is not None
        assert scale.shape == (1, 2)
        wanted = dequantise(made.tensors[EXPERT], made.tensors[EXPERT + "_scale_inv"])
        assert torch.equal(store.dense(EXPERT, torch.bfloat16), wanted)
        assert torch.equal(store.dense(EXPERT, torch.float32), wanted.float())


def test_the_file_is_never_written(made: Tiny, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made.path, tmp_path / "copy"))
    before = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").chmod(0o444)
    with WeightStore.open(copy) as store:
        store.tensor(NORM).zero_()
    assert (copy / "model.safetensors").read_bytes() == before


def test_tensors_outlive_the_store(made: Tiny) -> None:
    with WeightStore.open(made.path) as store:
        norm = store.tensor(NORM)
    assert torch.equal(norm, made.tensors[NORM])
    store.close()
    with pytest.raises(RuntimeError, match="is closed"):
        store.tensor(NORM)
    with pytest.raises(CheckpointError, match="holds no tensor nonsense"):
        store.tensor("nonsense")


def test_shards_are_one_store(made: Tiny, tmp_path: Path) -> None:
    shutil.copy(made.path / "config.json", tmp_path)
    names = list(made.tensors)
    weight_map = {}
    for i in range(2):
        part = {name: made.tensors[name] for name in names[i::2]}
        save_file(part, tmp_path / f"part-{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part-{i}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with WeightStore.open(tmp_path) as store:
        assert all(torch.equal(bits(store.tensor(n)), bits(made.tensors[n])) for n in names)
        assert set(store.shards) == {"part-0.safetensors", "part-1.safetensors"}


@pytest.mark.parametrize("padding", range(4))
def test_any_offset_is_read(made: Tiny, tmp_path: Path, padding: int) -> None:
    """The format allows tensors at odd offsets: written by hand, in an order that makes some."""
    shutil.copy(made.path / "config.json", tmp_path)
    small_first = sorted(made.tensors, key=lambda name: made.tensors[name].element_size())
    header: dict[str, dict[str, Any]] = {}
    data = bytearray()
    for name in small_first:
        tensor = made.tensors[name]
        raw = bits(tensor).numpy().tobytes()
        kind = {torch.bfloat16: "BF16", torch.float32: "F32"}.get(tensor.dtype, "F8_E4M3")
        begin = len(data)
        data += raw
        offsets = [begin, len(data)]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4 + padding)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    assert load_file(path).keys() == made.tensors.keys()
    with WeightStore.open(tmp_path) as store:
        copied = set()
        for name, wanted in made.tensors.items():
            first, second = store.tensor(name), store.tensor(name)
            assert torch.equal(bits(first), bits(wanted)), name
            if first.data_ptr() != second.data_ptr():
                copied.add(name)
    assert copied == {
        name
        for name, entry in header.items()
        if (8 + len(text) + entry["data_offsets"][0]) % made.tensors[name].element_size()
    }
    assert bool(copied) == (padding != 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_broken_scales_are_found_when_opening(made: Tiny, tmp_path: Path, value: float) -> None:
    shutil.copy(made.path / "config.json", tmp_path)
    tensors = dict(made.tensors)
    tensors[EXPERT + "_scale_inv"] = torch.tensor([[1.0, value]])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"NaN or infinite scales in 1 .*experts\.3\.up"):
        WeightStore.open(tmp_path)


def test_what_cannot_be_run(made: Tiny, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no"):
        WeightStore.open(tmp_path / "nowhere")
    shutil.copy(made.path / "model.safetensors", tmp_path)
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        WeightStore.open(tmp_path)
    larger = Path(__file__).parents[2] / "src/glmflash/data/glm-5.3.config.json"
    shutil.copy(larger, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="compared, but not run"):
        WeightStore.open(tmp_path)
    config = json.loads((made.path / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="wrong shape 2"):
        WeightStore.open(tmp_path)
