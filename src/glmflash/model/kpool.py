"""The pooled lightning indexer: which tokens a query of a sparse layer attends to.

Every `index_kpool` tokens share one pooled key. A query scores the complete pools it can see,
keeps the best, and adds the tokens of the unfinished pool (the tail) unscored.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.model.linear import Weights
from glmflash.state.layers import PoolState

K_NORM_EPS = 1e-6
# Elements of the score tensor [queries, heads, pools] that may exist at once (64 MiB in fp32).
SCORE_ELEMENTS = 1 << 24


def finish_pools(keys: Tensor, gates: Tensor, ape: Tensor) -> Tensor:
    """Pool keys `[P, kpool, d]` by a softmax over the members, separate for every channel.

    gates `[P, kpool, d]` raw gate scores, ape `[kpool, d]` position bias. Returns `[P, d]`.
    """
    weights = (gates.float() + ape.float()).softmax(1).to(keys.dtype)
    return (weights * keys).sum(1)


def score_pools(queries: Tensor, head_weights: Tensor, pools: Tensor) -> Tensor:
    """`sum_h w_h relu(q_h . pool / sqrt(d))`, fp32 `[T, P]`.

    queries `[T, H, d]`, head_weights `[T, H]` fp32 (signed), pools `[P, d]`.
    """
    dots = torch.matmul(queries.float(), pools.float().t()) * queries.shape[-1] ** -0.5
    return torch.bmm(head_weights.unsqueeze(1), dots.relu()).squeeze(1)


def select_best(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Ascending pool ids `[T, k]` of the k best visible pools, -1 where fewer are visible.

    scores `[T, P]`, visible `[T]` counts: query t sees pools 0..visible[t]-1. Equal scores go to
    the lower pool id.
    """
    pools = torch.arange(scores.shape[1])
    seen = pools < visible.unsqueeze(1)
    scores = scores.masked_fill(~seen, float("-inf"))
    worst_kept = scores.topk(k, dim=1).values[:, -1:]
    above = scores > worst_kept
    ties = (scores == worst_kept) & seen
    room = k - above.sum(1, keepdim=True)
    kept = above | (ties & (ties.cumsum(1) <= room))
    # each kept pool goes to the column of its rank; the rest to a column that is cut off
    columns = torch.where(kept, kept.cumsum(1) - 1, k)
    out = torch.full((scores.shape[0], k + 1), -1)
    return out.scatter_(1, columns, pools.expand_as(columns))[:, :k]


class KPoolIndexer:
    """The indexer of one sparse layer."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.kpool = config.index_kpool
        self.max_pools = config.index_topk // config.index_kpool
        self.always_select_tail = config.index_kpool_always_select_tail
        self.wq_b, self.wk = weights.linear("wq_b"), weights.linear("wk")
        self.k_norm = weights.tensor("k_norm.weight"), weights.tensor("k_norm.bias")
        self.head_weights = weights.linear("weights_proj")
        self.gate = weights.tensor("index_kpool_compress_gate")
        self.ape = weights.tensor("index_kpool_compress_ape")

    def append(self, u: Tensor, state: PoolState) -> None:
        """Take in the layer input `[T, D]`: finish the pools that become complete."""
        keys = functional.layer_norm(self.wk(u), (self.dim,), *self.k_norm, eps=K_NORM_EPS)
        gates = functional.linear(u, self.gate)
        members = torch.cat([state.open, torch.stack([keys, gates], dim=1)])
        complete = len(members) // self.kpool * self.kpool
        if complete:
            done = members[:complete].view(-1, self.kpool, 2, self.dim)
            state.pools.append(finish_pools(done[:, :, 0], done[:, :, 1], self.ape))
        state.open = members[complete:]

    def select(self, u: Tensor, q_latent: Tensor, state: PoolState, start: int) -> Tensor | None:
        """Tokens that the queries at positions start.. attend to, after `append` of the same u.

        u `[T, D]`, q_latent `[T, q_lora_rank]`. Returns ascending token ids `[T, W]` with -1 for
        empty places, or None where every query attends to all tokens up to its own.
        """
        steps = u.shape[0]
        seen_tokens = torch.arange(start + 1, start + steps + 1)
        complete = seen_tokens // self.kpool
        if self.always_select_tail and int(complete[-1]) <= self.max_pools:
            return None
        queries = self.wq_b(q_latent).view(steps, self.heads, self.dim)
        head_weights = self.head_weights(u).float() * self.heads**-0.5
        pools = state.pools.view
        k = min(self.max_pools, len(pools))
        rows = max(1, SCORE_ELEMENTS // max(1, self.heads * len(pools)))
        chosen = [
            select_best(score_pools(q, w, pools), n, k)
            for q, w, n in zip(
                queries.split(rows), head_weights.split(rows), complete.split(rows), strict=True
            )
        ]
        return self._tokens(torch.cat(chosen), seen_tokens)

    def _tokens(self, pools: Tensor, seen_tokens: Tensor) -> Tensor:
        """Token ids of the chosen pools `[T, k]` and of the tail."""
        members = pools.unsqueeze(-1) * self.kpool + torch.arange(self.kpool)
        tokens = members.masked_fill(pools.unsqueeze(-1) < 0, -1).flatten(1)
        if not self.always_select_tail:
            return tokens
        seen = seen_tokens.unsqueeze(1)
        tail = seen // self.kpool * self.kpool + torch.arange(self.kpool - 1)
        return torch.cat([tokens, tail.masked_fill(tail >= seen, -1)], dim=1)
