"""Sparse multi-head latent attention (MLA without positions, DSA): one latent per token is cached.

Knows the layer's projections and norms; attention over latents, absorbed and as the equations are
written, is in `kernels/mla/reference.py`. The indexer chooses the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels.linear import linear
from glmflash.kernels.mla import Latent, mla
from glmflash.kernels.norm import rms_norm
from glmflash.model import kpool
from glmflash.model.weights import Weights
from glmflash.state.layers import SparseState


@dataclass(frozen=True)
class Selection:
    """Token ids int32 `[T, W]`, -1 = empty; or None: every token up to the query's own."""

    tokens: Tensor | None


class SparseLatentAttention:
    """One DSA layer: `[T, D]` and the sequences' states (changed in place) to `[T, D]`."""

    def __init__(self, weights: Weights, config: TextConfig, indexed: bool = True) -> None:
        self.eps = config.rms_norm_eps
        names = ["q_a_proj.weight", "kv_a_proj_with_mqa.weight"]
        self.widths = [config.q_lora_rank, config.kv_lora_rank]
        self.indexer = None
        if indexed:
            self.indexer = kpool.KPoolIndexer(weights.at("indexer"), config)
            names += [f"indexer.{name}" for name in kpool.INPUTS]
            self.widths += self.indexer.widths
        self.inputs = weights.linear(*names)
        self.q_a_norm = weights.tensor("q_a_layernorm.weight")
        self.kv_a_norm = weights.tensor("kv_a_layernorm.weight")
        self.q_b = weights.linear("q_b_proj.weight")
        self.latent = Latent(
            weights.tensor("kv_b_proj.weight"),
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.v_head_dim,
        )
        self.o = weights.linear("o_proj.weight")

    def __call__(
        self,
        u: Tensor,
        states: Sequence[SparseState],
        counts: Sequence[int],
        shared: Selection | None = None,
    ) -> tuple[Tensor, Selection]:
        """Attend with the layer's own selection, or with `shared` where one is given.

        counts: how many of the rows belong to each sequence, in order. A layer with an indexer
        takes its tokens in even when it uses another's selection.
        """
        starts = [state.latents.length for state in states]
        q_low, latent, *index = linear(u, self.inputs).split(self.widths, dim=1)
        q_latent = rms_norm(q_low, self.q_a_norm, self.eps)
        latent = rms_norm(latent, self.kv_a_norm, self.eps)
        for state, rows in zip(states, latent.split(list(counts)), strict=True):
            state.latents.append(rows)
        pools = [state.index for state in states if state.index]
        if self.indexer and pools:
            keys, gates, head_weights = index
            self.indexer.append(keys, gates, pools, counts)
            shared = shared or Selection(
                self.indexer.select(q_latent, head_weights, pools, starts, counts)
            )
        if shared is None:
            raise RuntimeError("a layer without an indexer needs the selection of an earlier one")
        q = linear(q_latent, self.q_b)
        latents = [state.latents.view for state in states]
        return linear(mla(self.latent, q, latents, starts, counts, shared.tokens), self.o), shared
