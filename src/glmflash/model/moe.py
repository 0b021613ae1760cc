"""Feed-forward blocks: the clamped SwiGLU, dense or as a mixture of experts with its router."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from glmflash.config import TextConfig
from glmflash.model.linear import Weights


def clamped_swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`SiLU(min(gate, limit)) * clamp(up, -limit, limit)`; the gate is clamped above only."""
    return functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class Mlp:
    """`W_down clamped_swiglu(W_gate x, W_up x)`: a dense layer or one expert."""

    def __init__(self, weights: Weights, limit: float) -> None:
        self.gate, self.up = weights.linear("gate_proj"), weights.linear("up_proj")
        self.down = weights.linear("down_proj")
        self.limit = limit

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        return self.down(clamped_swiglu(self.gate(x), self.up(x), self.limit))


class Router:
    """Sigmoid router in fp32; the correction bias takes part in the choice, not in the weights."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.weight = weights.float("weight")
        self.bias = weights.float("e_score_correction_bias")
        self.top_k = config.num_experts_per_tok
        self.groups, self.kept_groups = config.n_group, config.topk_group
        self.normalize = config.norm_topk_prob
        self.scale = config.routed_scaling_factor

    def choose(self, scores: Tensor) -> Tensor:
        """Expert ids `[T, top_k]` for the raw scores `[T, E]`."""
        biased = scores + self.bias
        if self.kept_groups < self.groups:
            grouped = biased.view(len(biased), self.groups, -1)
            strength = grouped.topk(2, dim=-1).values.sum(-1)
            kept = strength.topk(self.kept_groups, dim=-1).indices
            dropped = torch.ones_like(strength, dtype=torch.bool).scatter_(1, kept, False)
            biased = grouped.masked_fill(dropped.unsqueeze(-1), float("-inf")).flatten(1)
        return biased.topk(self.top_k, dim=-1).indices

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[T, D]` to expert ids and fp32 weights, both `[T, top_k]`."""
        scores = torch.sigmoid(functional.linear(x.float(), self.weight))
        chosen = self.choose(scores)
        weights = scores.gather(1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.scale


class MixtureOfExperts:
    """`sum_j w_j E_j(x) + shared(x)`; tokens are grouped by expert, the sum is fp32."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        limit = config.swiglu_limit
        self.router = Router(weights.at("gate"), config)
        experts = weights.at("experts")
        self.experts = [Mlp(experts.at(str(e)), limit) for e in range(config.n_routed_experts)]
        self.shared = Mlp(weights.at("shared_experts"), limit) if config.n_shared_experts else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        chosen, weights = self.router(x)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=len(self.experts)).tolist()
        outputs = x.new_empty(order.shape[0], x.shape[1])
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                places = order[start : start + count]
                outputs[places] = expert(x[places // chosen.shape[1]])
                start += count
        total = torch.einsum("tk,tkd->td", weights, outputs.view(*chosen.shape, -1).float())
        if self.shared:
            total = total + self.shared(x)
        return total.to(x.dtype)
