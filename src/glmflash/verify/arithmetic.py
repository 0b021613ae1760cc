"""What a checkpoint weighs and what a running sequence costs: pure arithmetic.

Knows: how parameters, stored bytes, active parameters, caches and fixed states follow from a config
and a list of tensors. Does not know where the list came from (the table of expected tensors or the
headers of real files), so both can be counted by the same rules and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from glmflash.config import GlmMoeDsaConfig, ModelConfig
from glmflash.weights.headers import ITEM_BITS
from glmflash.weights.table import COMPONENTS, FP8, SCALE_SUFFIX, TensorSpec

Config = ModelConfig | GlmMoeDsaConfig

LENGTHS = (4096, 131_072, 1_048_576)  # tokens at which totals are given
SCALE_BLOCK = 128  # values that share one fp32 scale in an FP8 cache


@dataclass(frozen=True)
class Counts:
    """Sums over stored tensors. Parameters exclude FP8 scales; bytes and tensors include them."""

    tensors: int
    parameters: dict[str, int]
    bytes_by_component: dict[str, int]
    bytes_by_dtype: dict[str, int]
    tensors_by_dtype: dict[str, int]
    scale_bytes: int

    @property
    def total(self) -> int:
        return sum(self.parameters.values())

    @property
    def trunk(self) -> int:
        """Text model without MTP layer and vision tower, embedding and head included."""
        return self.total - self.mtp - self.vision

    @property
    def mtp(self) -> int:
        return self.parameters.get("mtp", 0)

    @property
    def vision(self) -> int:
        return self.parameters.get("vision", 0)

    @property
    def bytes(self) -> int:
        return sum(self.bytes_by_dtype.values())

    @property
    def bytes_in_bf16(self) -> int:
        """Bytes of the same model with every FP8 weight stored in bf16, its scales gone."""
        return self.bytes + self.bytes_by_dtype.get(FP8, 0) - self.scale_bytes


def count(tensors: Iterable[TensorSpec]) -> Counts:
    """Add up stored tensors. Components keep the order of COMPONENTS, guesses follow."""
    # Tens of thousands of expert tensors are alike: sort them into kinds first.
    kinds = Counter(
        (spec.component, spec.dtype, spec.shape, spec.name.endswith(SCALE_SUFFIX))
        for spec in tensors
    )
    parameters: Counter[str] = Counter()
    component_bytes: Counter[str] = Counter()
    dtype_bytes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    scale_bytes = 0
    for (component, dtype, shape, scale), times in kinds.items():
        elements = times * prod(shape)
        nbytes = elements * ITEM_BITS[dtype] // 8
        if scale:
            scale_bytes += nbytes
        else:
            parameters[component] += elements
        component_bytes[component] += nbytes
        dtype_bytes[dtype] += nbytes
        dtypes[dtype] += times
    order = {name: place for place, name in enumerate(COMPONENTS)}

    def ordered(counter: Counter[str]) -> dict[str, int]:
        return dict(sorted(counter.items(), key=lambda item: order.get(item[0], len(order))))

    return Counts(
        tensors=dtypes.total(),
        parameters=ordered(parameters),
        bytes_by_component=ordered(component_bytes),
        bytes_by_dtype=dict(sorted(dtype_bytes.items())),
        tensors_by_dtype=dict(sorted(dtypes.items())),
        scale_bytes=scale_bytes,
    )


@dataclass(frozen=True)
class Active:
    """Parameters that one token passes through.

    trunk: every weight of the trunk but the embedding table (one row is looked up), with
        `num_experts_per_tok` of the routed experts.
    with_embedding: the same, the whole embedding table counted.
    mtp: what the MTP layer adds per drafted token, the shared head not counted again.
    vision: the tower, which runs on patches of media, not on text tokens.
    """

    trunk: int
    with_embedding: int
    mtp: int
    vision: int

    @property
    def everything(self) -> int:
        return self.with_embedding + self.mtp + self.vision


def active(config: Config, counts: Counts) -> Active:
    """Active parameters per token; source: the mixture-of-experts keys of the config."""
    text = config.text if isinstance(config, ModelConfig) else config
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    idle = (text.n_routed_experts - text.num_experts_per_tok) * expert
    sparse = text.mlp_layer_types.count("sparse")
    with_embedding = counts.trunk - sparse * idle
    mtp_idle = idle * text.num_nextn_predict_layers if counts.mtp else 0
    # A tied head multiplies by the embedding table, so the table is work for every token.
    looked_up = 0 if text.tie_word_embeddings else counts.parameters.get("embedding", 0)
    return Active(
        trunk=with_embedding - looked_up,
        with_embedding=with_embedding,
        mtp=counts.mtp - mtp_idle,
        vision=counts.vision,
    )


@dataclass(frozen=True)
class CacheShape:
    """Elements that grow with the sequence.

    latent_layers x (rank + rotary): the attention latent and, where there is one, its rotary part.
    key_layers x key_width / pool: index keys; `pool` tokens share one key (1: no pooling).
    mtp_layers: further layers of both kinds that the MTP layer adds.
    """

    latent_layers: int
    rank: int
    rotary: int
    key_layers: int
    key_width: int
    pool: int
    mtp_layers: int

    @property
    def latent_width(self) -> int:
        return self.rank + self.rotary

    def per_token(
        self, size: int, *, mtp: bool = False, scales: bool = False, pooled: bool = True
    ) -> Fraction:
        """Bytes per token.

        size: bytes of one element. mtp: count the MTP layer's caches too. scales: one fp32 scale
        per started block of 128 latent values and one per stored key. pooled: False stores every
        token's key, so that pooling only shortens the scan.
        """
        more = self.mtp_layers if mtp else 0
        latent, key = self.latent_width * size, self.key_width * size
        if scales:
            latent += 4 * -(-self.latent_width // SCALE_BLOCK)
            key += 4
        keys = Fraction((self.key_layers + more) * key, self.pool if pooled else 1)
        return (self.latent_layers + more) * latent + keys

    def formula(self, size: int, *, mtp: bool = False, pooled: bool = True) -> str:
        """How `per_token` comes about, for people."""
        more = self.mtp_layers if mtp else 0
        times = "" if size == 1 else f" x {size} B"
        width = f"({self.rank} + {self.rotary} rotary)" if self.rotary else f"{self.rank}"
        latent = f"{self.latent_layers + more} x {width}"
        keys = f"{self.key_layers + more} x {self.key_width}"
        if pooled and self.pool > 1:
            keys += f"/{self.pool}"
        total = f"{latent} latent + {keys} index key"
        return f"({total}){times}" if times else total


def cache_shape(config: Config) -> CacheShape:
    """What one token leaves behind. Layers with a shared indexer hold no keys of their own."""
    if isinstance(config, ModelConfig):
        text = config.text
        sparse = [i for i, kind in enumerate(text.layer_types) if kind == "sparse_attention"]
        return CacheShape(
            latent_layers=len(sparse),
            rank=text.kv_lora_rank,
            rotary=0,
            key_layers=sum(text.indexer_types[i] == "full" for i in sparse),
            key_width=text.index_head_dim,
            pool=text.index_kpool,
            mtp_layers=text.num_nextn_predict_layers,
        )
    return CacheShape(
        latent_layers=config.num_hidden_layers,
        rank=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        key_layers=config.indexer_types.count("full"),
        key_width=config.index_head_dim,
        pool=1,
        mtp_layers=config.num_nextn_predict_layers,
    )


@dataclass(frozen=True)
class FixedState:
    """Elements per sequence that do not grow with it.

    recurrent: KDA states [layers, heads, dim, dim]. conv: the last kernel - 1 columns of
    q, k and v.
    open_pool: index key and gate of each token of the pool being filled, per indexer.
    """

    recurrent: int
    conv: int
    open_pool: int

    def nbytes(self, recurrent_size: int) -> int:
        """Total bytes with the recurrent state in elements of `recurrent_size`, the rest bf16."""
        return self.recurrent * recurrent_size + 2 * (self.conv + self.open_pool)


def fixed_state(config: Config) -> FixedState:
    """Fixed state of one sequence, the MTP layer's own open pool not counted."""
    if not isinstance(config, ModelConfig):
        return FixedState(0, 0, 0)
    text = config.text
    layers = text.layer_types.count("linear_attention")
    heads, dim = text.linear_num_heads, text.linear_head_dim
    return FixedState(
        recurrent=layers * heads * dim * dim,
        conv=layers * 3 * heads * dim * (text.linear_conv_kernel_dim - 1),
        open_pool=cache_shape(config).key_layers * text.index_kpool * 2 * text.index_head_dim,
    )


@dataclass(frozen=True)
class Layout:
    """One way to store the growing caches: name, formula, bytes per token."""

    name: str
    formula: str
    bytes_per_token: Fraction


def layouts(config: Config, mtp: bool = True) -> list[Layout]:
    """The storage layouts worth naming, the plainest first. mtp: False if the files lack it."""
    shape = cache_shape(config)
    found = [
        Layout("fp8", shape.formula(1), shape.per_token(1)),
        Layout("bf16", shape.formula(2), shape.per_token(2)),
    ]
    if shape.mtp_layers and mtp:
        for name, size in (("fp8 with MTP", 1), ("bf16 with MTP", 2)):
            formula = shape.formula(size, mtp=True)
            found.append(Layout(name, formula, shape.per_token(size, mtp=True)))
    scaled = f"{shape.formula(1)}, 4 B per {SCALE_BLOCK} values and per key"
    found.append(Layout("fp8 with scales", scaled, shape.per_token(1, scales=True)))
    if shape.pool > 1:
        formula = f"{shape.formula(1, pooled=False)}, pooled only for the scan"
        found.append(Layout("fp8, keys not pooled", formula, shape.per_token(1, pooled=False)))
        found.append(_packed(shape))
    return found


def _packed(shape: CacheShape) -> Layout:
    """transformers keeps key, gate and a validity mark of every token beside the latent."""
    width = 2 * shape.key_width + 1
    size = 2 * (shape.latent_layers * shape.latent_width + shape.key_layers * width)
    formula = (
        f"({shape.latent_layers} x {shape.latent_width} latent + {shape.key_layers} x {width} "
        "key, gate and mark) x 2 B"
    )
    return Layout("bf16, transformers", formula, Fraction(size))


def number(value: Fraction) -> int | float:
    """An exact int where there is one: bytes per token are fractions for odd pool sizes."""
    return value.numerator if value.denominator == 1 else float(value)
