"""Counting rules against published totals and sums done by hand."""

from __future__ import annotations

from fractions import Fraction

import pytest

from glmflash.config import GlmMoeDsaConfig, ModelConfig, shipped
from glmflash.verify.arithmetic import (
    Counts,
    active,
    cache_shape,
    count,
    fixed_state,
    layouts,
    number,
)
from glmflash.weights.table import TensorSpec, expected_tensors

from .checkpoints import small_config


@pytest.fixture(scope="module")
def flash() -> ModelConfig:
    config = shipped("glm-5.3-flash")
    assert isinstance(config, ModelConfig)
    return config


@pytest.fixture(scope="module")
def larger() -> GlmMoeDsaConfig:
    config = shipped("glm-5.3")
    assert isinstance(config, GlmMoeDsaConfig)
    return config


@pytest.fixture(scope="module")
def flash_counts(flash: ModelConfig) -> Counts:
    return count(expected_tensors(flash, "fp8").values())


def per_token(config: ModelConfig | GlmMoeDsaConfig) -> dict[str, int | float]:
    return {layout.name: number(layout.bytes_per_token) for layout in layouts(config)}


def test_released_model(flash_counts: Counts) -> None:
    counts = flash_counts
    assert (counts.tensors, counts.bytes) == (76_108, 328_326_771_576)
    assert counts.total == 321_323_031_390
    assert (counts.trunk, counts.mtp, counts.vision) == (
        313_326_811_966,
        7_432_592_416,
        563_627_008,
    )
    assert counts.parameters == {
        "embedding": 634_388_480,
        "head": 634_388_480,
        "norms": 372_736,
        "mhc": 35_391_870,
        "kda": 4_682_897_792,
        "mla": 1_291_868_160,
        "indexer": 82_190_592,
        "dense_mlp": 452_984_832,
        "router": 49_557_312,
        "routed_experts": 304_405_807_104,
        "shared_experts": 1_056_964_608,
        "mtp": 7_432_592_416,
        "vision": 563_627_008,
    }
    assert counts.bytes_by_component["kda"] == 9_366_356_992
    assert counts.bytes_by_component["mla"] == 1_476_710_400
    assert counts.bytes_by_component["mtp"] == 7_493_399_168
    assert counts.tensors_by_dtype == {"BF16": 1_141, "F32": 37_629, "F8_E4M3": 37_338}
    assert counts.bytes_in_bf16 == 642_646_653_816


def test_larger_sibling(larger: GlmMoeDsaConfig) -> None:
    counts = count(expected_tensors(larger, "fp8").values())
    assert (counts.tensors, counts.bytes, counts.total) == (
        118_629,
        755_617_140_416,
        753_329_940_480,
    )
    assert counts.bytes_in_bf16 == 1_506_659_919_872


def test_active_parameters(flash: ModelConfig, flash_counts: Counts) -> None:
    used = active(flash, flash_counts)
    assert (used.trunk, used.with_embedding) == (16_742_333_246, 17_376_721_726)
    assert (used.mtp, used.vision) == (386_161_696, 563_627_008)
    assert used.everything == 17_376_721_726 + 386_161_696 + 563_627_008


def test_active_parameters_of_a_small_model() -> None:
    config = ModelConfig.from_dict(small_config())
    counts = count(expected_tensors(config, "bf16").values())
    used = active(config, counts)
    expert = 3 * 256 * 128  # gate, up and down between 256 and 128 channels
    assert used.with_embedding == counts.trunk - 2 * 6 * expert  # 2 layers, 6 of 8 experts idle
    assert used.trunk == used.with_embedding - 512 * 256
    assert used.mtp == counts.mtp - 6 * expert


def test_tied_head_works_for_every_token() -> None:
    values = small_config(vision=False, tie_word_embeddings=True)
    config = ModelConfig.from_dict(values)
    counts = count(expected_tensors(config, "bf16").values())
    assert "head" not in counts.parameters
    assert active(config, counts).trunk == active(config, counts).with_embedding


def test_mtp_that_is_not_stored_is_not_active() -> None:
    config = ModelConfig.from_dict(small_config())
    specs = expected_tensors(config, "fp8").values()
    everything = count(specs)
    counts = count(spec for spec in specs if spec.component != "mtp")
    assert counts.trunk == everything.trunk
    assert active(config, everything).mtp > active(config, counts).mtp == 0
    assert "fp8 with MTP" not in {layout.name for layout in layouts(config, mtp=False)}


def test_caches_of_the_released_model(flash: ModelConfig) -> None:
    assert per_token(flash) == {
        "fp8": 5_984,
        "bf16": 11_968,
        "fp8 with MTP": 6_528,
        "bf16 with MTP": 13_056,
        "fp8 with scales": 6_171,
        "fp8, keys not pooled": 7_040,
        "bf16, transformers": 16_918,
    }


def test_caches_of_the_larger_sibling(larger: GlmMoeDsaConfig) -> None:
    found = per_token(larger)
    assert found["fp8"] == 78 * (512 + 64) + 21 * 128 == 47_616
    assert found["bf16"] == 2 * 47_616
    assert found["fp8 with MTP"] == 79 * 576 + 22 * 128
    assert fixed_state(larger).nbytes(recurrent_size=4) == 0


def test_fixed_state(flash: ModelConfig) -> None:
    state = fixed_state(flash)
    assert 4 * state.recurrent == 142_606_336
    assert 2 * state.recurrent == 71_303_168
    assert 2 * state.conv == 5_013_504
    assert 2 * state.open_pool == 22_528
    assert state.nbytes(recurrent_size=4) == 142_606_336 + 5_013_504 + 22_528


def test_layers_that_share_an_indexer_hold_no_keys() -> None:
    kinds = ["linear_attention", *["deepseek_sparse_attention"] * 3, "linear_attention"]
    own = ["full", "full", "shared", "shared", "full"]
    config = ModelConfig.from_dict(small_config(layer_types=kinds, indexer_types=own))
    shape = cache_shape(config)
    assert (shape.latent_layers, shape.key_layers) == (3, 1)
    assert shape.per_token(1) == 3 * 64 + 1 * 32 // 4
    assert fixed_state(config).open_pool == 1 * 4 * 2 * 32
    assert fixed_state(config).recurrent == 2 * 4 * 32 * 32


def test_uneven_pools_cost_fractions_of_a_byte() -> None:
    config = ModelConfig.from_dict(small_config(index_kpool=3, index_topk=15))
    assert cache_shape(config).per_token(1) == 64 + Fraction(32, 3)
    assert number(cache_shape(config).per_token(1)) == pytest.approx(64 + 32 / 3)


def test_scales_are_bytes_but_not_parameters() -> None:
    counts = count(
        [
            TensorSpec("b.weight", (10,), "BF16", "other", None),
            TensorSpec("a.weight", (256, 128), "F8_E4M3", "mla", None),
            TensorSpec("a.weight_scale_inv", (2, 1), "F32", "mla", None),
        ]
    )
    assert (counts.total, counts.bytes, counts.tensors) == (256 * 128 + 10, 256 * 128 + 28, 3)
    assert counts.bytes_in_bf16 == 2 * 256 * 128 + 20
    assert list(counts.parameters) == ["mla", "other"]


@pytest.mark.parametrize("size", [1, 2])
def test_formulas_add_up(flash: ModelConfig, larger: GlmMoeDsaConfig, size: int) -> None:
    """What people read is the sum that was computed."""
    for config in (flash, larger):
        shape = cache_shape(config)
        for mtp in (False, True):
            text = shape.formula(size, mtp=mtp)
            for word in (" latent", " index key", " rotary"):
                text = text.replace(word, "")
            value = eval(text.replace(" B", "").replace(" x ", " * "))
            assert value == shape.per_token(size, mtp=mtp)
