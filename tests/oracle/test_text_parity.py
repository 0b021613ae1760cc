"""Text logits against transformers in fp32: every variant, every way a prompt may arrive."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.glm5_next import Glm5NextForConditionalGeneration

import glmflash
from glmflash.weights.store import WeightStore

from .cases import BY_NAME, STORED_CASES, TEXT_CASES
from .conftest import Zoo
from .runs import assert_parity, one_shot, random_chunks, random_tokens, trusted_logits
from .tiny import dequantise, make_tiny

NAMES = [case.name for case in TEXT_CASES]


@pytest.mark.parametrize("name", [*NAMES, *(case.name for case in STORED_CASES)])
def test_one_shot(zoo: Zoo, name: str) -> None:
    specimen = zoo[name]
    ours = specimen.engine.logits(specimen.ids)
    assert ours.dtype == np.float32
    assert_parity(ours, specimen.expected)


@pytest.mark.parametrize("name", NAMES)
def test_random_chunks(zoo: Zoo, name: str) -> None:
    """A session that is extended by 1..70 tokens at a time."""
    specimen = zoo[name]
    session, ids, rows, at = specimen.engine.session(), specimen.ids, [], []
    end = 0
    for size in random_chunks(len(ids), seed=specimen.case.seed + 7):
        reused = session.sync(ids[: end + size])
        assert reused == end
        end += size
        rows.append(session.logits)
        at.append(end - 1)
    assert_parity(np.stack(rows), specimen.expected[at])


@pytest.mark.parametrize("name", NAMES)
def test_token_by_token(zoo: Zoo, name: str) -> None:
    specimen = zoo[name]
    ids = specimen.ids[:48]
    session = specimen.engine.session()
    rows = np.stack([session.step(token) for token in ids])
    assert_parity(rows, specimen.expected[: len(ids)])


@pytest.mark.parametrize("prefill_chunk", [1, 3, 16, 61])
def test_prefill_chunk_setting(zoo: Zoo, prefill_chunk: int) -> None:
    specimen = zoo["two sparse layers"]
    engine = specimen.open(prefill_chunk=prefill_chunk)
    assert_parity(engine.logits(specimen.ids), specimen.expected)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 63, 64, 101])
def test_left_context_from_a_restored_state(zoo: Zoo, tmp_path: Path, cut: int) -> None:
    """Saved at any place in a pool or chunk, restored by another engine, continued both ways."""
    specimen = zoo["two sparse layers"]
    ids, expected = specimen.ids, specimen.expected
    first = specimen.engine.session()
    first.sync(ids[:cut])
    first.save(tmp_path / "state")
    other = specimen.open()
    stepped = other.restore(tmp_path / "state")
    assert stepped.sync(ids[:cut]) == cut
    assert_parity(stepped.logits[None], expected[cut - 1 : cut])
    rows = np.stack([stepped.step(token) for token in ids[cut : cut + 12]])
    assert_parity(rows, expected[cut : cut + 12])
    read = other.restore(tmp_path / "state")
    assert read.sync(ids) == cut
    assert_parity(read.logits[None], expected[-1:])


def test_fork_leaves_the_parent_alone(zoo: Zoo) -> None:
    specimen = zoo["two sparse layers"]
    ids, expected = specimen.ids, specimen.expected
    parent = specimen.engine.session()
    parent.sync(ids[:90])
    child = parent.fork()
    for token in reversed(ids[:25]):
        child.step(token)
    rows = np.stack([parent.step(token) for token in ids[90:110]])
    assert_parity(rows, expected[90:110])


@pytest.mark.parametrize("name", ["base", "no tail", "pools of 16", "shared indexers"])
@pytest.mark.parametrize("length", range(1, 13))
def test_short_prompts(zoo: Zoo, name: str, length: int) -> None:
    specimen = zoo[name]
    ids = specimen.ids[:length]
    assert_parity(specimen.engine.logits(ids), one_shot(specimen.tiny.oracle, ids))


def test_bf16_files_as_transformers_saves_them(tmp_path: Path) -> None:
    """Its own bf16 files keep conv and router weights in fp32, unlike the release; and they name
    an MTP layer in the config that they do not hold."""
    tiny = make_tiny(tmp_path / "fp32", seed=2, mtp=False)
    directory = tmp_path / "bf16"
    half = Glm5NextForConditionalGeneration.from_pretrained(tiny.path, dtype=torch.bfloat16)
    half.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    layer = "model.language_model.layers.1."
    assert tensors[layer + "self_attn.q_conv1d.weight"].dtype == torch.float32
    assert tensors[layer + "mlp.gate.weight"].dtype == torch.float32
    assert tensors[layer + "self_attn.q_proj.weight"].dtype == torch.bfloat16
    oracle = Glm5NextForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    ids = random_tokens(60, 2)
    with glmflash.open(directory, dtype="float32") as engine:
        assert_parity(engine.logits(ids), trusted_logits(oracle, ids))


@pytest.mark.parametrize("name", ["fp8 files, whole blocks", "fp8 files, ragged blocks"])
def test_fp8_weights_dequantise_to_the_same_bits(zoo: Zoo, name: str) -> None:
    """Every e4m3 matrix of the file, against the block rule written out by the maker (which for
    whole blocks is checked against transformers' reader)."""
    tiny = zoo[name].tiny
    matrices = [n for n, t in tiny.tensors.items() if t.dtype == torch.float8_e4m3fn]
    assert len(matrices) > 20
    with WeightStore.open(tiny.path) as store:
        for matrix in matrices:
            scale = tiny.tensors[matrix.removesuffix("weight") + "weight_scale_inv"]
            expected = dequantise(tiny.tensors[matrix], scale)
            assert torch.equal(store.dense(matrix, torch.bfloat16), expected), matrix
            assert torch.equal(store.dense(matrix, torch.float32), expected.float()), matrix


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(TEXT_CASES) + len(STORED_CASES)


@pytest.mark.parametrize("dt_bias", [6.0, -12.0], ids=["all decay at once", "nothing decays"])
def test_gates_near_their_ends(tmp_path: Path, dt_bias: float) -> None:
    """Decay near exp(-5) a step, where factors of a chunk come close to the range of fp32, and
    near 1, where the state only grows."""

    def push(model: torch.nn.Module) -> None:
        for name, value in model.named_parameters():
            if name.endswith("dt_bias"):
                value.fill_(dt_bias)
            elif name.endswith("A_log"):
                value.fill_(0.5)

    tiny = make_tiny(tmp_path / "model", seed=8, amend=push)
    ids = random_tokens(150, 8)
    with glmflash.open(tiny.path, dtype="float32") as engine:
        assert_parity(engine.logits(ids), trusted_logits(tiny.oracle, ids))
