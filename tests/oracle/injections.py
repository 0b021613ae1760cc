"""Known mistakes, put into the model on purpose, to see that parity notices them.

Each function takes pytest's monkeypatch and replaces one part of the model by a wrong one. Source
of the list: the mistakes that implementers of this architecture are most likely to make.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from glmflash.model import kda, kpool, mhc, mla, moe

Patch = Callable[[pytest.MonkeyPatch], None]
INJECTIONS: dict[str, Patch] = {}


def mistake(name: str) -> Callable[[Patch], Patch]:
    def enter(patch: Patch) -> Patch:
        INJECTIONS[name] = patch
        return patch

    return enter


@mistake("stream mixing not transposed")
def _(patch: pytest.MonkeyPatch) -> None:
    right = mhc.sinkhorn
    patch.setattr(mhc, "sinkhorn", lambda *a: right(*a).transpose(1, 2))


@mistake("Sinkhorn starts with rows")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(mix: Tensor, iterations: int, eps: float) -> Tensor:
        for _ in range(iterations):
            mix = mix / (mix.sum(1, keepdim=True) + eps)
            mix = mix / (mix.sum(2, keepdim=True) + eps)
        return mix

    patch.setattr(mhc, "sinkhorn", wrong)


@mistake("10 Sinkhorn iterations")
def _(patch: pytest.MonkeyPatch) -> None:
    right = mhc.sinkhorn
    patch.setattr(mhc, "sinkhorn", lambda mix, _, eps: right(mix, 10, eps))


@mistake("post without its factor 2")
def _(patch: pytest.MonkeyPatch) -> None:
    right = mhc.HyperConnection.collapse

    def wrong(self: mhc.HyperConnection, streams: Tensor) -> tuple[Tensor, mhc.Routing]:
        x, routing = right(self, streams)
        return x, replace(routing, post=routing.post / 2)

    patch.setattr(mhc.HyperConnection, "collapse", wrong)


@mistake("mHC norm with hc_eps")
def _(patch: pytest.MonkeyPatch) -> None:
    right = mhc.HyperConnection.__init__

    def wrong(self: mhc.HyperConnection, *arguments: Any) -> None:
        right(self, *arguments)
        self.norm_eps = self.eps

    patch.setattr(mhc.HyperConnection, "__init__", wrong)


@mistake("softplus decay gate")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: kda.KimiDeltaAttention, u: Tensor) -> Tensor:
        z = self.f_b(self.f_a(u)).float().view(-1, self.heads, self.dim)
        return -self.rate * functional.softplus(z + self.dt_bias)

    patch.setattr(kda.KimiDeltaAttention, "log_decay", wrong)
    patch.setattr(kda, "delta_rule_chunked", kda.delta_rule_recurrent)  # unbounded decay


@mistake("SiLU output gate")
def _(patch: pytest.MonkeyPatch) -> None:
    right = kda.KimiDeltaAttention.gated_norm

    def wrong(self: kda.KimiDeltaAttention, out: Tensor, u: Tensor) -> Tensor:
        return right(self, out, u) * self.g_b(self.g_a(u))

    patch.setattr(kda.KimiDeltaAttention, "gated_norm", wrong)


def _patch_rule(patch: pytest.MonkeyPatch, change: Callable[..., tuple[Tensor, ...]]) -> None:
    """Change the inputs of both forms of the delta rule."""
    for name in ("delta_rule_chunked", "delta_rule_recurrent"):
        right = getattr(kda, name)
        patch.setattr(kda, name, lambda *a, right=right: right(*change(*a)))


@mistake("query not scaled")
def _(patch: pytest.MonkeyPatch) -> None:
    _patch_rule(patch, lambda q, *rest: (q * q.shape[-1] ** 0.5, *rest))


@mistake("key scaled as well")
def _(patch: pytest.MonkeyPatch) -> None:
    _patch_rule(patch, lambda q, k, *rest: (q, k * k.shape[-1] ** -0.5, *rest))


@mistake("no SiLU after the convolution")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(z: Tensor, left: Tensor, taps: Tensor) -> Tensor:
        window = torch.cat([left, z]).float()
        rows = [window[j : j + len(z)] * tap for j, tap in enumerate(taps)]
        return torch.stack(rows).sum(0).to(z.dtype)

    patch.setattr(kda, "short_convolution", wrong)


@mistake("convolution taps reversed")
def _(patch: pytest.MonkeyPatch) -> None:
    right = kda.short_convolution
    patch.setattr(kda, "short_convolution", lambda z, left, taps: right(z, left, taps.flip(0)))


@mistake("decay after the delta correction")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(q.shape[0]):
            write = beta[t].unsqueeze(-1) * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + k[t].unsqueeze(-1) * write.unsqueeze(1)
            state = g[t].exp().unsqueeze(-1) * state
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
        return torch.stack(outputs), state

    patch.setattr(kda, "delta_rule_chunked", wrong)
    patch.setattr(kda, "delta_rule_recurrent", wrong)


@mistake("L2 norm with eps 1e-5")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kda, "L2_EPS", 1e-5)


@mistake("dense instead of sparse attention")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kpool.KPoolIndexer, "select", lambda *_: None)


@mistake("no relu in the indexer")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(queries: Tensor, head_weights: Tensor, pools: Tensor) -> Tensor:
        dots = queries.float() @ pools.float().t() * queries.shape[-1] ** -0.5
        return torch.bmm(head_weights.unsqueeze(1), dots).squeeze(1)

    patch.setattr(kpool, "score_pools", wrong)


@mistake("no position bias in pools")
def _(patch: pytest.MonkeyPatch) -> None:
    right = kpool.finish_pools
    patch.setattr(kpool, "finish_pools", lambda k, g, ape: right(k, g, torch.zeros_like(ape)))


@mistake("mean pooling")
def _(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(kpool, "finish_pools", lambda keys, *_: keys.mean(1))


@mistake("no tail")
def _(patch: pytest.MonkeyPatch) -> None:
    right = kpool.KPoolIndexer.__init__

    def wrong(self: kpool.KPoolIndexer, *arguments: Any) -> None:
        right(self, *arguments)
        self.always_select_tail = False

    patch.setattr(kpool.KPoolIndexer, "__init__", wrong)


@mistake("the newest pool forced in")
def _(patch: pytest.MonkeyPatch) -> None:
    right = kpool.select_best

    def wrong(scores: Tensor, visible: Tensor, k: int) -> Tensor:
        scores = scores.clone()
        rows = (visible > 0).nonzero().squeeze(1)
        scores[rows, visible[rows] - 1] = torch.finfo(scores.dtype).max
        return right(scores, visible, k)

    patch.setattr(kpool, "select_best", wrong)


@mistake("latent keys and values in the wrong order")
def _(patch: pytest.MonkeyPatch) -> None:
    right = mla.SparseLatentAttention.__init__

    def wrong(self: mla.SparseLatentAttention, *arguments: Any) -> None:
        right(self, *arguments)
        rows = self.kv_b.flatten(0, 1)  # as if all keys came first, then all values
        keys, values = rows.split(
            [self.heads * self.key_dim, len(rows) - self.heads * self.key_dim]
        )
        parts = [part.unflatten(0, (self.heads, -1)) for part in (keys, values)]
        self.kv_b = torch.cat(parts, dim=1)

    patch.setattr(mla.SparseLatentAttention, "__init__", wrong)


@mistake("choice bias in the routing weights")
def _(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: moe.Router, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(functional.linear(x.float(), self.weight))
        chosen = self.choose(scores)
        weights = (scores + self.bias).gather(1, chosen)
        return chosen, weights / weights.sum(-1, keepdim=True) * self.scale

    patch.setattr(moe.Router, "__call__", wrong)


@mistake("no bias in the choice")
def _(patch: pytest.MonkeyPatch) -> None:
    right = moe.Router.choose
    patch.setattr(moe.Router, "choose", lambda self, scores: right(self, scores - self.bias))


@mistake("no routed scaling factor")
def _(patch: pytest.MonkeyPatch) -> None:
    right = moe.Router.__init__

    def wrong(self: moe.Router, *arguments: Any) -> None:
        right(self, *arguments)
        self.scale = 1.0

    patch.setattr(moe.Router, "__init__", wrong)
