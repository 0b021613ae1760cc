"""Comparisons: the published pair by its numbers, and copies that differ in one known way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glmflash.verify.compare import compare, pattern
from glmflash.verify.subject import open_subject

from .checkpoints import small_config, write_checkpoint


def facts(a: object, b: object) -> dict[str, Any]:
    return compare(open_subject(str(a)), open_subject(str(b)))


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return facts("glm-5.3", "glm-5.3-flash")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("small")
    write_checkpoint(path, small_config())
    return path


def layout(pair: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in pair["cache"]["layouts"] if row["name"] == name)


def test_caches_of_the_pair(pair: dict[str, Any]) -> None:
    plain = layout(pair, "fp8")
    assert plain["a"]["bytes_per_token"] == 47_616
    assert plain["b"]["bytes_per_token"] == 5_984
    assert plain["a"]["formula"] == "78 x (512 + 64 rotary) latent + 21 x 128 index key"
    assert round(plain["ratio"], 1) == 8.0
    assert round(layout(pair, "fp8, keys not pooled")["ratio"], 1) == 6.8
    assert round(plain["a"]["totals"]["1048576"] / 1e9, 1) == 49.9
    assert round(plain["b"]["totals"]["1048576"] / 1e9, 1) == 6.3
    assert round(pair["b"]["cache"]["state_bytes_bf16"] / 1e9, 2) == 0.07
    assert pair["a"]["cache"]["fixed_bytes"] == 0
    assert pair["a"]["cache"]["bytes_per_token_fp8"] == 47_616


def test_vendor_ratio_is_not_reproduced(pair: dict[str, Any]) -> None:
    claim = pair["vendor_claim"]
    assert claim["claim"].startswith("about 4.4x")
    assert claim["reproduced"] is False
    assert 4.4 not in {round(ratio, 1) for ratio in claim["ratios"].values()}
    tokens = claim["tokens_where_fp8_with_fixed_state_crosses"]
    fixed = 142_606_336 + 5_013_504 + 22_528
    assert 47_616 * tokens / (5_984 * tokens + fixed) == pytest.approx(4.4, abs=1e-3)


def test_vendor_ratio_in_either_order(pair: dict[str, Any], small: Path) -> None:
    turned = facts("glm-5.3-flash", "glm-5.3")
    assert turned["vendor_claim"] == pair["vendor_claim"]
    assert layout(turned, "fp8")["ratio"] == pytest.approx(5_984 / 47_616)
    assert facts("glm-5.3", small)["vendor_claim"] is None


def test_tensors_of_the_pair(pair: dict[str, Any]) -> None:
    assert (pair["a"]["tensors"], pair["b"]["tensors"]) == (118_629, 76_108)
    assert pair["tensors_together"] == 194_737
    rows = {row["pattern"]: row for row in pair["patterns"]}
    assert sum(row["a"]["count"] for row in rows.values() if row["a"]) == 118_629
    assert sum(row["b"]["count"] for row in rows.values() if row["b"]) == 76_108
    assert rows["model.layers.*.self_attn.kv_b_proj.weight"]["a"]["dtypes"] == ["F8_E4M3"]
    assert rows["model.layers.*.self_attn.kv_b_proj.weight"]["b"]["dtypes"] == ["BF16"]
    assert rows["model.layers.*.hc_attn_fn"]["status"] == "only_b"
    assert rows["model.layers.*.self_attn.indexer.wq_b.weight"]["a"]["count"] == 22
    experts = rows["model.layers.*.mlp.experts.*.up_proj.weight"]
    assert (experts["a"]["count"], experts["b"]["count"]) == (76 * 256, 43 * 288)


def test_config_of_the_pair(pair: dict[str, Any]) -> None:
    config = pair["config"]
    assert config["only_a"]["rope_theta"] == 8_000_000
    assert config["only_a"]["index_topk_freq"] == 4
    assert config["changed"]["num_hidden_layers"] == [78, 45]
    assert config["changed"]["indexer_types"] == ["21 x full, 57 x shared", "45 x full"]
    assert config["changed"]["model_type"] == ["glm_moe_dsa", "glm5_next"]
    assert config["only_b"]["layer_types"] == (
        "34 x linear_attention, 11 x deepseek_sparse_attention"
    )
    assert config["same"]["kv_lora_rank"] == 512


def test_mechanisms_of_the_pair(pair: dict[str, Any]) -> None:
    rows = {row["name"]: row for row in pair["mechanisms"]}
    new = {name for name, row in rows.items() if row["status"] == "new"}
    assert new == {
        "linear attention (KDA)",
        "index key pooling",
        "hyper-connections (mHC)",
        "SwiGLU clamp",
        "vision",
    }
    assert rows["rotary positions"]["status"] == "gone"
    assert "rope_theta 8,000,000" in rows["rotary positions"]["a"]
    assert rows["indexer layers"]["a"] == "21 + 1 of 78 + 1 own one (index_topk_freq 4)"
    assert rows["indexer layers"]["b"] == "11 + 1 of 11 + 1 own one"
    assert rows["indexer"]["status"] == rows["router"]["status"] == "carried over"
    assert rows["experts"]["status"] == "changed"


def test_equal_copies(small: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small, tmp_path / "copy")
    found = facts(small, copy)
    assert found["identical"] is True
    assert found["tensors"]["identical"] is True
    assert found["patterns"] is None
    # A config alone promises the same tensors.
    assert facts(small / "config.json", copy)["identical"] is True


def test_storage_differs(small: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config(quantised=False), "bf16")
    found = facts(small, tmp_path)
    assert found["identical"] is False
    tensors = found["tensors"]
    assert tensors["only_b"] == []
    assert tensors["shape"] == []
    assert all(name.endswith("_scale_inv") for name in tensors["only_a"])
    assert len(tensors["only_a"]) == len(tensors["dtype"]) > 0
    assert {(row["a"], row["b"]) for row in tensors["dtype"]} == {("F8_E4M3", "BF16")}
    assert "quantization_config.fmt" in found["config"]["only_a"]


def test_one_key_differs(small: Path, tmp_path: Path) -> None:
    values = small_config(rms_norm_eps=1e-6)
    write_checkpoint(tmp_path, values)
    found = facts(small, tmp_path)
    assert found["identical"] is False
    assert found["config"]["changed"] == {"rms_norm_eps": [1e-5, 1e-6]}
    assert found["tensors"]["identical"] is True


def test_shapes_differ(small: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_config(vocab_size=520))
    tensors = facts(small, tmp_path)["tensors"]
    assert tensors["shape"] == [
        {"name": name, "a": [512, 256], "b": [520, 256]}
        for name in ("model.language_model.embed_tokens.weight", "lm_head.weight")
    ]


def test_slice_of_a_model(small: Path, tmp_path: Path) -> None:
    shorter = {
        "num_hidden_layers": 4,
        "indexer_types": ["full"] * 4,
        "layer_types": ["linear_attention"] * 3 + ["deepseek_sparse_attention"],
        "mlp_layer_types": ["dense"] * 3 + ["sparse"],
    }
    values = small_config(num_nextn_predict_layers=0, **shorter)
    write_checkpoint(tmp_path, values)
    tensors = facts(small, tmp_path)["tensors"]
    assert {name.split(".")[3] for name in tensors["only_a"]} == {"4", "5"}
    assert tensors["only_b"] == tensors["shape"] == tensors["dtype"] == []


def test_models_of_different_width(small: Path) -> None:
    found = facts(small, "glm-5.3-flash")
    assert found["tensors"] is None
    status = {row["pattern"]: row["status"] for row in found["patterns"]}
    assert "only_a" not in status.values()
    assert status["lm_head.weight"] == "changed"


def test_long_lists_that_differ_in_order(tmp_path: Path) -> None:
    kinds = ["linear_attention", "deepseek_sparse_attention"] * 5
    mlp = {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 7, "indexer_types": ["full"] * 10}
    for name, order in (("a", kinds), ("b", kinds[::-1])):
        values = small_config(num_hidden_layers=10, layer_types=order, **mlp)
        del values["text_config"]["linear_attn_config"]
        values["text_config"] |= {
            "linear_num_heads": 4,
            "linear_head_dim": 32,
            "linear_conv_kernel_dim": 4,
            "linear_lower_bound": -5.0,
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    before, after = facts(tmp_path / "a.json", tmp_path / "b.json")["config"]["changed"][
        "layer_types"
    ]
    assert before.startswith("5 x linear_attention, 5 x deepseek")
    assert before.endswith("[0] is linear_attention")
    assert after.startswith("5 x deepseek_sparse_attention, 5 x linear")
    assert after.endswith("[0] is deepseek_sparse_attention")


def test_single_files_by_name(small: Path) -> None:
    first, second, _ = sorted(small.glob("*.safetensors"))
    assert facts(first, first)["identical"] is True
    found = facts(first, second)
    assert found["config"] is None
    assert found["mechanisms"] is None
    assert found["cache"] is None
    assert found["tensors"]["compared"] == 0
    assert len(found["tensors"]["only_a"]) == found["a"]["tensors"]
    whole = facts(first, small)["tensors"]
    assert (whole["only_a"], whole["shape"], whole["dtype"]) == ([], [], [])


LAYER = "model.language_model.layers.12."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (f"{LAYER}mlp.gate.weight", "model.layers.*.mlp.gate.weight"),
        ("model.layers.3.mlp.gate.weight", "model.layers.*.mlp.gate.weight"),
        (f"{LAYER}mlp.experts.17.up_proj.weight", "model.layers.*.mlp.experts.*.up_proj.weight"),
        (f"{LAYER}self_attn.q_conv1d.weight", "model.layers.*.self_attn.q_conv1d.weight"),
        ("model.visual.blocks.1.norm1.weight", "model.visual.blocks.*.norm1.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_patterns(name: str, expected: str) -> None:
    assert pattern(name) == expected
