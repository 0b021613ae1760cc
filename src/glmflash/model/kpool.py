"""The pooled lightning indexer: which tokens a query of a sparse layer attends to.

Every `index_kpool` tokens share one pooled key. A query scores the complete pools it can see,
keeps the best, and adds the tokens of the unfinished pool (the tail) unscored. The rules are in
`kernels/kpool/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels import kpool
from glmflash.kernels.linear import linear
from glmflash.model.weights import Weights
from glmflash.state.layers import PoolState

# Projections of the layer's input that the indexer needs, by name, in this order.
INPUTS = ("wk.weight", "index_kpool_compress_gate", "weights_proj.weight")


class KPoolIndexer:
    """The indexer of one sparse layer; its projections of the layer's input come from there."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.kpool = config.index_kpool
        self.max_pools = config.index_topk // config.index_kpool
        self.tail = config.index_kpool_always_select_tail
        self.widths = [config.index_head_dim, config.index_head_dim, config.index_n_heads]
        self.wq_b = weights.linear("wq_b.weight")
        self.pooling = kpool.Pooling(
            weights.tensor("k_norm.weight"),
            weights.tensor("k_norm.bias"),
            weights.tensor("index_kpool_compress_ape"),
        )

    def append(
        self, keys: Tensor, gates: Tensor, states: Sequence[PoolState], counts: Sequence[int]
    ) -> None:
        """Take in raw keys and gate scores `[T, d]`: finish the pools that become complete."""
        rows = zip(keys.split(list(counts)), gates.split(list(counts)), states, strict=True)
        for key, gate, state in rows:
            done, state.waiting = kpool.append(
                self.pooling, key, gate, state.members, state.waiting
            )
            state.pools.append(done)

    def select(
        self,
        q_latent: Tensor,
        head_weights: Tensor,
        states: Sequence[PoolState],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Tensor | None:
        """Tokens that queries attend to, after `append` of these tokens.

        q_latent `[T, q_lora_rank]`, head_weights `[T, H]` raw; starts: position of each
        sequence's first query. Returns ascending ids int32 `[T, W]`, -1 after the last; None where
        every query attends to all up to its own.
        """
        longest = max(start + count for start, count in zip(starts, counts, strict=True))
        if self.tail and longest // self.kpool <= self.max_pools:
            return None
        return kpool.select(
            linear(q_latent, self.wq_b),
            head_weights,
            [state.pools.view for state in states],
            starts,
            counts,
            kpool=self.kpool,
            top_pools=self.max_pools,
            tail=self.tail,
        )
