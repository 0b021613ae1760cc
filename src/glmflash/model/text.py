"""The text model: embedding, decoder layers over mHC streams, final norm, head, and MTP drafts.

Knows one sequence at a time and the order of the parts; the parts are in their own files.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.model.kda import KimiDeltaAttention
from glmflash.model.linear import Weights
from glmflash.model.mhc import HyperConnection, collapse_streams, expand_streams
from glmflash.model.mla import Selection, SparseLatentAttention
from glmflash.model.moe import MixtureOfExperts, Mlp
from glmflash.model.mtp import MtpLayer
from glmflash.model.norm import rms_norm
from glmflash.state.layers import KdaState
from glmflash.state.sequence import LayerState, SequenceState


class DecoderLayer:
    """Attention (KDA or DSA) and a feed-forward block, each inside an mHC site."""

    def __init__(self, weights: Weights, config: TextConfig, index: int) -> None:
        self.eps = config.rms_norm_eps
        self.attention_site = HyperConnection(weights, "hc_attn", config)
        self.ffn_site = HyperConnection(weights, "hc_ffn", config)
        self.input_norm = weights.tensor("input_layernorm.weight")
        self.post_norm = weights.tensor("post_attention_layernorm.weight")
        attention = weights.at("self_attn")
        self.attention: KimiDeltaAttention | SparseLatentAttention
        if config.layer_types[index] == "linear_attention":
            self.attention = KimiDeltaAttention(attention, config)
        else:
            indexed = config.indexer_types[index] == "full"
            self.attention = SparseLatentAttention(attention, config, indexed)
        mlp = weights.at("mlp")
        self.mlp: Mlp | MixtureOfExperts
        if config.mlp_layer_types[index] == "dense":
            self.mlp = Mlp(mlp, config.swiglu_limit)
        else:
            self.mlp = MixtureOfExperts(mlp, config)

    def __call__(
        self, streams: Tensor, state: LayerState, previous: Selection | None
    ) -> tuple[Tensor, LayerState, Selection | None]:
        """Streams `[T, N, D]` to streams, with the layer's next state.

        previous: the selection of the last layer with an indexer, for a layer that shares it.
        """
        x, routing = self.attention_site.collapse(streams)
        u = rms_norm(x, self.input_norm, self.eps)
        if isinstance(self.attention, KimiDeltaAttention) and isinstance(state, KdaState):
            y, state = self.attention(u, state)
        elif isinstance(self.attention, SparseLatentAttention) and not isinstance(state, KdaState):
            own = None if self.attention.indexer else previous
            y, previous = self.attention(u, state, own)
        else:
            raise TypeError(f"{type(state).__name__} does not belong to this layer")
        streams = self.attention_site.spread(streams, y, routing)
        x, routing = self.ffn_site.collapse(streams)
        y = self.mlp(rms_norm(x, self.post_norm, self.eps))
        return self.ffn_site.spread(streams, y, routing), state, previous


class TextModel:
    """The text trunk and, where the checkpoint has it, the MTP layer.

    progress: called with the number of layers built so far (a large checkpoint takes a while).
    """

    def __init__(
        self,
        weights: Weights,
        config: TextConfig,
        mtp: bool = False,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.config, self.dtype = config, weights.dtype
        inner = weights.at("model.language_model")
        self.embedding = inner.tensor("embed_tokens.weight")
        self.layers: list[DecoderLayer] = []
        for i in range(config.num_hidden_layers):
            self.layers.append(DecoderLayer(inner.at(f"layers.{i}"), config, i))
            progress(i + 1)
        self.norm = inner.tensor("norm.weight")
        self.head_weight = (
            self.embedding if config.tie_word_embeddings else weights.tensor("lm_head.weight")
        )
        extra = inner.at(f"layers.{config.num_hidden_layers}")
        self.mtp = MtpLayer(extra, config) if mtp else None

    def new_state(self) -> SequenceState:
        """The state before the first token."""
        return SequenceState.empty(self.config, self.dtype, mtp=self.mtp is not None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Ids `[T]` to `[T, D]`."""
        return functional.embedding(token_ids, self.embedding)

    def forward(self, embeddings: Tensor, state: SequenceState) -> Tensor:
        """Read `[T, D]` embeddings of the next positions; returns hidden states `[T, D]`.

        The result is after the final norm: what the head and the MTP layer take. Advances `state`.
        """
        streams = expand_streams(embeddings, self.config.hc_mult)
        selection: Selection | None = None
        for i, layer in enumerate(self.layers):
            streams, state.layers[i], selection = layer(streams, state.layers[i], selection)
        hidden = rms_norm(collapse_streams(streams), self.norm, self.config.rms_norm_eps)
        if self.mtp and state.mtp:
            self.mtp.follow(embeddings, hidden, state.mtp)
        state.length += len(embeddings)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states `[T, D]` to fp32 logits `[T, vocab]`."""
        return functional.linear(hidden, self.head_weight).float()

    def draft(self, state: SequenceState, token: int, count: int) -> list[int]:
        """Greedy drafts of the `count` tokens after `token`, which the trunk has not read yet.

        Leaves `state` as it was: caches are cut back. Raises RuntimeError without an MTP layer.
        """
        if self.mtp is None or state.mtp is None:
            raise RuntimeError("drafting needs a model opened with mtp=True")
        sparse, hidden = state.mtp.sparse, state.mtp.waiting
        length = sparse.latents.length
        open_pool = sparse.index.open if sparse.index else None
        selection: Selection | None = None
        drafts: list[int] = []
        while len(drafts) < count:
            own = selection if self.mtp.share_selection else None
            hidden, selection = self.mtp(self.embed(torch.tensor([token])), hidden, sparse, own)
            token = int(self.head(hidden).argmax())
            drafts.append(token)
            if selection.tokens is None:  # all tokens up to the first draft's own position
                selection = Selection(torch.arange(length + 1).unsqueeze(0))
        sparse.latents.truncate(length)
        if sparse.index and open_pool is not None:
            sparse.index.pools.truncate(length // self.config.index_kpool)
            sparse.index.open = open_pool
        return drafts
