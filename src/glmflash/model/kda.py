"""Kimi delta attention (KDA): linear attention with a per-channel decay and the delta rule.

Knows the short convolution, the gates, and two forms of the recurrence (step by step, and in
chunks); does not know where its state is kept. States are never changed in place, so a copy of
a state is a copy of references.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.model.linear import Weights
from glmflash.state.layers import KdaState

# Within 16 steps the log decay sums to at most 16 * 5 = 80 < ln(fp32 max) = 88.7, so the decay
# between two steps may be split into a factor for each: the longest chunk that needs no sub-blocks.
CHUNK = 16
L2_EPS = 1e-6


def delta_rule_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is written, one step after another.

    q, k, v, g `[T, H, d]` (g is the log decay), beta `[T, H]`, state `[H, d, d]`; all fp32.
    Returns outputs `[T, H, d]` and the new state.
    """
    outputs = []
    for t in range(q.shape[0]):
        state = g[t].exp().unsqueeze(-1) * state  # decay before the correction
        recalled = torch.einsum("hkv,hk->hv", state, k[t])
        write = beta[t].unsqueeze(-1) * (v[t] - recalled)
        state = state + k[t].unsqueeze(-1) * write.unsqueeze(1)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))  # read after the write
    return torch.stack(outputs), state


def delta_rule_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same recurrence in chunks of 16 steps; arguments as `delta_rule_recurrent`.

    With G the running sum of g inside a chunk and L_ij = sum_c k_ic k_jc exp(G_ic - G_jc), j < i:
        (I + diag(beta) L) U = diag(beta) (V - (K exp(G)) S)
        O = (Q exp(G)) S + tril(Q exp(G) (K exp(-G))ᵀ) U
        S <- diag(exp(G_last)) S + (K exp(G_last - G))ᵀ U
    Everything but S is prepared for all chunks together; only the last three lines run in turn.
    """
    steps, heads, dim = q.shape
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


def short_convolution(z: Tensor, left: Tensor, taps: Tensor) -> Tensor:
    """Causal depthwise convolution and SiLU in fp32.

    z `[T, C]`, left context `[taps-1, C]`, taps `[taps, C]` (the last tap meets the current row).
    """
    window = torch.cat([left, z]).float()
    steps = z.shape[0]
    out = window[:steps] * taps[0]
    for j in range(1, len(taps)):
        out = torch.addcmul(out, window[j : j + steps], taps[j])
    return functional.silu(out).to(z.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """`x / sqrt(sum x^2 + 1e-6)` over the last axis; the epsilon is added, not a floor."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class KimiDeltaAttention:
    """One KDA layer: `[T, D]` and a state to `[T, D]` and the next state."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.heads, self.dim = config.linear_num_heads, config.linear_head_dim
        self.lower_bound = config.linear_lower_bound
        self.norm_eps = config.rms_norm_eps
        self.q, self.k, self.v = (weights.linear(f"{n}_proj") for n in "qkv")
        taps = [weights.float(f"{n}_conv1d.weight").squeeze(1) for n in "qkv"]
        self.taps = torch.cat(taps).t().contiguous()
        self.f_a, self.f_b = weights.linear("f_a_proj"), weights.linear("f_b_proj")
        self.g_a, self.g_b = weights.linear("g_a_proj"), weights.linear("g_b_proj")
        self.b = weights.linear("b_proj")
        self.rate = weights.float("A_log").exp().view(-1, 1)
        self.dt_bias = weights.float("dt_bias").view(self.heads, self.dim)
        self.o_norm = weights.float("o_norm.weight")
        self.o = weights.linear("o_proj")

    def log_decay(self, u: Tensor) -> Tensor:
        """`bound * sigmoid(exp(A_log) (f_b(f_a u) + dt_bias))`, `[T, H, d]` in (bound, 0)."""
        z = self.f_b(self.f_a(u)).float().view(-1, self.heads, self.dim)
        return self.lower_bound * torch.sigmoid(self.rate * (z + self.dt_bias))

    def gated_norm(self, out: Tensor, u: Tensor) -> Tensor:
        """RMSNorm of each head times a sigmoid gate of the layer's input, one rounding."""
        gate = self.g_b(self.g_a(u)).float().view_as(out)
        normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.norm_eps)
        return (normed * self.o_norm * torch.sigmoid(gate)).flatten(1).to(u.dtype)

    def __call__(self, u: Tensor, state: KdaState) -> tuple[Tensor, KdaState]:
        z = torch.cat([self.q(u), self.k(u), self.v(u)], dim=-1)
        mixed = short_convolution(z, state.conv, self.taps).float()
        q, k, v = (x.view(-1, self.heads, self.dim) for x in mixed.chunk(3, dim=-1))
        q = l2_normalize(q) * self.dim**-0.5
        k = l2_normalize(k)
        beta = torch.sigmoid(self.b(u)).float()
        rule = delta_rule_recurrent if u.shape[0] == 1 else delta_rule_chunked
        out, recurrent = rule(q, k, v, self.log_decay(u), beta, state.recurrent)
        conv = torch.cat([state.conv, z])[-state.conv.shape[0] :]
        # the reference rounds the recurrence's output to the compute type before the norm
        y = self.o(self.gated_norm(out.to(u.dtype).float(), u))
        return y, KdaState(conv, recurrent)
