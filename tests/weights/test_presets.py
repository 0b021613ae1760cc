"""What the presets are, and that an override leaves a config that fits itself."""

import hashlib
import json

import pytest
from transformers.models.glm5_next import Glm5NextConfig

from glmflash.config import ModelConfig, shipped
from glmflash.errors import ConfigError, TokenizerError
from glmflash.weights.presets import NAMES, Overrides, Preset, preset
from glmflash.weights.synthetic_tokenizer import tokenizer_files

# Headers of a checkpoint that transformers' own model class was saved into, in the names of the
# release: tensors, bytes, SHA-256 of the sorted lines "name shape dtype".
BENCH = {
    "bf16": (
        1429, 1_526_453_472, "6b23da266d533185c6d2c93a7cd4f2bc68b111d9daacc6475e162fa210b2e8c4"
    ),
    "fp8": (
        2533, 926_945_472, "f61310236cf5f6da555517646f6759870c354ce76b28e4388714423cb05eac36"
    ),
}  # fmt: skip


@pytest.mark.parametrize("storage", BENCH)
def test_bench_is_the_benchmark_model(storage) -> None:
    specs = preset("bench").tensors(storage)
    lines = sorted(f"{s.name} {'x'.join(map(str, s.shape))} {s.dtype}" for s in specs.values())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    assert (len(specs), sum(s.nbytes for s in specs.values()), digest) == BENCH[storage]


def test_bench_has_the_values_transformers_gives_it() -> None:
    """What no shape shows. Not compared: token ids, which are those of the synthetic tokenizer,
    and what concerns the MTP layer, which transformers does not have."""
    text = {
        "vocab_size": 32768, "hidden_size": 1024, "intermediate_size": 3072,
        "moe_intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 32, "q_lora_rank": 384,
        "kv_lora_rank": 256, "index_n_heads": 8, "index_topk": 512, "index_kpool": 4,
        "linear_num_heads": 16, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "pad_token_id": 0, "eos_token_id": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 11,
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128,
        "out_hidden_size": 1024, "projection_intermediate_size": 128, "image_size": 28,
    }  # fmt: skip
    media = ("image", "video", "image_start", "image_end", "video_start", "video_end")
    ids = {f"{name}_token_id": 32767 - at for at, name in enumerate(media)}
    config = Glm5NextConfig(text_config=text, vision_config=vision, dtype="bfloat16", **ids)
    raw = config.to_dict()
    theirs, ours = ModelConfig.from_dict(raw), preset("bench").stored_config("bf16")
    unlike = {"eos_token_id", "pad_token_id", "index_share_for_mtp_iteration"}
    assert ours.vision == theirs.vision
    assert {key: value for key, value in vars(ours.text).items() if key not in unlike} == {
        key: value for key, value in vars(theirs.text).items() if key not in unlike
    }


def test_the_release_is_the_release() -> None:
    made = preset("glm-5.3-flash")
    assert made.storage == "fp8"
    assert made.stored_config("fp8") == shipped("glm-5.3-flash")  # its list of 1,509 names too
    specs = made.tensors("fp8")
    assert len(specs) == 76_108
    assert sum(s.nbytes for s in specs.values()) == 328_326_771_576


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("storage", ["fp8", "bf16", "fp32"])
def test_the_config_file_reads_back_equal(name, storage) -> None:
    config = preset(name).stored_config(storage)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert (config.quantization is not None) == (storage == "fp8")
    assert config.text.dtype == ("float32" if storage == "fp32" else "bfloat16")


@pytest.mark.parametrize("name", NAMES)
def test_token_ids_are_those_of_the_tokenizer(name) -> None:
    made = preset(name)
    text = json.loads(tokenizer_files(made.tokenizer_size, 4096)["tokenizer.json"])
    ids = {token["content"]: token["id"] for token in text["added_tokens"]}
    config = made.config
    ends = ("<|endoftext|>", "<|user|>", "<|observation|>")
    assert config.text.eos_token_id == tuple(ids[end] for end in ends)
    assert config.text.pad_token_id == ids["<|endoftext|>"]
    assert config.token_ids is not None
    assert (config.token_ids.image, config.token_ids.video) == (ids["<|image|>"], ids["<|video|>"])
    assert config.token_ids.image_start == ids["<|begin_of_image|>"]
    assert config.token_ids.image_end == ids["<|end_of_image|>"]
    assert config.token_ids.video_start == ids["<|begin_of_video|>"]
    assert config.token_ids.video_end == ids["<|end_of_video|>"]


def test_tiny_is_tiny_and_has_everything() -> None:
    made = preset("tiny")
    specs = made.tensors("bf16")
    assert sum(s.nbytes for s in specs.values()) < 4_000_000
    assert {s.component for s in specs.values()} == {
        "embedding", "head", "norms", "mhc", "kda", "mla", "indexer", "dense_mlp", "router",
        "routed_experts", "shared_experts", "mtp", "vision",
    }  # fmt: skip
    assert made.config.text.index_n_heads >= 12
    assert {
        s.dtype for s in specs.values() if s.name.endswith(("conv1d.weight", "gate.weight"))
    } == {"BF16"}


def test_slice_has_the_real_widths() -> None:
    config = preset("glm-5.3-flash", Overrides(layers=4, experts=8)).config
    released = shipped("glm-5.3-flash")
    assert isinstance(released, ModelConfig)
    text = config.text
    assert text.layer_types == ("linear_attention",) * 3 + ("sparse_attention",)
    assert text.mlp_layer_types == ("dense",) * 3 + ("sparse",)
    assert text.indexer_types == ("full",) * 4
    assert (text.hidden_size, text.n_routed_experts, text.num_nextn_predict_layers) == (4096, 8, 1)
    assert config.vision == released.vision
    assert config.token_ids == released.token_ids


@pytest.mark.parametrize("name", NAMES)
def test_layers_keep_the_pattern(name) -> None:
    usual, longer = preset(name).config.text, preset(name, Overrides(layers=60)).config.text
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        count = usual.num_hidden_layers
        assert getattr(longer, key)[:count] == getattr(usual, key)
        assert len(getattr(longer, key)) == 60
    assert [i for i, kind in enumerate(longer.layer_types) if kind == "sparse_attention"] == [
        *range(3, 60, 4)
    ]
    assert longer.mlp_layer_types.count("dense") == usual.mlp_layer_types.count("dense")


def test_other_overrides() -> None:
    made = preset("tiny", Overrides(hidden=96, vocab=1000, index_topk=16, mtp=False))
    text, vision = made.config.text, made.config.vision
    assert (text.hidden_size, text.vocab_size, text.index_topk) == (96, 1000, 16)
    assert text.num_nextn_predict_layers == 0
    assert vision is not None
    assert vision.out_hidden_size == 96
    assert text.pad_token_id == made.tokenizer_size - 36 == 1000 - 24 - 36
    without = preset("tiny", Overrides(vision=False))
    assert without.config.vision is without.config.token_ids is None
    assert not any(".visual." in name for name in without.tensors("bf16"))
    assert ModelConfig.from_dict(without.config.to_dict()) == without.config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers": 0}, "--layers is 0; give at least 1"),
        ({"layers": -3}, "--layers is -3; give at least 1"),
        ({"layers": 10**12}, "--layers is 1000000000000; give at most 10,000"),
        ({"experts": 0}, "--experts is 0; give at least 1"),
        ({"experts": 1}, "1 experts are too few: every token uses 2; give at least 2"),
        ({"experts": 10**6}, "n_routed_experts is 1000000"),
        ({"hidden": 0}, "--hidden is 0; give at least 1"),
        ({"hidden": 10**12}, "--hidden is 1000000000000; give at most"),
        ({"vocab": 315}, "--vocab is 315; give at least 316"),
        ({"index_topk": 0}, "--index-topk is 0; give at least 1"),
        ({"index_topk": 6}, r"index_topk is 6; expected a multiple of index_kpool \(4\)"),
    ],
)
def test_nonsense_is_named(overrides, message) -> None:
    with pytest.raises(ConfigError, match=message):
        preset("tiny", Overrides(**overrides))


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"no model 'benhc' .* did you mean 'bench'\?"):
        preset("benhc")
    with pytest.raises(ConfigError, match=r"give glm-5\.3-flash, tiny, bench"):
        preset("gpt")


def test_a_vocabulary_beyond_the_tokenizer_is_refused() -> None:
    made: Preset = preset("tiny", Overrides(vocab=1_000_000))
    with pytest.raises(TokenizerError, match="400,000 the most"):
        tokenizer_files(made.tokenizer_size, 4096)
