"""The next-token prediction (MTP) layer: drafts tokens from the trunk's hidden state.

One sparse layer with a single residual stream. It has caches of its own: slot t belongs to the
pair (trunk hidden of position t, token of position t + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels.linear import linear
from glmflash.kernels.norm import rms_norm
from glmflash.model.mla import Selection, SparseLatentAttention
from glmflash.model.moe import MixtureOfExperts
from glmflash.model.weights import Weights
from glmflash.state.layers import MtpState, SparseState


class MtpLayer:
    """`m = W_eh [norm(e); norm(h)]`, then attention and experts with plain residuals."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.eps = config.rms_norm_eps
        self.share_selection = config.index_share_for_mtp_iteration
        self.enorm, self.hnorm = weights.tensor("enorm.weight"), weights.tensor("hnorm.weight")
        self.eh = weights.linear("eh_proj.weight")
        self.input_norm = weights.tensor("input_layernorm.weight")
        self.attention = SparseLatentAttention(weights.at("self_attn"), config)
        self.post_norm = weights.tensor("post_attention_layernorm.weight")
        self.mlp = MixtureOfExperts(weights.at("mlp"), config)
        self.head_norm = weights.tensor("shared_head.norm.weight")

    def __call__(
        self,
        embedding: Tensor,
        hidden: Tensor,
        state: SparseState,
        selection: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """Embeddings of the next tokens and hidden states, `[T, D]`, to hidden states `[T, D]`.

        The result is already normalised: it goes to the trunk's head, and back in as `hidden`.
        """
        joined = [rms_norm(embedding, self.enorm, self.eps), rms_norm(hidden, self.hnorm, self.eps)]
        m = linear(torch.cat(joined, dim=-1), self.eh)
        u = rms_norm(m, self.input_norm, self.eps)
        y, selection = self.attention(u, [state], [len(u)], selection)
        m = m + y
        m = m + self.mlp(rms_norm(m, self.post_norm, self.eps))
        return rms_norm(m, self.head_norm, self.eps), selection

    def follow(self, embeddings: Tensor, hidden: Tensor, state: MtpState) -> None:
        """Keep the caches current after the trunk read tokens: pairs each hidden with its token.

        embeddings and hidden `[T, D]` of the same new positions.
        """
        before = torch.cat([state.waiting, hidden[:-1]])
        if len(before):
            self(embeddings[-len(before) :], before, state.sparse)
        state.waiting = hidden[-1:].clone()
