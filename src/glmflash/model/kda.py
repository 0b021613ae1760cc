"""Kimi delta attention (KDA): linear attention with a per-channel decay and the delta rule.

Knows the layer's projections and which of them feeds what; the recurrence itself, its gates and
norms are in `kernels/kda/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels.kda import Kda, kda
from glmflash.kernels.linear import linear
from glmflash.model.weights import Weights
from glmflash.state.layers import KdaState


class KimiDeltaAttention:
    """One KDA layer: `[T, D]` and the sequences' states (changed in place) to `[T, D]`."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        channels = config.linear_num_heads * config.linear_head_dim
        names = ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
        # all of them read the layer's input; the gates never see the convolution
        self.inputs = weights.linear(*(f"{name}.weight" for name in names))
        low_rank = weights.store.tensor(f"{weights.prefix}f_a_proj.weight").shape[0]
        gate_rank = weights.store.tensor(f"{weights.prefix}g_a_proj.weight").shape[0]
        self.widths = [3 * channels, config.linear_num_heads, low_rank, gate_rank]
        self.f_b = weights.linear("f_b_proj.weight")
        self.g_b = weights.linear("g_b_proj.weight")
        self.o = weights.linear("o_proj.weight")
        taps = [weights.float(f"{n}_conv1d.weight").squeeze(1) for n in "qkv"]
        bound = config.linear_lower_bound
        self.rule = Kda(
            conv=torch.cat(taps).t().contiguous(),
            rate=weights.float("A_log").exp(),
            dt_bias=weights.float("dt_bias").flatten(),
            norm=weights.float("o_norm.weight"),
            lower_bound=bound,
            eps=config.rms_norm_eps,
        )

    def __call__(self, u: Tensor, states: Sequence[KdaState], counts: Sequence[int]) -> Tensor:
        """counts: how many of the rows belong to each sequence, in order."""
        qkv, beta, f, g = linear(u, self.inputs).split(self.widths, dim=1)
        decay, gate = linear(f, self.f_b), linear(g, self.g_b)
        pairs = [(state.conv, state.recurrent) for state in states]
        out = kda(self.rule, qkv, decay, beta, gate, pairs, counts)
        return linear(out, self.o)
