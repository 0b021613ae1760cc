"""Random values: the spread each tensor needs, and the same bits whatever the block size."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

from glmflash.weights import values
from glmflash.weights.table import TensorSpec
from glmflash.weights.values import draw

LAYER = "model.language_model.layers.0."


def spec(name: str, *shape: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, "kda", 0)


def all_values(tensor: TensorSpec, seed: int = 0) -> torch.Tensor:
    return torch.cat(list(draw(tensor, seed)))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("input_layernorm.weight", 0.5, 1.5),
        ("self_attn.indexer.k_norm.weight", 0.5, 1.5),
        ("self_attn.A_log", -1, 1),
        ("self_attn.dt_bias", -3, 1),
        ("hc_attn_scale", 0.5, 1.5),
        ("hc_ffn_scale", 0.5, 1.5),
    ],
)
def test_uniform_ones_fill_their_range(name, low, high) -> None:
    found = all_values(spec(LAYER + name, 20_000))
    width = high - low
    assert low < found.min() < low + width / 1000
    assert high - width / 1000 < found.max() < high
    assert float(found.mean()) == pytest.approx((low + high) / 2, abs=0.01 * width)
    assert float(found.std()) == pytest.approx(width / 12**0.5, rel=0.02)


@pytest.mark.parametrize(
    ("name", "shape", "deviation"),
    [
        ("hc_ffn_base", (20_000,), 0.5),
        ("mlp.gate.e_score_correction_bias", (20_000,), 0.1),
        ("self_attn.indexer.k_norm.bias", (20_000,), 0.1),
        ("self_attn.indexer.index_kpool_compress_ape", (4, 5000), 0.15),
        ("self_attn.q_proj.weight", (512, 64), 0.15),
        ("self_attn.q_proj.weight", (512, 4096), 0.01875),  # 0.15 / 8
        ("self_attn.indexer.index_kpool_compress_gate", (512, 64), 0.15),
        ("self_attn.q_conv1d.weight", (8192, 1, 4), 0.6),
        ("embed_tokens.weight", (200, 512), 0.15),
        ("hc_attn_fn", (24, 4096), 0.01875),
    ],
)
def test_normal_ones_have_their_deviation(name, shape, deviation) -> None:
    found = all_values(spec(LAYER + name, *shape)).flatten()
    assert float(found.mean()) == pytest.approx(0, abs=0.03 * deviation)
    assert float(found.std()) == pytest.approx(deviation, rel=0.02)
    # a normal distribution has kurtosis 3 and about 4.55 % beyond two deviations
    assert float((found / deviation).pow(4).mean()) == pytest.approx(3, abs=0.2)
    beyond = float((found.abs() > 2 * deviation).float().mean())
    assert beyond == pytest.approx(0.0455, abs=0.006)


def test_values_are_quantiles_chosen_by_the_published_generator() -> None:
    import hashlib

    name = f"{LAYER}self_attn.q_proj.weight"
    key = int.from_bytes(hashlib.sha256(f"7 {name}".encode()).digest(), "little")
    bits = np.random.SFC64(key).random_raw(100)
    choices = [int(word) >> shift & 0xFFFF for word in bits for shift in (0, 16, 32, 48)]
    expected = [NormalDist(0, 0.15).inv_cdf((choice + 0.5) / 65536) for choice in choices]
    found = all_values(spec(name, 6, 64), seed=7).flatten()
    np.testing.assert_allclose(found, expected[: 6 * 64], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F8_E4M3"])
@pytest.mark.parametrize("shape", [(700, 130), (129, 3), (1, 1), (5,)])
def test_block_size_changes_nothing(monkeypatch, dtype, shape) -> None:
    tensor = spec(f"{LAYER}mlp.up_proj.weight", *shape, dtype=dtype)
    expected = all_values(tensor)
    monkeypatch.setattr(values, "BLOCK_VALUES", 1)
    monkeypatch.setattr(values, "CACHED_VALUES", 64)
    blocks = list(draw(tensor, 0))
    assert all(len(block) == 128 for block in blocks[:-1])
    assert torch.equal(torch.cat(blocks), expected)


def test_bf16_is_the_rounded_fp32() -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    wide = all_values(spec(name, 300, 40))
    assert torch.equal(all_values(spec(name, 300, 40, dtype="BF16")), wide.to(torch.bfloat16))


def test_seed_and_name_change_the_values() -> None:
    tensors = [all_values(spec(LAYER + name, 64, 64), s) for name in "ab" for s in (0, 1)]
    for i, first in enumerate(tensors):
        for second in tensors[i + 1 :]:
            assert abs(float(torch.corrcoef(torch.stack([first, second]).view(2, -1))[0, 1])) < 0.06
