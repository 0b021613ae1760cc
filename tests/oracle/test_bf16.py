"""bf16, layer by layer with teacher-forced inputs.

Whole bf16 models cannot be compared: one expert or pool chosen differently moves logits by several
standard deviations. So each of our layers gets the very bf16 input that the same layer of
transformers got, and its output is compared with theirs and with the truth, the fp32 layer on that
input. Errors are ‖difference‖ / ‖truth‖ of a token's streams; a token where a choice flipped stands
out by far, so medians bound the arithmetic and a share bounds the flips. Bounds and measured
numbers: docs/numerics.md, section bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.glm5_next import Glm5NextForConditionalGeneration

import glmflash

from .runs import random_tokens
from .tiny import Tiny, make_tiny

TEXT = {
    "layers": "KSKSKS",
    "dense": 2,
    "hidden_size": 128,
    "linear_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "index_topk": 16,
}
LENGTH = 160
# Median token error, our layer against fp32 and against transformers. The first layer's streams are
# the small embeddings, so the rounding inside its blocks weighs full.
MEDIAN_TO_TRUTH = [0.015] + [0.006] * 5
MEDIAN_TO_THEIRS = [0.012] + [0.008] * 5
RATIO = 1.1  # largest ratio of our median error to transformers'
FLIP = 0.05  # a token error above this means that a choice flipped
FLIPPED_SHARE = 0.06  # largest share of such tokens, in one layer


@dataclass(frozen=True)
class LayerRun:
    """Token errors [T] of one layer on the same bf16 input."""

    ours: Tensor
    theirs: Tensor
    between: Tensor


def errors(a: Tensor, b: Tensor, truth: Tensor) -> Tensor:
    """‖a - b‖ / ‖truth‖ per token, over streams and channels."""
    return (a.float() - b.float()).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)


def layer_inputs_and_outputs(
    model: Glm5NextForConditionalGeneration, ids: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Streams [1, T, N, D] into and out of every decoder layer, and into the final norm."""
    seen: list[tuple[Tensor, Tensor]] = []
    trunk = model.model.language_model
    handles = [
        layer.register_forward_hook(lambda _, inputs, out: seen.append((inputs[0], out[0])))
        for layer in trunk.layers
    ]
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("bf16") / "model"
    return make_tiny(directory, seed=3, text=TEXT, storage="bf16")


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[glmflash.Engine]:
    with glmflash.open(tiny.path, dtype="bfloat16") as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tiny: Tiny, engine: glmflash.Engine) -> list[LayerRun]:
    half = Glm5NextForConditionalGeneration.from_pretrained(tiny.path, dtype=torch.bfloat16).eval()
    ids = random_tokens(LENGTH, 3)
    visible = torch.ones(1, LENGTH, dtype=torch.bool)
    states = engine.model.new_state().layers
    results = []
    for i, (streams, theirs) in enumerate(layer_inputs_and_outputs(half, ids)):
        with torch.inference_mode():
            ours, _, _ = engine.model.layers[i](streams[0], states[i], None)
        with torch.no_grad():
            layer = tiny.oracle.model.language_model.layers[i]
            truth, _ = layer(streams.float(), attention_mask=visible)
        assert ours.dtype == theirs.dtype == torch.bfloat16
        results.append(
            LayerRun(
                ours=errors(ours, truth[0], truth[0]),
                theirs=errors(theirs[0], truth[0], truth[0]),
                between=errors(ours, theirs[0], truth[0]),
            )
        )
    return results


@pytest.mark.parametrize("layer", range(len(TEXT["layers"])))
def test_layer(runs: list[LayerRun], layer: int) -> None:
    run = runs[layer]
    assert run.ours.median() <= MEDIAN_TO_TRUTH[layer]
    assert run.ours.median() <= RATIO * run.theirs.median()
    assert run.between.median() <= MEDIAN_TO_THEIRS[layer]
    assert (run.ours > FLIP).float().mean() <= FLIPPED_SHARE


def test_final_norm_and_head(tiny: Tiny, engine: glmflash.Engine) -> None:
    """bf16 hidden states through our head, against the fp32 product of the same values."""
    hidden = torch.randn(9, TEXT["hidden_size"], generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(torch.bfloat16)
    with torch.inference_mode():
        ours = engine.model.head(hidden)
    truth = hidden.float() @ tiny.tensors["lm_head.weight"].float().T
    assert ours.dtype == torch.float32
    assert errors(ours, truth, truth).max() <= 2**-8


def test_whole_model_runs_in_chunks_and_steps(engine: glmflash.Engine) -> None:
    """Two ways to read in bf16: positions agree, but for the few where a choice flips."""
    ids = random_tokens(48, 3)
    whole = torch.from_numpy(engine.logits(ids))
    session, rows = engine.session(), []
    for token in ids:
        rows.append(torch.from_numpy(session.step(token)))
    apart = errors(torch.stack(rows), whole, whole)
    assert apart.median() <= 0.02
