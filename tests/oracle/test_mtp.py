"""The MTP layer against the long computation of plain_mtp, and that drafts leave no trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import glmflash
from glmflash.model.mla import Selection, SparseState
from glmflash.model.mtp import MtpLayer
from glmflash.model.norm import rms_norm

from .plain_mtp import PlainMtp
from .runs import MAX_DIFFERENCE, one_shot, random_tokens
from .tiny import Tiny, make_tiny

Run = Callable[..., tuple[Tensor, Selection]]  # one pass of the layer

LENGTHS = [1, 2, 5, 12, 13, 31, 64, 75]
DRAFTS = 4
SAFE_MARGIN = 1e-4


def trunk_hidden(tiny: Tiny, ids: list[int]) -> torch.Tensor:
    """transformers' hidden states [T, D] after the final norm, fp32."""
    with torch.no_grad():
        output = tiny.oracle.model(input_ids=torch.tensor([ids]), use_cache=False)
    return output.last_hidden_state[0]


@pytest.fixture(scope="module", params=[True, False], ids=["shared choice", "own choices"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """One model whose later drafts reuse the first one's index set, and one where they do not."""
    made = make_tiny(
        tmp_path_factory.mktemp("mtp") / "model",
        seed=7,
        text={"index_share_for_mtp_iteration": request.param},
    )
    config = json.loads((made.path / "config.json").read_text())
    assert config["text_config"]["index_share_for_mtp_iteration"] is request.param
    return made


@pytest.fixture(scope="module")
def engine(tiny: Tiny) -> Iterator[glmflash.Engine]:
    with glmflash.open(tiny.path, dtype="float32", mtp=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return random_tokens(max(LENGTHS) + 1, 7)


def snapshot(session: glmflash.Session) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in session.state.tensors().items()}


def assert_unchanged(before: dict[str, torch.Tensor], session: glmflash.Session) -> None:
    after = session.state.tensors()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def test_layer_over_a_whole_prompt(tiny: Tiny, engine: glmflash.Engine, ids: list[int]) -> None:
    """Hidden states of all slots at once, from the trunk's hidden states as transformers has
    them."""
    hidden = trunk_hidden(tiny, ids)
    plain = PlainMtp.of(tiny)
    pairs = zip(hidden[:-1].double(), ids[1:], strict=True)
    expected = torch.stack([plain.slot(h, token) for h, token in pairs])
    assert plain.margin > SAFE_MARGIN
    layer, model = engine.model.mtp, engine.model
    with torch.inference_mode():
        state = SparseState.empty(engine.config.text, torch.float32)
        ours, _ = layer(model.embed(torch.tensor(ids[1:])), hidden[:-1], state)
        logits = model.head(ours)
    assert (ours - expected).abs().max() <= MAX_DIFFERENCE
    assert (logits - expected @ plain.weights["head"].T).abs().max() <= MAX_DIFFERENCE


@pytest.mark.parametrize("length", LENGTHS)
def test_drafts(tiny: Tiny, engine: glmflash.Engine, ids: list[int], length: int) -> None:
    """Drafts after prompts of many lengths, following the likeliest and another token."""
    prompt = ids[:length]
    hidden = trunk_hidden(tiny, prompt).double()
    likeliest = int(one_shot(tiny.oracle, prompt)[-1].argmax())
    session = engine.session()
    session.sync(prompt)
    share = tiny.text["index_share_for_mtp_iteration"]
    for after in (None, 7):
        plain = PlainMtp.of(tiny)
        token = likeliest if after is None else after
        expected = plain.draft(hidden, prompt, token, DRAFTS, share)
        assert plain.margin > SAFE_MARGIN
        assert session.draft(DRAFTS, after=after) == expected


def halves_exchanged(right: Run) -> Run:
    return lambda self, embedding, hidden, *rest: right(self, hidden, embedding, *rest)


def normalised_twice(right: Run) -> Run:
    def wrong(self: MtpLayer, *arguments: Any) -> tuple[Tensor, Selection]:
        hidden, selection = right(self, *arguments)
        return rms_norm(hidden, self.head_norm, self.eps), selection

    return wrong


def experts_left_out(right: Run) -> Run:
    def wrong(self: MtpLayer, *arguments: Any) -> tuple[Tensor, Selection]:
        mlp, self.mlp = self.mlp, torch.zeros_like
        try:
            return right(self, *arguments)
        finally:
            self.mlp = mlp

    return wrong


@pytest.mark.parametrize("mistake", [halves_exchanged, normalised_twice, experts_left_out])
def test_mistakes_change_drafts(
    tiny: Tiny,
    engine: glmflash.Engine,
    ids: list[int],
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[[Run], Run],
) -> None:
    hidden = trunk_hidden(tiny, ids[:31]).double()
    share = tiny.text["index_share_for_mtp_iteration"]
    expected = PlainMtp.of(tiny).draft(hidden, ids[:31], 7, DRAFTS, share)
    monkeypatch.setattr(MtpLayer, "__call__", mistake(MtpLayer.__call__))
    session = engine.session()
    session.sync(ids[:31])
    assert session.draft(DRAFTS, after=7) != expected


def test_sharing_the_choice_matters(tiny: Tiny, ids: list[int]) -> None:
    """The two settings draft differently here, so that the tests above can tell them apart."""
    prompt = ids[:31]
    hidden = trunk_hidden(tiny, prompt).double()
    drafts = [
        [PlainMtp.of(tiny).draft(hidden, prompt, token, DRAFTS, share) for token in range(3, 8)]
        for share in (True, False)
    ]
    assert drafts[0] != drafts[1]


@pytest.mark.parametrize("first", [1, 4, 11, 30])
def test_cache_on_equals_cache_off(engine: glmflash.Engine, ids: list[int], first: int) -> None:
    """Tokens that came in one by one, or in two parts, leave the same MTP caches as one reading."""
    prompt = ids[:40]
    whole = engine.session()
    whole.sync(prompt)
    parts = engine.session()
    parts.sync(prompt[:first])
    parts.sync(prompt[: first + 3])
    for token in prompt[first + 3 :]:
        parts.step(token)
    ours, theirs = parts.state.tensors(), whole.state.tensors()
    mtp = [name for name in ours if name.startswith("mtp")]
    assert len(mtp) == 4
    for name in mtp:
        assert ours[name].shape == theirs[name].shape
        assert torch.allclose(ours[name], theirs[name], rtol=0, atol=MAX_DIFFERENCE), name
    assert parts.draft(DRAFTS) == whole.draft(DRAFTS)


@pytest.mark.parametrize("length", [1, 3, 4, 30, 31, 32, 33])
def test_rejected_drafts_leave_no_trace(
    engine: glmflash.Engine, ids: list[int], length: int
) -> None:
    """Around every place in a pool: drafting changes no bit of the state, nor what follows."""
    session, untouched = engine.session(), engine.session()
    session.sync(ids[:length])
    untouched.sync(ids[:length])
    before = snapshot(session)
    drafts = session.draft(7)
    assert_unchanged(before, session)
    assert session.draft(7) == drafts
    for token in ids[length : length + 6]:
        session.draft(3, after=token)
        assert np.array_equal(session.step(token), untouched.step(token))
    assert_unchanged(snapshot(untouched), session)


def test_drafting_state_survives_saving(
    engine: glmflash.Engine, ids: list[int], tmp_path: Path
) -> None:
    session = engine.session()
    session.sync(ids[:33])
    session.save(tmp_path / "state")
    restored = engine.restore(tmp_path / "state")
    assert_unchanged(snapshot(session), restored)
    assert restored.draft(DRAFTS) == session.draft(DRAFTS)
    fork = session.fork()
    fork.step(ids[33])
    session.step(ids[33])
    assert fork.draft(DRAFTS) == session.draft(DRAFTS)


def test_drafting_does_not_change_the_trunk(
    tiny: Tiny, engine: glmflash.Engine, ids: list[int]
) -> None:
    with glmflash.open(tiny.path, dtype="float32") as plain:
        assert np.array_equal(plain.logits(ids), engine.logits(ids))
