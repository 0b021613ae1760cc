"""KDA in torch, 16 tokens at a time: what runs where there are no compiled kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.kernels.kda import reference

if TYPE_CHECKING:
    from glmflash.kernels.kda import Kda, State

# Within 16 steps the log decay sums to at most 16 * 5 = 80 < ln(fp32 max) = 88.7, so the decay
# between two steps may be split into a factor for each: the longest chunk that needs no sub-blocks.
CHUNK = 16


def kda(
    layer: Kda,
    qkv: Tensor,
    decay: Tensor,
    beta: Tensor,
    gate: Tensor,
    states: Sequence[State],
    counts: Sequence[int],
) -> Tensor:
    """As `glmflash.kernels.kda.kda`."""
    return reference.kda(layer, qkv, decay, beta, gate, states, counts, rule=delta_rule)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """As `reference.delta_rule`, in chunks of 16 steps; one step is left as it is.

    With G the running sum of g inside a chunk and L_ij = sum_c k_ic k_jc exp(G_ic - G_jc), j < i:
        (I + diag(beta) L) U = diag(beta) (V - (K exp(G)) S)
        O = (Q exp(G)) S + tril(Q exp(G) (K exp(-G))ᵀ) U
        S <- diag(exp(G_last)) S + (K exp(G_last - G))ᵀ U
    Everything but S is prepared for all chunks together; only the last three lines run in turn.
    """
    steps, heads, dim = q.shape
    if steps == 1:
        return reference.delta_rule(q, k, v, g, beta, state)
    chunks = -(-steps // CHUNK)

    def split(x: Tensor) -> Tensor:  # [T, H, d] to [chunks, H, 16, d]; zero rows change nothing
        x = functional.pad(x, (0, 0, 0, 0, 0, chunks * CHUNK - steps))
        return x.view(chunks, CHUNK, heads, x.shape[-1]).transpose(1, 2)

    q, k, v, g, beta = split(q), split(k), split(v), split(g), split(beta.unsqueeze(-1))
    g = g.cumsum(2)
    last = g[:, :, -1:]
    grown = g.exp()
    q_grown, k_grown = q * grown, k * grown
    k_shrunk = (k * (-g).exp()).transpose(2, 3)
    reads = (q_grown @ k_shrunk).tril()
    lower = (k_grown @ k_shrunk).tril(-1) * beta
    # unit lower triangular: the diagonal is taken as 1
    solved = torch.linalg.solve_triangular(
        lower, torch.eye(CHUNK).expand_as(lower), upper=False, unitriangular=True
    )
    solved = solved * beta.transpose(2, 3)
    k_carried = (k * (last - g).exp()).transpose(2, 3)
    decay = last.exp().transpose(2, 3)
    both = torch.cat([k_grown, q_grown], dim=2)
    outputs = []
    for c in range(chunks):
        recalled, read = (both[c] @ state).split(CHUNK, dim=1)
        writes = solved[c] @ (v[c] - recalled)
        outputs.append(torch.baddbmm(read, reads[c], writes))
        state = torch.baddbmm(decay[c] * state, k_carried[c], writes)
    out = torch.stack(outputs).transpose(1, 2).reshape(chunks * CHUNK, heads, dim)
    return out[:steps], state
