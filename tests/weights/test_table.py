"""The tensor table against published totals, and against what transformers writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from safetensors import safe_open

from glmflash.config import ModelConfig, shipped
from glmflash.weights.table import COMPONENTS, Storage, expected_tensors
from tests.oracle.tiny import make_tiny


@pytest.mark.parametrize(
    ("name", "storage", "tensors", "nbytes", "parameters"),
    [
        ("glm-5.3-flash", "fp8", 76_108, 328_326_771_576, 321_323_031_390),
        ("glm-5.3-flash", "bf16", 38_770, 642_646_653_816, 321_323_031_390),
        ("glm-5.3-flash", "fp32", 38_770, 4 * 321_323_031_390, 321_323_031_390),
        ("glm-5.3", "fp8", 118_629, 755_617_140_416, 753_329_940_480),
        ("glm-5.3", "bf16", 59_585, 1_506_659_919_872, 753_329_940_480),
    ],
)
def test_totals_of_the_releases(
    name: str, storage: Storage, tensors: int, nbytes: int, parameters: int
) -> None:
    specs = expected_tensors(shipped(name), storage)
    assert len(specs) == tensors
    assert sum(spec.nbytes for spec in specs.values()) == nbytes
    assert sum(spec.parameters for spec in specs.values()) == parameters


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("glm-5.3-flash", {"F8_E4M3": 37_338, "F32": 37_629, "BF16": 1_141}),
        ("glm-5.3", {"F8_E4M3": 59_044, "F32": 59_120, "BF16": 465}),
    ],
)
def test_types_of_the_fp8_releases(name: str, counts: dict[str, int]) -> None:
    specs = expected_tensors(shipped(name), "fp8").values()
    assert Counter(spec.dtype for spec in specs) == counts


def test_components_of_flash() -> None:
    specs = expected_tensors(shipped("glm-5.3-flash"), "fp8").values()
    parameters, nbytes = Counter[str](), Counter[str]()
    for spec in specs:
        parameters[spec.component] += spec.parameters
        nbytes[spec.component] += spec.nbytes
    published = {
        "embedding": (634_388_480, 1_268_776_960),
        "head": (634_388_480, 1_268_776_960),
        "norms": (372_736, 745_472),
        "mhc": (35_391_870, 70_788_600),
        "kda": (4_682_897_792, 9_366_356_992),
        "mla": (1_291_868_160, 1_476_710_400),
        "indexer": (82_190_592, 164_381_184),
        "dense_mlp": (452_984_832, 453_095_424),
        "router": (49_557_312, 99_138_816),
        "routed_experts": (304_405_807_104, 304_480_124_928),
        "shared_experts": (1_056_964_608, 1_057_222_656),
        "mtp": (7_432_592_416, 7_493_399_168),
        "vision": (563_627_008, 1_127_254_016),
    }
    assert {name: (parameters[name], nbytes[name]) for name in COMPONENTS} == published
    mtp = [spec for spec in specs if spec.component == "mtp"]
    assert len(mtp) == 1_760
    assert {spec.layer for spec in mtp} == {45}
    assert sum(spec.component == "vision" for spec in specs) == 347


def test_some_tensors_by_name() -> None:
    flash = expected_tensors(shipped("glm-5.3-flash"), "fp8")
    layer = "model.language_model.layers."
    for name, shape, dtype in (
        (f"{layer}3.self_attn.kv_b_proj.weight", (32768, 512), "BF16"),
        (f"{layer}3.self_attn.q_b_proj.weight", (16384, 1536), "F8_E4M3"),
        (f"{layer}3.self_attn.q_b_proj.weight_scale_inv", (128, 12), "F32"),
        (f"{layer}45.mlp.experts.287.down_proj.weight_scale_inv", (32, 16), "F32"),
        (f"{layer}44.hc_ffn_fn", (24, 16384), "BF16"),
        (f"{layer}0.self_attn.k_conv1d.weight", (8192, 1, 4), "BF16"),
        ("model.visual.patch_embed.proj.weight", (1024, 3, 2, 14, 14), "BF16"),
    ):
        assert (flash[name].shape, flash[name].dtype) == (shape, dtype)
    assert f"{layer}45.hc_attn_fn" not in flash
    larger = expected_tensors(shipped("glm-5.3"), "fp8")
    # 576 rows end in half a block
    assert larger["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 48)
    assert "model.layers.3.self_attn.indexer.wk.weight" not in larger
    assert larger["model.layers.78.self_attn.indexer.wk.weight"].dtype == "F8_E4M3"


@pytest.mark.parametrize("layers", ["KKSK", "SsKS"])
def test_table_is_what_transformers_writes(tmp_path: Path, layers: str) -> None:
    text = {"layers": layers, "num_nextn_predict_layers": 0, "hc_mult": 3, "index_kpool": 2}
    made = make_tiny(tmp_path / "made", seed=1, text=text, mtp=False)
    specs = expected_tensors(ModelConfig.from_dir(made.path), "fp32")
    with safe_open(made.path / "model.safetensors", framework="pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: spec.shape for name, spec in specs.items()} == written


def test_tied_embeddings_have_no_head() -> None:
    values = shipped("glm-5.3-flash")
    assert isinstance(values, ModelConfig)
    tied = values.to_dict()
    tied["tie_word_embeddings"] = tied["text_config"]["tie_word_embeddings"] = True
    specs = expected_tensors(ModelConfig.from_dict(tied), "bf16")
    assert "lm_head.weight" not in specs
    assert len(specs) == 38_769
