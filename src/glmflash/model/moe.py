"""Feed-forward blocks: the clamped SwiGLU, dense or as a mixture of experts with its router.

Knows where their weights are; the equations are in `kernels/moe/reference.py` and
`kernels/router/reference.py`.
"""

from __future__ import annotations

from torch import Tensor

from glmflash.config import TextConfig
from glmflash.kernels.moe import Expert, Experts, moe
from glmflash.kernels.router import Router, router
from glmflash.model.weights import Weights


def _expert(weights: Weights) -> Expert:
    gate, up, down = (weights.stored(f"{name}_proj.weight") for name in ("gate", "up", "down"))
    return gate, up, down


class Mlp:
    """`W_down clamped_swiglu(W_gate x, W_up x)`: a dense layer."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        self.experts = Experts.of(shared=_expert(weights), packed=weights.resident)
        self.limit = config.swiglu_limit

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        return moe(x, self.experts, limit=self.limit)


class MixtureOfExperts:
    """`sum_j w_j E_j(x) + shared(x)`."""

    def __init__(self, weights: Weights, config: TextConfig) -> None:
        gate = weights.at("gate")
        stored = weights.store.tensor(f"{gate.prefix}weight")
        self.router = Router(
            weight=stored.contiguous(),
            bias=gate.float("e_score_correction_bias"),
            top_k=config.num_experts_per_tok,
            groups=config.n_group,
            kept_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        routed = weights.at("experts")
        self.experts = Experts.of(
            [_expert(routed.at(str(e))) for e in range(config.n_routed_experts)],
            _expert(weights.at("shared_experts")),
            packed=weights.resident,
        )
        self.limit = config.swiglu_limit

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        ids, weights = router(x, self.router)
        return moe(x, self.experts, ids, weights, limit=self.limit)
