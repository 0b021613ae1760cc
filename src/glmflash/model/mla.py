"""Sparse multi-head latent attention (MLA without positions, DSA): one latent per token is cached.

Knows the projections and attention over latents in two forms: expanded, as the equations are
written, and absorbed, which never forms keys or values. The indexer chooses the tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from glmflash.config import TextConfig
from glmflash.model.kpool import KPoolIndexer
from glmflash.model.linear import Weights
from glmflash.model.norm import rms_norm
from glmflash.state.layers import SparseState

# Elements of scores [heads, queries, keys] or gathered latents that may exist at once (64 MiB).
BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Selection:
    """Token ids `[T, W]`, -1 = empty; or None: every token up to the query's own position."""

    tokens: Tensor | None


def attend_expanded(q: Tensor, latents: Tensor, kv_b: Tensor, allowed: Tensor) -> Tensor:
    """Attention with keys and values written out: the definition, for tests and reading.

    q `[T, H, dk]`, latents `[n, r]`, kv_b `[H, dk + dv, r]` (keys first), allowed `[T, n]` bool.
    Returns `[T, H, dv]`; a query that may see nothing gets zeros.
    """
    keys, values = torch.einsum("hor,nr->hno", kv_b, latents).split(
        [q.shape[-1], kv_b.shape[1] - q.shape[-1]], dim=-1
    )
    scores = torch.einsum("thd,hnd->htn", q, keys).float() * q.shape[-1] ** -0.5
    return torch.einsum("htn,hnd->thd", _softmax(scores, allowed).to(values.dtype), values)


def attend_causal(q: Tensor, latents: Tensor, start: int) -> Tensor:
    """Absorbed attention of queries at positions start.. to all tokens up to their own.

    q `[T, H, r]` scaled queries already multiplied by the key half of kv_b; latents `[n, r]`.
    Returns the attended latents `[T, H, r]`.
    """
    steps, heads, rank = q.shape
    out = []
    block = max(1, BLOCK_ELEMENTS // (heads * (start + steps)))
    for first in range(0, steps, block):
        part = q[first : first + block]
        seen = latents[: start + first + len(part)]
        scores = (part.reshape(-1, rank) @ seen.t()).float().view(len(part), heads, -1)
        own = torch.arange(start + first, start + first + len(part))
        allowed = torch.arange(len(seen)) <= own.unsqueeze(1)
        weights = _softmax(scores, allowed.unsqueeze(1)).to(q.dtype)
        out.append((weights.view(-1, len(seen)) @ seen).view_as(part))
    return torch.cat(out)


def attend_selected(q: Tensor, latents: Tensor, tokens: Tensor) -> Tensor:
    """Absorbed attention of each query to its own tokens `[T, W]` (-1 = empty); see above."""
    out = []
    block = max(1, BLOCK_ELEMENTS // ((tokens.shape[1] + 1) * (q.shape[1] + q.shape[2])))
    for part, chosen in zip(q.split(block), tokens.split(block), strict=True):
        gathered = latents[chosen.clamp(min=0)]
        scores = torch.bmm(part, gathered.transpose(1, 2)).float()
        weights = _softmax(scores, (chosen >= 0).unsqueeze(1)).to(q.dtype)
        out.append(torch.bmm(weights, gathered))
    return torch.cat(out)


def _softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over allowed places; a row without any becomes zeros."""
    scores = scores.masked_fill(~allowed, float("-inf"))
    return scores.softmax(-1).masked_fill(~allowed, 0.0)


class SparseLatentAttention:
    """One DSA layer: `[T, D]` and its state (changed in place) to `[T, D]`."""

    def __init__(self, weights: Weights, config: TextConfig, indexed: bool = True) -> None:
        self.heads, self.key_dim = config.num_attention_heads, config.qk_nope_head_dim
        self.eps = config.rms_norm_eps
        self.q_a, self.q_b = weights.linear("q_a_proj"), weights.linear("q_b_proj")
        self.kv_a = weights.linear("kv_a_proj_with_mqa")
        self.q_a_norm = weights.tensor("q_a_layernorm.weight")
        self.kv_a_norm = weights.tensor("kv_a_layernorm.weight")
        kv_b = weights.tensor("kv_b_proj.weight").view(self.heads, -1, config.kv_lora_rank)
        self.kv_b = kv_b  # head-major rows: each head's keys, then its values
        self.o = weights.linear("o_proj")
        self.indexer = KPoolIndexer(weights.at("indexer"), config) if indexed else None

    def __call__(
        self, u: Tensor, state: SparseState, shared: Selection | None = None
    ) -> tuple[Tensor, Selection]:
        """Attend with the layer's own selection, or with `shared` where one is given.

        A layer with an indexer takes its tokens in even when it uses another's selection.
        """
        start = state.latents.length
        q_latent = rms_norm(self.q_a(u), self.q_a_norm, self.eps)
        q = self.q_b(q_latent).view(len(u), self.heads, self.key_dim)
        state.latents.append(rms_norm(self.kv_a(u), self.kv_a_norm, self.eps))
        if self.indexer and state.index:
            self.indexer.append(u, state.index)
            shared = shared or Selection(self.indexer.select(u, q_latent, state.index, start))
        if shared is None:
            raise RuntimeError("a layer without an indexer needs the selection of an earlier one")
        return self.o(self._attend(q, state.latents.view, shared, start)), shared

    def _attend(self, q: Tensor, latents: Tensor, selection: Selection, start: int) -> Tensor:
        key_half, value_half = self.kv_b.split(
            [self.key_dim, self.kv_b.shape[1] - self.key_dim], dim=1
        )
        q = q * self.key_dim**-0.5  # the scale of the key size, not of the latent size
        absorbed = torch.bmm(q.transpose(0, 1), key_half).transpose(0, 1)
        if selection.tokens is None:
            attended = attend_causal(absorbed, latents, start)
        else:
            attended = attend_selected(absorbed, latents, selection.tokens)
        out = torch.bmm(attended.transpose(0, 1), value_half.transpose(1, 2))
        return out.transpose(0, 1).flatten(1)
