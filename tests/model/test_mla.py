"""Latent attention: the absorbed forms against the expanded definition."""

import torch

from glmflash.model import mla


def setup(steps: int, start: int, seed: int = 0):
    rng = torch.Generator().manual_seed(seed)
    heads, dk, dv, rank = 3, 8, 5, 16
    q = torch.randn(steps, heads, dk, generator=rng)
    latents = torch.randn(start + steps, rank, generator=rng)
    kv_b = torch.randn(heads, dk + dv, rank, generator=rng)
    key_half, value_half = kv_b.split([dk, dv], dim=1)
    absorbed = torch.einsum("thd,hdr->thr", q, key_half) * dk**-0.5

    def values(attended: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thr,hvr->thv", attended, value_half)

    return q, latents, kv_b, absorbed, values


def test_causal_equals_expanded(monkeypatch) -> None:
    q, latents, kv_b, absorbed, values = setup(steps=11, start=7)
    allowed = torch.arange(18) <= torch.arange(7, 18).unsqueeze(1)
    expected = mla.attend_expanded(q, latents, kv_b, allowed)
    for elements in (1 << 24, 3 * 18 * 4, 1):  # one block, some blocks, a block per query
        monkeypatch.setattr(mla, "BLOCK_ELEMENTS", elements)
        out = values(mla.attend_causal(absorbed, latents, start=7))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_selected_equals_expanded(monkeypatch) -> None:
    q, latents, kv_b, absorbed, values = setup(steps=5, start=20)
    tokens = torch.tensor([[0, 3, 19, -1], [1, 2, 5, 8], [-1, -1, -1, -1], [24, -1, -1, -1],
                           [20, 21, 22, 23]])  # fmt: skip
    allowed = torch.zeros(5, 25, dtype=torch.bool)
    for row, chosen in enumerate(tokens.tolist()):
        allowed[row, [t for t in chosen if t >= 0]] = True
    expected = mla.attend_expanded(q, latents, kv_b, allowed)
    assert not expected[2].any(), "a query that sees nothing attends to nothing"
    for elements in (1 << 24, 1):
        monkeypatch.setattr(mla, "BLOCK_ELEMENTS", elements)
        out = values(mla.attend_selected(absorbed, latents, tokens))
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
