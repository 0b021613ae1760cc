"""What a model is made of, one phrase per mechanism, so that two models can be laid side by side.

Knows which config keys describe a mechanism. Phrases of two models are equal exactly where the
mechanism carried over unchanged.
"""

from __future__ import annotations

from glmflash.config import GlmMoeDsaConfig, ModelConfig, TextConfig
from glmflash.verify.arithmetic import Config, cache_shape


def mechanisms(config: Config) -> dict[str, str | None]:
    """Name to phrase; None where the model has no such thing. Same names for every model."""
    text = config.text if isinstance(config, ModelConfig) else config
    shape = cache_shape(config)
    sparse = shape.latent_layers
    return {
        "linear attention (KDA)": _linear(text),
        "sparse latent attention": (
            f"{sparse} of {text.num_hidden_layers} layers, {text.num_attention_heads} heads, "
            f"ranks {text.q_lora_rank} and {text.kv_lora_rank}"
        ),
        "rotary positions": _rotary(text),
        "indexer": (
            f"{text.index_n_heads} heads x {text.index_head_dim}, best {text.index_topk:,} tokens"
        ),
        "indexer layers": _indexer_layers(text, shape.key_layers, sparse),
        "index key pooling": _pooling(text),
        "hyper-connections (mHC)": _streams(text),
        "width": f"{text.hidden_size:,} hidden, {text.intermediate_size:,} in dense MLPs",
        "experts": (
            f"{text.n_routed_experts}, {text.num_experts_per_tok} per token, "
            f"{text.n_shared_experts} shared, {text.moe_intermediate_size:,} wide"
        ),
        "expert layers": (
            f"{text.mlp_layer_types.count('sparse')}, after "
            f"{text.mlp_layer_types.count('dense')} dense"
        ),
        "router": (
            f"sigmoid with bias for the choice, {text.n_group} group(s), weights "
            f"{'normalised ' if text.norm_topk_prob else ''}x {text.routed_scaling_factor}"
        ),
        "SwiGLU clamp": f"{text.swiglu_limit}" if isinstance(text, TextConfig) else None,
        "MTP": _mtp(text),
        "vision": _vision(config),
        "vocabulary": f"{text.vocab_size:,} rows, ends at {list(text.eos_token_id)}",
        "context": f"{text.max_position_embeddings:,} tokens",
        "quantisation": _quantisation(config),
    }


def _linear(text: TextConfig | GlmMoeDsaConfig) -> str | None:
    if not isinstance(text, TextConfig):
        return None
    layers = text.layer_types.count("linear_attention")
    return (
        f"{layers} of {text.num_hidden_layers} layers, {text.linear_num_heads} heads with a state "
        f"of {text.linear_head_dim} x {text.linear_head_dim}"
    )


def _rotary(text: TextConfig | GlmMoeDsaConfig) -> str | None:
    if isinstance(text, TextConfig):
        return None
    return f"{text.qk_rope_head_dim} channels, rope_theta {text.rope_theta:,.0f}"


def _indexer_layers(text: TextConfig | GlmMoeDsaConfig, owners: int, sparse: int) -> str:
    mtp = text.num_nextn_predict_layers
    own = f"{owners} + {mtp} of {sparse} + {mtp} own one"
    if isinstance(text, GlmMoeDsaConfig) and text.index_topk_freq:
        own += f" (index_topk_freq {text.index_topk_freq})"
    return own


def _pooling(text: TextConfig | GlmMoeDsaConfig) -> str | None:
    if not isinstance(text, TextConfig):
        return None
    tail = ", open pool always seen" if text.index_kpool_always_select_tail else ""
    return f"{text.index_kpool} tokens share a key, learned weights{tail}"


def _streams(text: TextConfig | GlmMoeDsaConfig) -> str | None:
    if not isinstance(text, TextConfig):
        return None
    return f"{text.hc_mult} streams, {text.hc_sinkhorn_iters} Sinkhorn iterations"


def _mtp(text: TextConfig | GlmMoeDsaConfig) -> str | None:
    if not text.num_nextn_predict_layers:
        return None
    shared = "shared by all drafts" if text.index_share_for_mtp_iteration else "new for each draft"
    return f"{text.num_nextn_predict_layers} layer, index set {shared}"


def _vision(config: Config) -> str | None:
    vision = config.vision if isinstance(config, ModelConfig) else None
    if vision is None:
        return None
    return (
        f"{vision.depth} blocks of {vision.hidden_size:,}, patches of {vision.patch_size}, "
        f"{vision.spatial_merge_size} x {vision.spatial_merge_size} merged"
    )


def _quantisation(config: Config) -> str | None:
    found = config.quantization
    if found is None:
        return None
    rows, columns = found.weight_block_size
    return f"{found.quant_method} {found.fmt}, blocks of {rows} x {columns}"
