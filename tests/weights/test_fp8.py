"""FP8 blocks against the rule written out element by element, and against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.glm5_next import Glm5NextForConditionalGeneration

from glmflash.weights.fp8 import dequantize, quantize
from glmflash.weights.store import WeightStore
from tests.oracle.tiny import make_tiny

SHAPES = [(1, 1), (128, 128), (127, 129), (130, 300), (576, 200), (256, 384), (0, 5), (3, 1000)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = kinds[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def random_weight(shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All e4m3 codes except NaN, and scales over many magnitudes."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=random, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 1
    blocks = (-(-shape[0] // 128), -(-shape[1] // 128))
    scale = torch.exp2(torch.rand(blocks, generator=random) * 60 - 50)
    return codes.view(torch.float8_e4m3fn), scale


def by_element(w8: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """W[r, c] = float32(W8[r, c]) * S[r // 128, c // 128]."""
    rows = torch.arange(w8.shape[0]) // 128
    columns = torch.arange(w8.shape[1]) // 128
    return w8.to(torch.float32) * scale[rows][:, columns]


@pytest.mark.parametrize("shape", SHAPES)
def test_dequantize_is_the_rule_bit_for_bit(shape: tuple[int, int]) -> None:
    w8, scale = random_weight(shape, seed=shape[0])
    want = by_element(w8, scale)
    assert same_bits(dequantize(w8, scale, round_to="none"), want)
    assert same_bits(dequantize(w8, scale), want.to(torch.bfloat16))


def test_every_code_has_its_value() -> None:
    """Values by the definition of e4m3: 4 exponent bits with bias 7, no infinity, one NaN."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = []
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        value = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        values.append((-1.0 if code & 128 else 1.0) * value)
    values[0x7F] = values[0xFF] = float("nan")
    want = torch.tensor(values)
    for subset in (codes, codes[:127], codes[128:255]):  # with and without NaN
        w8 = subset.view(torch.float8_e4m3fn).unsqueeze(0)
        got = dequantize(w8, torch.ones(1, -(-w8.shape[1] // 128)), round_to="none")
        assert torch.equal(got.isnan()[0], want[subset.long()].isnan())
        known = ~got.isnan()
        assert torch.equal(got[known], want[subset.long()][known[0]])
        assert torch.equal(got[known].signbit(), (subset[known[0]] & 128) > 0)


def test_scales_of_any_size_are_exact() -> None:
    """Products that overflow, and those of scales below the smallest normal number."""
    w8 = torch.tensor([[448.0, -0.001953125, 1.0]]).to(torch.float8_e4m3fn)
    for value in (3e38, 1e-45, 1e-39, 7e35, 0.0):
        scale = torch.tensor([[value]])
        assert same_bits(dequantize(w8, scale, round_to="none"), by_element(w8, scale))


def test_other_blocks() -> None:
    w8 = torch.ones(3, 4).to(torch.float8_e4m3fn)
    got = dequantize(w8, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), block=(2, 3), round_to="none")
    assert got.tolist() == [[1, 1, 1, 2], [1, 1, 1, 2], [3, 3, 3, 4]]


@pytest.mark.parametrize("shape", SHAPES)
def test_quantize_uses_the_whole_range(shape: tuple[int, int]) -> None:
    """scale = largest magnitude / 448; every value is at most half a step of e4m3 away."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    w8, scale = quantize(w.bfloat16())
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            assert scale[i, j] == w.bfloat16()[at].float().abs().max() / 448
            assert w8[at].float().abs().max() == 448
    error = (by_element(w8, scale) - w.bfloat16().float()).abs()
    steps = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert bool((error <= w.bfloat16().float().abs() / 16 * 1.0001 + steps * 2**-10).all())


def test_a_zero_block_stays_zero() -> None:
    w8, scale = quantize(torch.zeros(130, 2))
    assert bool((scale > 0).all())
    assert not dequantize(w8, scale).any()


def test_the_order_of_rounding_matters() -> None:
    """Rounding scale or weight to bf16 before the product gives other bits: the test can tell."""
    w8, scale = random_weight((256, 256), seed=5)
    early = by_element(w8, scale.bfloat16().float()).bfloat16()
    assert not same_bits(dequantize(w8, scale), early)


def test_same_bits_as_transformers(tmp_path: Path) -> None:
    """transformers expands FP8 files when it has no GPU; its blocks must not be ragged."""
    text = {
        "hidden_size": 256,
        "intermediate_size": 384,
        "moe_intermediate_size": 128,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
    }
    made = make_tiny(tmp_path / "fp8", seed=2, text=text, storage="fp8", mtp=False)
    oracle = Glm5NextForConditionalGeneration.from_pretrained(made.path, dtype=torch.bfloat16)
    oracle.save_pretrained(tmp_path / "expanded")
    compared = 0
    with WeightStore.open(made.path) as ours, WeightStore.open(tmp_path / "expanded") as theirs:
        for name in theirs.names():
            compared += ours.scale(name) is not None
            wanted = theirs.tensor(name)
            assert same_bits(ours.dense(name, wanted.dtype), wanted), name
    assert compared == sum(name.endswith("_scale_inv") for name in made.tensors) > 60
