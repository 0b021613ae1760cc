"""Published claims about the released model, beside the arithmetic.

Knows what is being claimed and which formula a claim seems to come from. Every number on our side
is computed from the config and the tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from glmflash.config import ModelConfig, shipped
from glmflash.verify.arithmetic import Active, Config, Counts, active, cache_shape, number

GB, GIB = 10**9, 2**30
VENDOR_RATIO = 4.4  # the vendor's "about 4.4x" less cache than GLM-5.3


@dataclass(frozen=True)
class Claim:
    """claim: what is published. arithmetic: what follows from config and tensors."""

    id: str
    claim: str
    arithmetic: str
    verdict: str


def is_release(config: Config | None) -> bool:
    """Whether this is the released model, in whichever storage."""
    released = shipped("glm-5.3-flash")
    if not isinstance(config, ModelConfig) or not isinstance(released, ModelConfig):
        return False
    return (config.text, config.vision) == (released.text, released.vision)


def claims(config: ModelConfig, counts: Counts) -> list[Claim]:
    """Claims a-f, judged. counts: of the same model."""
    return [
        _cache(config),
        _attention(config),
        _memory(counts),
        _fp8_weights(config, counts),
        _active(active(config, counts)),
        _ratio(config),
    ]


def _cache(config: ModelConfig) -> Claim:
    tokens, claimed = 1_000_000, 610.35
    found = cache_shape(config).per_token(2)
    # 610.35 GiB are 655,360 bytes a token: keys and values of the full width, 2 bytes each.
    layers = claimed * GIB / tokens / (2 * 2 * config.text.hidden_size)
    return Claim(
        "a",
        f"cache at {tokens:,} tokens in FP16: {claimed} GB",
        f"{number(found):,} B/token = {float(found) * tokens / GB:.2f} GB; the claim equals full "
        f"keys and values of {config.text.hidden_size} channels in {layers:.0f} layers, in GiB",
        f"wrong, {claimed * GB / float(found) / tokens:.0f} times too much",
    )


def _attention(config: ModelConfig) -> Claim:
    kinds = config.text.layer_types
    return Claim(
        "b",
        "standard attention patterns",
        f"{kinds.count('linear_attention')} KDA layers with a state of fixed size and "
        f"{kinds.count('sparse_attention')} sparse latent-attention layers",
        "wrong",
    )


def _memory(counts: Counts) -> Claim:
    half, four_bits = counts.bytes_in_bf16 / GB, counts.total / 2 / GB
    return Claim(
        "c",
        "weights 640 GB FP16, 176 GB INT4; activations +20 %: 768 / 384 / 211.2 GB of VRAM",
        f"BF16 {half:.1f} GB, as stored {counts.bytes / GB:.1f} GB, 4 bits without scales "
        f"{four_bits:.1f} GB; 768, 384 and 211.2 are weights x 1.2",
        "weights about right; activations are no share of the weights",
    )


def _fp8_weights(config: ModelConfig, counts: Counts) -> Claim:
    stored = counts.bytes / GIB
    fp8 = config.quantization is not None
    return Claim(
        "d",
        "FP8 weights about 306 GiB; >= 350 GiB of disk, about 350 GB of RAM for KTransformers",
        f"{stored:.1f} GiB ({counts.bytes / GB:.1f} GB) as stored here",
        "right" if fp8 and round(stored) == 306 else "this copy is not the FP8 release",
    )


def _active(used: Active) -> Claim:
    return Claim(
        "e",
        "18B active",
        f"{used.trunk / GB:.2f} B without, {used.with_embedding / GB:.2f} B with the embedding "
        f"table, {used.everything / GB:.2f} B with MTP and vision",
        "right only with MTP and vision, rounded",
    )


def _ratio(config: ModelConfig) -> Claim:
    shape, larger = cache_shape(config), cache_shape(shipped("glm-5.3")).per_token(1)
    pooled, scanned = shape.per_token(1), shape.per_token(1, pooled=False)
    return Claim(
        "f",
        f"5,984 B/token in FP8, 8.0x (or 6.8x) less than GLM-5.3; vendor: about {VENDOR_RATIO}x",
        f"{number(larger):,} against {number(pooled):,} B/token: {float(larger / pooled):.1f}x; "
        f"{float(larger / scanned):.1f}x if pooling only shortened the scan",
        f"right; no cache layout known here gives {VENDOR_RATIO}x",
    )
