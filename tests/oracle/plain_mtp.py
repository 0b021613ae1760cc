"""The MTP layer computed the long way, from its equations alone.

One slot at a time, every head and every expert in its own loop, no cache, nothing shared with the
package. transformers has no MTP for this model, so this file is the oracle. Source: the vendor's
layer structure as three independent engines agree on it (embedding half first in eh_proj, trunk
hidden after the final norm, plain residuals, post-norm hidden recycled).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .tiny import Tiny


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + eps)


@dataclass
class PlainMtp:
    """Slots 0..n-1, slot t holding the pair (hidden of position t, token of position t + 1)."""

    weights: dict[str, Tensor]
    text: dict[str, Any]
    latents: list[Tensor] = field(default_factory=list)
    index_keys: list[Tensor] = field(default_factory=list)
    index_gates: list[Tensor] = field(default_factory=list)
    margin: float = math.inf

    @staticmethod
    def of(tiny: Tiny) -> PlainMtp:
        """An empty layer over the fp32 tensors of a tiny checkpoint, computed in fp64."""
        prefix = f"model.language_model.layers.{tiny.text['num_hidden_layers']}."
        own = {n.removeprefix(prefix): t.double() for n, t in tiny.tensors.items() if prefix in n}
        own["embedding"] = tiny.tensors["model.language_model.embed_tokens.weight"].double()
        own["head"] = tiny.tensors["lm_head.weight"].double()
        return PlainMtp(own, tiny.text)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.weights[f"{name}.weight"], self.text["rms_norm_eps"])

    def slot(self, hidden: Tensor, token: int, chosen: list[int] | None = None) -> Tensor:
        """Add a slot; returns its normalised hidden [D]. chosen: slots to attend to; None lets
        the slot's own indexer choose, and `last_choice` then says what it chose."""
        embedding = self.norm(self.weights["embedding"][token], "enorm")
        m = self.weights["eh_proj.weight"] @ torch.cat([embedding, self.norm(hidden, "hnorm")])
        m = m + self.attention(self.norm(m, "input_layernorm"), chosen)
        m = m + self.experts(self.norm(m, "post_attention_layernorm"))
        return self.norm(m, "shared_head.norm")

    def attention(self, u: Tensor, chosen: list[int] | None) -> Tensor:
        w, text = self.weights, self.text
        q_latent = self.norm(w["self_attn.q_a_proj.weight"] @ u, "self_attn.q_a_layernorm")
        latent = w["self_attn.kv_a_proj_with_mqa.weight"] @ u
        self.latents.append(self.norm(latent, "self_attn.kv_a_layernorm"))
        self.remember_index_key(u)
        self.last_choice = self.choose(u, q_latent) if chosen is None else chosen
        heads, dk, dv = (text[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim"))
        queries = (w["self_attn.q_b_proj.weight"] @ q_latent).view(heads, dk)
        kv_b = w["self_attn.kv_b_proj.weight"].view(heads, dk + dv, -1)
        outputs = []
        for head in range(heads):
            pairs = [kv_b[head] @ self.latents[j] for j in self.last_choice]
            scores = torch.stack([queries[head] @ pair[:dk] for pair in pairs]) / math.sqrt(dk)
            shares = torch.softmax(scores, 0)
            outputs.append(sum(s * pair[dk:] for s, pair in zip(shares, pairs, strict=True)))
        return w["self_attn.o_proj.weight"] @ torch.cat(outputs)

    def remember_index_key(self, u: Tensor) -> None:
        w = self.weights
        key = w["self_attn.indexer.wk.weight"] @ u
        key = (key - key.mean()) / torch.sqrt(key.var(unbiased=False) + 1e-6)
        key = key * w["self_attn.indexer.k_norm.weight"] + w["self_attn.indexer.k_norm.bias"]
        self.index_keys.append(key)
        self.index_gates.append(w["self_attn.indexer.index_kpool_compress_gate"] @ u)

    def choose(self, u: Tensor, q_latent: Tensor) -> list[int]:
        """The slots that the newest slot attends to."""
        w, text = self.weights, self.text
        count, size = len(self.latents), text["index_kpool"]
        heads, dim = text["index_n_heads"], text["index_head_dim"]
        queries = (w["self_attn.indexer.wq_b.weight"] @ q_latent).view(heads, dim)
        head_weights = w["self_attn.indexer.weights_proj.weight"] @ u / math.sqrt(heads)
        scores = []
        for first in range(0, count - count % size, size):
            gates = torch.stack(self.index_gates[first : first + size])
            shares = torch.softmax(gates + w["self_attn.indexer.index_kpool_compress_ape"], 0)
            pool = (shares * torch.stack(self.index_keys[first : first + size])).sum(0)
            dots = torch.relu(queries @ pool / math.sqrt(dim))
            scores.append(float(head_weights @ dots))
        order = sorted(range(len(scores)), key=lambda p: -scores[p])
        keep = text["index_topk"] // size
        if len(order) > keep:
            self.margin = min(self.margin, scores[order[keep - 1]] - scores[order[keep]])
        tokens = [p * size + j for p in sorted(order[:keep]) for j in range(size)]
        return tokens + list(range(count - count % size, count))

    def experts(self, x: Tensor) -> Tensor:
        w, text = self.weights, self.text
        scores = torch.sigmoid(w["mlp.gate.weight"] @ x)
        biased = scores + w["mlp.gate.e_score_correction_bias"]
        order = biased.argsort(descending=True).tolist()
        keep = text["num_experts_per_tok"]
        self.margin = min(self.margin, float(biased[order[keep - 1]] - biased[order[keep]]))
        total = sum(scores[e] for e in order[:keep])
        y = self.mlp(x, "mlp.shared_experts")
        for e in order[:keep]:
            share = scores[e] / total * text["routed_scaling_factor"]
            y = y + share * self.mlp(x, f"mlp.experts.{e}")
        return y

    def mlp(self, x: Tensor, name: str) -> Tensor:
        limit = self.text["swiglu_limit"]
        gate = (self.weights[f"{name}.gate_proj.weight"] @ x).clamp(max=limit)
        up = (self.weights[f"{name}.up_proj.weight"] @ x).clamp(-limit, limit)
        return self.weights[f"{name}.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def draft(
        self, hidden: Tensor, ids: list[int], after: int, count: int, share: bool
    ) -> list[int]:
        """Greedy drafts of the `count` tokens after `after`, the token at position len(ids).

        hidden [len(ids), D] of the trunk. share: drafts from the second on attend to the slots
        that the first one chose.
        """
        for t, token in enumerate(ids[1:]):
            self.slot(hidden[t], token)
        token, carried, chosen, drafts = after, hidden[len(ids) - 1], None, []
        for _ in range(count):
            carried = self.slot(carried, token, chosen)
            chosen = self.last_choice if share else None
            logits = self.weights["head"] @ carried
            best = logits.topk(2).values
            self.margin = min(self.margin, float(best[0] - best[1]))
            token = int(logits.argmax())
            drafts.append(token)
        return drafts
