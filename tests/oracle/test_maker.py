"""The oracle itself: its files are what they claim, and its answers do not hang on near ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers.models.glm5_next import Glm5NextForConditionalGeneration

from .cases import BY_NAME
from .conftest import Zoo
from .runs import (
    SELF_AGREEMENT,
    UntrustedOracleError,
    in_chunks,
    largest,
    one_shot,
    random_tokens,
    trusted_logits,
)
from .tiny import dequantise, make_tiny, quantise


@pytest.mark.parametrize("name", BY_NAME)
def test_seed_is_trusted(zoo: Zoo, name: str) -> None:
    specimen = zoo[name]
    assert len(specimen.ids) > 3 * specimen.tiny.text["index_topk"]
    assert specimen.expected.std() > 0.5  # lively logits, or parity would mean nothing


def test_near_tie_is_not_trusted(tmp_path: Path) -> None:
    """Two experts with equal rows tie at every token; the check must notice."""
    tiny = make_tiny(tmp_path / "model", seed=0)
    router = tiny.oracle.model.language_model.layers[1].mlp.gate
    with torch.no_grad():
        router.weight[1:] = router.weight[:1]
        router.e_score_correction_bias.zero_()
    with pytest.raises(UntrustedOracleError):
        trusted_logits(tiny.oracle, random_tokens(20, 0))


def test_oracle_agrees_token_by_token(zoo: Zoo) -> None:
    specimen = zoo["two sparse layers"]
    ids = specimen.ids[:64]
    steps = in_chunks(specimen.tiny.oracle, ids, [1] * len(ids))
    assert largest(steps, specimen.expected[: len(ids)]) <= SELF_AGREEMENT


def test_fp32_files_reload_in_transformers(zoo: Zoo) -> None:
    """The MTP tensors are in the file under their released names, and transformers skips them."""
    tiny = zoo["base"].tiny
    names = [name for name in tiny.tensors if ".layers.4." in name]
    assert len(names) == 22 + 3 * 9  # 8 experts and the shared one
    assert "model.language_model.layers.4.eh_proj.weight" in names
    again = Glm5NextForConditionalGeneration.from_pretrained(tiny.path, dtype=torch.float32).eval()
    assert largest(one_shot(again, zoo["base"].ids), zoo["base"].expected) == 0


def test_fp8_files_are_read_by_transformers_to_the_same_bits(zoo: Zoo) -> None:
    tiny = zoo["fp8 files, whole blocks"].tiny
    loaded = Glm5NextForConditionalGeneration.from_pretrained(tiny.path, dtype=torch.bfloat16)
    ours = tiny.oracle.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.float(), ours[name]), name


def test_stored_dtypes_of_the_release(zoo: Zoo) -> None:
    tiny = zoo["fp8 files, ragged blocks"].tiny
    with safe_open(tiny.path / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
        shapes = {name: file.get_slice(name).get_shape() for name in dtypes}
    layer = "model.language_model.layers.2."
    assert dtypes[layer + "self_attn.q_b_proj.weight"] == "F8_E4M3"
    assert shapes[layer + "self_attn.q_b_proj.weight"] == [200, 130]
    assert shapes[layer + "self_attn.q_b_proj.weight_scale_inv"] == [2, 2]
    assert dtypes[layer + "self_attn.q_b_proj.weight_scale_inv"] == "F32"
    assert dtypes[layer + "self_attn.kv_b_proj.weight"] == "BF16"
    assert dtypes[layer + "mlp.gate.weight"] == "BF16"
    assert dtypes[layer + "mlp.gate.e_score_correction_bias"] == "F32"
    assert dtypes["model.language_model.layers.0.self_attn.o_proj.weight"] == "BF16"  # KDA
    assert dtypes["model.language_model.layers.0.self_attn.q_conv1d.weight"] == "BF16"
    config = json.loads((tiny.path / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [128, 128]


def test_block_rule_by_hand() -> None:
    """A 130 x 129 matrix has four blocks; each scale is its block's largest magnitude / 448."""
    weight = torch.zeros(130, 129)
    weight[0, 0], weight[129, 0], weight[0, 128], weight[129, 128] = 448.0, -896.0, 4.48, 1.0
    values, scales = quantise(weight)
    assert scales[0, 0] == 1.0
    assert scales[1, 0] == 2.0
    assert scales[0, 1] == torch.tensor(4.48) / 448
    back = dequantise(values, scales)
    assert back.dtype == torch.bfloat16
    assert back[0, 0] == 448.0
    assert back[129, 0] == -896.0
