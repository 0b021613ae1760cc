"""The pooled indexer's choice in torch, many queries at a time: without compiled kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from glmflash.kernels.kpool.reference import score

# Elements of the score tensor [queries, heads, pools] that may exist at once (64 MiB in fp32).
SCORE_ELEMENTS = 1 << 24
_LAST = torch.iinfo(torch.int32).max  # sorts behind every token


def select(
    queries: Tensor,
    weights: Tensor,
    pools: Tensor,
    start: int,
    kpool: int,
    top_pools: int,
    tail: bool,
) -> Tensor:
    """As `reference.select`."""
    seen = torch.arange(start + 1, start + 1 + len(queries))
    k = min(top_pools, len(pools))
    rows = max(1, SCORE_ELEMENTS // max(1, weights.shape[1] * len(pools)))
    parts = zip(queries.split(rows), weights.split(rows), (seen // kpool).split(rows), strict=True)
    chosen = torch.cat([select_best(score(q, w, pools), visible, k) for q, w, visible in parts])
    members = chosen.unsqueeze(-1) * kpool + torch.arange(kpool)
    tokens = members.masked_fill(chosen.unsqueeze(-1) < 0, _LAST).flatten(1)
    if tail:
        ends = seen.unsqueeze(1) // kpool * kpool + torch.arange(kpool - 1)
        tokens = torch.cat([tokens, ends.masked_fill(ends >= seen.unsqueeze(1), _LAST)], dim=1)
    tokens = tokens.int().sort(dim=1).values
    width = kpool * top_pools + (kpool - 1 if tail else 0)
    tokens = tokens.masked_fill(tokens == _LAST, -1)
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)


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
