"""config.json: what the released files say, what transformers writes, and what is refused.

Expectations are published figures, transformers' own reading of the same file, or hand-made faults.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm5_next import Glm5NextConfig

from glmflash.config import (
    GlmMoeDsaConfig,
    ModelConfig,
    TextConfig,
    TokenIds,
    VisionConfig,
    read_config,
    shipped,
)
from glmflash.errors import ConfigError
from tests.oracle import tiny

LINEAR = "linear_attention"


def data(name: str) -> bytes:
    return (resources.files("glmflash") / "data" / name).read_bytes()


def released(name: str = "glm-5.3-flash") -> dict[str, Any]:
    values: dict[str, Any] = json.loads(data(f"{name}.config.json"))
    return values


def oracle_config(**text: Any) -> Glm5NextConfig:
    values = tiny.text_config(**text)
    ids = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    return Glm5NextConfig(
        text_config=values,
        vision_config=tiny.vision_config(values["hidden_size"]),
        dtype="float32",
        **{f"{name}_token_id": 310 + i for i, name in enumerate(ids)},
    )


def assert_equal_to_oracle(config: ModelConfig, oracle: Glm5NextConfig) -> None:
    """Every field that transformers knows too has the value that transformers reads."""
    for field in fields(TextConfig):
        theirs = getattr(oracle.text_config, field.name, None)
        ours = getattr(config.text, field.name)
        if field.name == "layer_types":
            assert [kind == LINEAR for kind in ours] == [kind == LINEAR for kind in theirs]
        elif field.name == "eos_token_id":
            assert list(ours) == (theirs if isinstance(theirs, list) else [theirs])
        elif field.name == "dtype":
            assert ours == str(theirs or oracle.dtype).removeprefix("torch.")
        elif theirs is not None or field.name == "pad_token_id":
            assert (list(ours) if isinstance(ours, tuple) else ours) == theirs, field.name
    assert config.vision is not None
    for field in fields(VisionConfig):
        if field.name != "rope_theta":
            theirs = getattr(oracle.vision_config, field.name)
            assert getattr(config.vision, field.name) == theirs, field.name
    assert config.vision.rope_theta == oracle.vision_config.rope_parameters["rope_theta"]
    assert config.token_ids is not None
    for field in fields(TokenIds):
        theirs = getattr(oracle, f"{field.name}_token_id")
        assert getattr(config.token_ids, field.name) == theirs, field.name


@pytest.mark.parametrize(
    ("name", "size", "sha"),
    [
        ("glm-5.3-flash.config.json", 69_416, "bb8f01c42cb92a52ca72e65afb4d5bd8d11aef08"),
        ("glm-5.3-flash.generation_config.json", 194, "230c30609ecbbb9e6583bedde8e7bdda0c6eb8fe"),
        ("glm-5.3.config.json", 29_464, ""),
    ],
)
def test_shipped_files_are_the_released_ones(name: str, size: int, sha: str) -> None:
    assert len(data(name)) == size
    assert hashlib.sha256(data(name)).hexdigest().startswith(sha)


def test_released_flash_config() -> None:
    config = shipped("glm-5.3-flash")
    assert isinstance(config, ModelConfig)
    text = config.text
    sparse = [i for i, kind in enumerate(text.layer_types) if kind == "sparse_attention"]
    assert sparse == list(range(3, 44, 4))
    assert text.layer_types.count(LINEAR) == 34
    assert (text.index_kpool, text.index_topk, text.n_routed_experts) == (4, 2048, 288)
    assert (text.dtype, text.eos_token_id) == ("bfloat16", (154820, 154827, 154829))
    assert (text.linear_num_heads, text.linear_head_dim, text.linear_lower_bound) == (64, 128, -5)
    assert text.index_share_for_mtp_iteration
    assert config.token_ids == TokenIds(154854, 154855, 154830, 154831, 154832, 154833)
    assert config.vision is not None
    assert config.vision.out_hidden_size == 4096
    assert config.quantization is not None
    assert len(config.quantization.modules_to_not_convert) == 1509


def test_released_flash_config_is_what_transformers_reads() -> None:
    config = shipped("glm-5.3-flash")
    assert isinstance(config, ModelConfig)
    assert_equal_to_oracle(config, Glm5NextConfig.from_dict(released()))


def test_released_glm_5_3_config() -> None:
    config = shipped("glm-5.3")
    assert isinstance(config, GlmMoeDsaConfig)
    full = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [0, 1, 2, *range(6, 75, 4)]
    assert (config.num_hidden_layers, config.hidden_size, config.rope_theta) == (78, 6144, 8e6)
    assert (config.index_topk_freq, config.index_skip_topk_offset) == (4, 3)
    assert (config.n_routed_experts, config.q_lora_rank, config.v_head_dim) == (256, 2048, 256)


def test_bf16_release_has_no_quantization() -> None:
    values = released()
    del values["quantization_config"]
    config, fp8 = ModelConfig.from_dict(values), shipped("glm-5.3-flash")
    assert isinstance(fp8, ModelConfig)
    assert config.quantization is None
    assert (config.text, config.vision, config.token_ids) == (fp8.text, fp8.vision, fp8.token_ids)


@pytest.mark.parametrize("layers", ["KKSK", "SsKS"])
def test_files_written_by_transformers(tmp_path: Path, layers: str) -> None:
    oracle = oracle_config(layers=layers)
    oracle.save_pretrained(tmp_path)
    assert "indexed_attention" in (tmp_path / "config.json").read_text()
    assert_equal_to_oracle(ModelConfig.from_dir(tmp_path), oracle)


def test_file_of_transformers_without_the_keys_it_does_not_know() -> None:
    """Built from its own arguments it writes neither linear_attn_config nor any MTP key."""
    values = oracle_config().to_dict()
    for key in ("linear_attn_config", "num_nextn_predict_layers", "index_share_for_mtp_iteration"):
        del values["text_config"][key]
    config = ModelConfig.from_dict(values | {"dtype": "bfloat16"})
    assert (config.text.linear_num_heads, config.text.linear_head_dim) == (3, 16)
    assert config.text.num_nextn_predict_layers == 0
    assert not config.text.index_share_for_mtp_iteration


def test_flat_text_only_config(tmp_path: Path) -> None:
    oracle = oracle_config()
    oracle.text_config.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    nested = ModelConfig.from_dict(oracle.to_dict() | {"dtype": "bfloat16"})
    for model_type in ("glm5_next_text", "glm5_next"):
        flat = ModelConfig.from_dict(values | {"model_type": model_type})
        assert flat.text == nested.text
        assert (flat.vision, flat.token_ids, flat.model_type) == (None, None, model_type)
        assert ModelConfig.from_dict(flat.to_dict()) == flat


def test_all_spellings_of_sparse_layers_and_of_the_type() -> None:
    values = released()
    want = ModelConfig.from_dict(values)
    kinds = values["text_config"]["layer_types"]
    for word in ("indexed_attention", "full_attention", "sparse_attention"):
        spelled = [LINEAR if kind == LINEAR else word for kind in kinds]
        values["text_config"]["layer_types"] = spelled
        assert ModelConfig.from_dict(values) == want
    values["text_config"]["torch_dtype"] = values["text_config"].pop("dtype")
    assert ModelConfig.from_dict(values) == want


def test_written_config_is_read_back_by_us_and_by_transformers() -> None:
    config = shipped("glm-5.3-flash")
    assert isinstance(config, ModelConfig)
    written = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(written) == config
    assert_equal_to_oracle(config, Glm5NextConfig.from_dict(written))
    for key, value in released()["text_config"].items():
        assert written["text_config"].get(key, value) == value, key
    small = oracle_config(layers="SsKS", swiglu_limit=7.5)
    ours = ModelConfig.from_dict(small.to_dict() | {"dtype": "float16"})
    assert_equal_to_oracle(ours, Glm5NextConfig.from_dict(ours.to_dict()))


def test_derived_values() -> None:
    values = released()
    del values["text_config"]["num_key_value_heads"]
    values["text_config"]["linear_attn_config"]["gate_lower_bound"] = None
    values["vision_config"]["patch_size"] = [14, 14]
    values["text_config"]["eos_token_id"] = 7
    config = ModelConfig.from_dict(values)
    assert config.text.linear_lower_bound == -5.0
    assert config.text.eos_token_id == (7,)
    assert config.vision is not None
    assert config.vision.patch_size == 14


DELETE = object()
FAULTS: list[tuple[str, Any, str]] = [
    ("model_type", "llama", "model_type is 'llama'; expected 'glm5_next'"),
    ("model_type", DELETE, "model_type is missing"),
    ("model_type", "glm_moe_dsa", "not run"),
    ("model_type", ["glm5_next"], "model_type is ['glm5_next']"),
    ("text_config", [], "text_config is []; expected an object"),
    ("vision_config", 3, "vision_config is 3; expected an object"),
    ("text_config.hidden_size", DELETE, "text_config.hidden_size is missing"),
    ("text_config.hidden_size", 0, "hidden_size is 0; expected an integer >= 1"),
    ("text_config.hidden_size", -4, "hidden_size is -4"),
    ("text_config.hidden_size", True, "hidden_size is True"),
    ("text_config.hidden_size", "4096", "hidden_size is '4096'"),
    ("text_config.hidden_size", 4096.0, "hidden_size is 4096.0; expected an integer"),
    ("text_config.hidden_size", 10**400, "hidden_size is 1000"),
    ("text_config.hidden_size", None, "hidden_size is None"),
    ("text_config.hidden_size", 2048, "out_hidden_size is 4096; expected text_config.hidden_size"),
    ("text_config.num_hidden_layers", 44, "indexer_types has 45 entries; expected 44"),
    ("text_config.num_hidden_layers", 10**6, "num_hidden_layers is 1000000; expected"),
    ("text_config.n_routed_experts", 10**6, "n_routed_experts is 1000000; expected"),
    ("text_config.layer_types", DELETE, "layer_types is missing"),
    ("text_config.layer_types", [LINEAR] * 44, "layer_types has 44 entries; expected 45"),
    ("text_config.layer_types", ["mamba"] * 45, "layer_types[0] is 'mamba'; expected"),
    ("text_config.layer_types", [LINEAR] * 45, "kda_layers is [0, 1, 2, 4"),
    ("text_config.layer_types", [[1]] * 45, "layer_types[0] is [1]"),
    ("text_config.mlp_layer_types", ["sparse"] * 45, "first_k_dense_replace is 3; expected"),
    ("text_config.mlp_layer_types", "dense", "mlp_layer_types is 'dense'; expected a list"),
    ("text_config.indexer_types", DELETE, "indexer_types is missing"),
    ("text_config.indexer_types", ["shared"] * 45, "indexer_types[3] is 'shared'"),
    ("text_config.index_kpool", 3, "index_topk is 2048; expected a multiple of index_kpool (3)"),
    ("text_config.index_kpool", DELETE, "index_kpool is missing"),
    ("text_config.index_kpool_compress", False, "index_kpool_compress is False; expected True"),
    ("text_config.index_kpool_always_select_tail", 1, "always_select_tail is 1; expected true"),
    ("text_config.qk_rope_head_dim", 64, "qk_rope_head_dim is 64; expected 0"),
    ("text_config.qk_rope_head_dim", DELETE, "qk_rope_head_dim is missing"),
    ("text_config.qk_head_dim", 128, "qk_head_dim is 128; expected 256"),
    ("text_config.mla_use_nope", False, "mla_use_nope is False"),
    ("text_config.num_key_value_heads", 8, "expected num_attention_heads (64)"),
    ("text_config.q_lora_rank", None, "q_lora_rank is None"),
    ("text_config.linear_head_dim", 64, "linear_head_dim is 64; expected linear_attn_config"),
    ("text_config.linear_attn_config", DELETE, "linear_num_heads is missing"),
    ("text_config.linear_attn_config.num_heads", DELETE, "linear_num_heads is missing"),
    ("text_config.linear_attn_config.num_heads", 0, "linear_attn_config.num_heads is 0"),
    ("text_config.linear_attn_config.kda_layers", [1, 2, 3], "kda_layers is [1, 2, 3]"),
    ("text_config.linear_attn_config.gate_lower_bound", 5.0, "gate_lower_bound is 5.0"),
    ("text_config.linear_attn_config.gate_lower_bound", float("nan"), "gate_lower_bound is nan"),
    ("text_config.rms_norm_eps", 0, "rms_norm_eps is 0; expected a finite number > 0"),
    ("text_config.rms_norm_eps", float("nan"), "rms_norm_eps is nan"),
    ("text_config.rms_norm_eps", True, "rms_norm_eps is True"),
    ("text_config.hc_eps", float("inf"), "hc_eps is inf"),
    ("text_config.hc_eps", 10**400, "hc_eps is 1000"),
    ("text_config.hc_mult", DELETE, "hc_mult is missing"),
    ("text_config.mhc", False, "mhc is False; expected True"),
    ("text_config.swiglu_limit", None, "swiglu_limit is None"),
    ("text_config.scoring_func", "softmax", "scoring_func is 'softmax'; expected 'sigmoid'"),
    ("text_config.attention_bias", 0, "attention_bias is 0; expected False"),
    ("text_config.norm_topk_prob", "yes", "norm_topk_prob is 'yes'; expected true or false"),
    ("text_config.n_group", 5, "n_group is 5; expected a divisor of n_routed_experts (288)"),
    ("text_config.n_group", 288, "n_group is 288; expected at least 2"),
    ("text_config.topk_group", 2, "topk_group is 2; expected at most n_group (1)"),
    ("text_config.num_experts_per_tok", 289, "num_experts_per_tok is 289; expected at most"),
    ("text_config.num_nextn_predict_layers", 2, "num_nextn_predict_layers is 2; expected"),
    ("text_config.dtype", "int8", "dtype is 'int8'; expected 'bfloat16'"),
    ("text_config.dtype", DELETE, "text_config.dtype is missing"),
    (
        "text_config.eos_token_id",
        [154880],
        "eos_token_id is [154880]; expected token ids 0..154879",
    ),
    ("text_config.eos_token_id", [True], "eos_token_id is [True]"),
    ("text_config.eos_token_id", DELETE, "eos_token_id is missing"),
    ("text_config.pad_token_id", -1, "pad_token_id is -1"),
    ("text_config.pad_token_id", [1, 2], "pad_token_id is [1, 2]; expected one token id"),
    ("text_config.tie_word_embeddings", True, "tie_word_embeddings is False; expected"),
    ("text_config.model_type", "glm4", "text_config.model_type is 'glm4'"),
    ("image_token_id", 154880, "image_token_id is 154880; expected an integer 0..154879"),
    ("image_token_id", DELETE, "image_token_id is missing"),
    ("video_token_id", 154854, "video_token_id is 154854; expected another id than image_token"),
    ("vision_config.out_hidden_size", 1536, "expected text_config.hidden_size (4096)"),
    ("vision_config.num_heads", 3, "num_heads is 3; expected heads"),
    ("vision_config.attention_bias", False, "attention_bias is False; expected true"),
    ("vision_config.patch_size", [14, 16], "patch_size is [14, 16]; expected two equal sides"),
    ("vision_config.patch_size", [True, True], "patch_size is True"),
    ("vision_config.rope_parameters", {"rope_theta": 0}, "rope_parameters.rope_theta is 0"),
    ("vision_config.hidden_act", "gelu", "hidden_act is 'gelu'; expected 'silu'"),
    ("quantization_config.quant_method", "modelopt", "quant_method is 'modelopt'; expected 'fp8'"),
    ("quantization_config.fmt", "e5m2", "fmt is 'e5m2'; expected 'e4m3'"),
    ("quantization_config.activation_scheme", "static", "activation_scheme is 'static'"),
    ("quantization_config.weight_block_size", [64, 64], "weight_block_size is [64, 64]; expected"),
    ("quantization_config.weight_block_size", DELETE, "weight_block_size is missing"),
    ("quantization_config.modules_to_not_convert", "x", "modules_to_not_convert is 'x'"),
    ("quantization_config", "fp8", "quantization_config is 'fp8'; expected an object"),
]


def changed(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(values)
    *parents, key = path.split(".")
    place = values
    for parent in parents:
        place = place[parent]
    if value is DELETE:
        del place[key]
    else:
        place[key] = value
    return values


@pytest.mark.parametrize(("path", "value", "message"), FAULTS)
def test_a_wrong_value_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(released(), path, value), "my.json")
    assert message in str(caught.value)
    assert str(caught.value).startswith("my.json: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("model_type", "glm4_moe", "model_type is 'glm4_moe'; expected 'glm_moe_dsa'"),
        ("rope_parameters.rope_theta", -1, "rope_parameters.rope_theta is -1"),
        ("rope_parameters", DELETE, "rope_theta is missing"),
        ("index_topk_freq", 3, "expected the schedule of index_topk_freq 3"),
        ("qk_head_dim", 192, "qk_head_dim is 192; expected 256"),
        ("hidden_size", DELETE, "hidden_size is missing"),
    ],
)
def test_a_wrong_value_of_glm_5_3_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GlmMoeDsaConfig.from_dict(changed(released("glm-5.3"), path, value), "my.json")
    assert message in str(caught.value)


def test_read_config_tells_the_models_apart(tmp_path: Path) -> None:
    assert isinstance(read_config(released()), ModelConfig)
    (tmp_path / "config.json").write_bytes(data("glm-5.3.config.json"))
    for path in (tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert isinstance(read_config(path), GlmMoeDsaConfig)
    with pytest.raises(ConfigError, match="'glm5_next' or 'glm5_next_text' or 'glm_moe_dsa'"):
        read_config({"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"there are glm-5\.3-flash and glm-5\.3"):
        shipped("glm-6")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not JSON"),
        (b"", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "is not JSON"),
        (b"[1]", "found a JSON list; expected an object"),
        (b"null", "found a JSON NoneType; expected an object"),
        (b"{}", "model_type is missing"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    for read in (ModelConfig.from_dir, read_config):
        with pytest.raises(ConfigError, match=message) as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_missing_files(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for read, path, message in (
        (ModelConfig.from_dir, tmp_path / "nowhere", "does not exist"),
        (ModelConfig.from_dir, tmp_path, "holds no config.json"),
        (ModelConfig.from_dir, file, "is a file, not a directory"),
        (ModelConfig.from_file, tmp_path, "is a directory; give the config.json"),
        (ModelConfig.from_file, tmp_path / "nowhere", "there is no file"),
        (read_config, tmp_path / "nowhere", "there is no file"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


def _paths(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in values.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += _paths(value, f"{prefix}{key}.")
    return found


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(_paths(released())), value=JSON)
def test_any_value_is_read_or_refused(path: str, value: Any) -> None:
    try:
        config = ModelConfig.from_dict(changed(released(), path, value))
    except ConfigError:
        return
    assert ModelConfig.from_dict(config.to_dict()) == config
