"""The text model: embedding, decoder layers over mHC streams, final norm, head, and MTP drafts.

Knows the order of the parts, for one sequence or several at once; the parts are in their own files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.kernels.linear import linear
from glmflash.kernels.mhc import mean, site
from glmflash.model.kda import KimiDeltaAttention
from glmflash.model.mhc import expand_streams, make_site, new_routing
from glmflash.model.mla import Selection, SparseLatentAttention
from glmflash.model.moe import MixtureOfExperts, Mlp
from glmflash.model.mtp import MtpLayer
from glmflash.model.weights import Weights
from glmflash.state.layers import KdaState, SparseState
from glmflash.state.sequence import LayerState, SequenceState


class DecoderLayer:
    """Attention (KDA or DSA) and a feed-forward block, each behind an mHC site."""

    def __init__(self, weights: Weights, config: TextConfig, index: int) -> None:
        self.attention_site = make_site(weights, "hc_attn", "input_layernorm.weight", config)
        self.ffn_site = make_site(weights, "hc_ffn", "post_attention_layernorm.weight", config)
        attention = weights.at("self_attn")
        self.attention: KimiDeltaAttention | SparseLatentAttention
        if config.layer_types[index] == "linear_attention":
            self.attention = KimiDeltaAttention(attention, config)
        else:
            indexed = config.indexer_types[index] == "full"
            self.attention = SparseLatentAttention(attention, config, indexed)
        dense = config.mlp_layer_types[index] == "dense"
        mlp = weights.at("mlp")
        self.mlp: Mlp | MixtureOfExperts
        self.mlp = Mlp(mlp, config) if dense else MixtureOfExperts(mlp, config)

    def __call__(
        self,
        streams: Tensor,
        routing: Tensor,
        y: Tensor | None,
        states: Sequence[LayerState],
        counts: Sequence[int],
        previous: Selection | None,
    ) -> tuple[Tensor, Selection | None]:
        """Streams `[T, N, D]` and the previous block's output to this layer's output `[T, D]`.

        The output still has to be spread over the streams by the next site; streams, routing and
        states are changed in place. counts: how many of the rows belong to each sequence, in
        order. previous: the selection of the last layer with an indexer, for one that shares it.
        """
        u = site(self.attention_site, streams, routing, y)
        if isinstance(self.attention, KimiDeltaAttention):
            y = self.attention(u, [s for s in states if isinstance(s, KdaState)], counts)
        else:
            sparse = [s for s in states if isinstance(s, SparseState)]
            own = None if self.attention.indexer else previous
            y, previous = self.attention(u, sparse, counts, own)
        return self.mlp(site(self.ffn_site, streams, routing, y)), previous


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
        tied = config.tie_word_embeddings
        head = inner.linear("embed_tokens.weight") if tied else weights.linear("lm_head.weight")
        self.head_weight = head
        extra = inner.at(f"layers.{config.num_hidden_layers}")
        self.mtp = MtpLayer(extra, config) if mtp else None

    def new_state(self) -> SequenceState:
        """The state before the first token."""
        return SequenceState.empty(self.config, self.dtype, mtp=self.mtp is not None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Ids `[T]` to `[T, D]`."""
        return functional.embedding(token_ids, self.embedding)

    def forward(self, embeddings: Tensor, *sequences: tuple[SequenceState, int]) -> Tensor:
        """Read the next positions of one or more sequences; returns hidden states `[T, D]`.

        embeddings `[T, D]`: each sequence's rows together, in the order of `sequences`, which are
        pairs of a state and its number of rows (at least 1). The result is after the final norm:
        what the head and the MTP layer take. Advances the states.
        """
        states = [state for state, _ in sequences]
        counts = [count for _, count in sequences]
        streams = expand_streams(embeddings, self.config.hc_mult)
        routing = new_routing(len(embeddings), self.config.hc_mult)
        y: Tensor | None = None
        selection: Selection | None = None
        for i, layer in enumerate(self.layers):
            layer_states = [state.layers[i] for state in states]
            y, selection = layer(streams, routing, y, layer_states, counts, selection)
        if y is None:
            raise RuntimeError("a model needs at least one layer")
        hidden = mean(streams, routing, y, self.norm, self.config.rms_norm_eps)
        parts = zip(states, embeddings.split(counts), hidden.split(counts), strict=True)
        for state, embedded, rows in parts:
            if self.mtp and state.mtp:
                self.mtp.follow(embedded, rows, state.mtp)
            state.length += len(rows)
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states `[T, D]` to fp32 logits `[T, vocab]`."""
        return linear(hidden, self.head_weight, dtype=torch.float32)

    def draft(self, state: SequenceState, token: int, count: int) -> list[int]:
        """Greedy drafts of the `count` tokens after `token`, which the trunk has not read yet.

        Leaves `state` as it was: caches are cut back. Raises RuntimeError without an MTP layer.
        """
        if self.mtp is None or state.mtp is None:
            raise RuntimeError("drafting needs a model opened with mtp=True")
        sparse, hidden = state.mtp.sparse, state.mtp.waiting
        length = sparse.latents.length
        open_pool = sparse.index.open_pool() if sparse.index else None
        selection: Selection | None = None
        drafts: list[int] = []
        while len(drafts) < count:
            own = selection if self.mtp.share_selection else None
            hidden, selection = self.mtp(self.embed(torch.tensor([token])), hidden, sparse, own)
            token = int(self.head(hidden).argmax())
            drafts.append(token)
            if selection.tokens is None:  # all tokens up to the first draft's own position
                everything = torch.arange(length + 1, dtype=torch.int32)
                selection = Selection(everything.unsqueeze(0))
        sparse.latents.truncate(length)
        if sparse.index and open_pool:
            sparse.index.reopen(length // self.config.index_kpool, open_pool)
        return drafts
