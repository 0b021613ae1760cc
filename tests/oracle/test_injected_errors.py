"""Parity must fail for every known mistake, or it would prove nothing.

The three mistakes that logits of a random model cannot show (streams summed instead of averaged,
SwiGLU without its clamp, the indexer's norm with another eps) have a test of their own, run once on
the right model and once on the wrong one.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import glmflash
from glmflash.model import kpool, moe, text

from .conftest import Zoo
from .injections import INJECTIONS, Patch
from .runs import MAX_DIFFERENCE, assert_parity, random_tokens, trusted_logits
from .tiny import Tiny, make_tiny

LENGTH = 48  # several times the index budget of 8, with every tail length


@pytest.mark.parametrize("name", INJECTIONS)
def test_parity_notices(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    specimen = zoo["base again"]
    INJECTIONS[name](monkeypatch)
    with glmflash.open(specimen.tiny.path, dtype="float32") as wrong:
        ours = wrong.logits(specimen.ids[:LENGTH])
    with pytest.raises(AssertionError):
        assert_parity(ours, specimen.expected[:LENGTH])


def run_both_ways(monkeypatch: pytest.MonkeyPatch, inject: Patch, run: Callable[[], float]) -> None:
    """`run` gives a difference to the oracle: small as things are, large with the mistake."""
    assert run() <= MAX_DIFFERENCE
    inject(monkeypatch)
    assert run() > MAX_DIFFERENCE


def logit_difference(tiny: Tiny, ids: list[int]) -> Callable[[], float]:
    expected = trusted_logits(tiny.oracle, ids)

    def run() -> float:
        with glmflash.open(tiny.path, dtype="float32") as engine:
            return float(abs(engine.logits(ids) - expected).max())

    return run


def test_streams_are_averaged(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final norm hides the size of its input from the logits; look at the input itself."""
    specimen = zoo["base"]
    ids = specimen.ids[:LENGTH]
    theirs: list[Tensor] = []
    norm = specimen.tiny.oracle.model.language_model.norm
    handle = norm.register_forward_pre_hook(lambda _, inputs: theirs.append(inputs[0][0]))
    with torch.no_grad():
        specimen.tiny.oracle(input_ids=torch.tensor([ids]), use_cache=False)
    handle.remove()

    right, ours = text.rms_norm, []

    def watch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ours.append(x)  # the last call of a pass is the final norm
        return right(x, weight, eps)

    monkeypatch.setattr(text, "rms_norm", watch)

    def run() -> float:
        specimen.engine.logits(ids)
        return float((ours[-1] - theirs[0]).abs().max())

    def inject(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(text, "collapse_streams", lambda streams: streams.sum(1))

    run_both_ways(monkeypatch, inject, run)


@pytest.mark.parametrize("mlp", ["mlp.gate_proj", "mlp.up_proj", "gate_up_proj", "shared_experts"])
def test_swiglu_is_clamped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlp: str) -> None:
    """Gate and up weights 50 times as large, so that the clamps bind: dense layer (gate, then up),
    routed experts, shared expert. Experts in the last layer only: earlier ones would amplify the
    oracle's own rounding beyond use."""

    def enlarge(model: torch.nn.Module) -> None:
        for name, value in model.named_parameters():
            last = "experts" not in name or "layers.3." in name
            if mlp in name and last and "down" not in name and "visual" not in name:
                value.mul_(50)

    tiny = make_tiny(tmp_path / "model", seed=1, amend=enlarge)

    def inject(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(moe, "clamped_swiglu", lambda g, u, _: torch.nn.functional.silu(g) * u)

    run_both_ways(monkeypatch, inject, logit_difference(tiny, random_tokens(LENGTH, 1)))


def test_gate_is_clamped_above_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate far below zero is let through: SiLU(-100) is 0, SiLU(-limit) is not where the limit
    is small."""
    tiny = make_tiny(tmp_path / "model", seed=0, text={"swiglu_limit": 0.5})

    def both_sides(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        return torch.nn.functional.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit)

    def inject(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(moe, "clamped_swiglu", both_sides)

    run_both_ways(monkeypatch, inject, logit_difference(tiny, random_tokens(LENGTH, 0)))


def test_indexer_norm_eps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Index keys that hardly vary (variance about 1e-6, like the eps) tell 1e-6 from 1e-5."""

    def flatten_keys(model: torch.nn.Module) -> None:
        for name, value in model.named_parameters():
            if name.endswith("indexer.wk.weight"):
                value.mul_(1e-3)

    tiny = make_tiny(tmp_path / "model", seed=1, amend=flatten_keys)

    def inject(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(kpool, "K_NORM_EPS", 1e-5)

    run_both_ways(monkeypatch, inject, logit_difference(tiny, random_tokens(LENGTH, 0)))
