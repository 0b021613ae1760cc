"""The engine's face on a small checkpoint made by `glmflash checkpoint random`.

What it computes is compared with transformers in tests/oracle; here it is compared with itself
(chunks, sessions, copies, restarts), and asked for what it cannot do.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import glmflash
from glmflash import SamplingParams, errors
from glmflash.weights.presets import preset
from glmflash.weights.random import write_checkpoint

CLOSE = {"rtol": 0, "atol": 2e-4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "tiny"
    write_checkpoint(path, preset("tiny"), storage="bf16", seed=0)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint):
    with glmflash.open(checkpoint, dtype="float32", mtp=True) as engine:
        yield engine


@pytest.fixture(scope="module")
def ids(engine) -> list[int]:
    rng = np.random.default_rng(0)
    return [int(t) for t in rng.integers(0, engine.tokenizer.vocab_length - 36, 150)]


@pytest.fixture(scope="module")
def expected(engine, ids) -> np.ndarray:
    return engine.logits(ids)


def test_logits_shape_and_type(engine, ids, expected) -> None:
    assert expected.shape == (150, engine.config.text.vocab_size)
    assert expected.dtype == np.float32
    assert np.isfinite(expected).all()


@pytest.mark.parametrize("chunk", [1, 7, 64, 149])
def test_any_chunk_gives_the_same_logits(checkpoint, ids, expected, chunk) -> None:
    with glmflash.open(checkpoint, dtype="float32", prefill_chunk=chunk) as engine:
        np.testing.assert_allclose(engine.logits(ids), expected, **CLOSE)


def test_sync_reuses_a_prefix_and_rebuilds_otherwise(engine, ids, expected) -> None:
    session = engine.session()
    assert session.logits is None
    assert session.sync(ids[:40]) == 0
    np.testing.assert_allclose(session.logits, expected[39], **CLOSE)
    assert session.sync(ids[:40]) == 40
    assert session.sync(ids) == 40
    np.testing.assert_allclose(session.logits, expected[-1], **CLOSE)
    assert session.sync(ids[:10]) == 0  # a KDA state cannot be cut back
    np.testing.assert_allclose(session.logits, expected[9], **CLOSE)
    assert session.sync([]) == 0
    assert session.logits is None
    assert session.sync(ids[:10]) == 0


def test_step(engine, ids, expected) -> None:
    session = engine.session()
    for position, token in enumerate(ids[:30]):
        np.testing.assert_allclose(session.step(token), expected[position], **CLOSE)


def test_forks_are_independent(engine, ids, expected) -> None:
    session = engine.session()
    session.sync(ids[:50])
    fork = session.fork()
    for token in (3, 1, 4, 1, 5):
        fork.step(token)
    session.sync(ids[:60])
    np.testing.assert_allclose(session.logits, expected[59], **CLOSE)
    again = engine.session()
    again.sync([*ids[:50], 3, 1, 4, 1, 5])
    np.testing.assert_allclose(fork.logits, again.logits, **CLOSE)


def test_restored_session_is_bit_equal(checkpoint, engine, ids, tmp_path) -> None:
    session = engine.session()
    session.sync(ids[:53])
    session.save(tmp_path / "session")
    assert [p.name for p in tmp_path.iterdir()] == ["session"]
    with glmflash.open(checkpoint, dtype="float32", mtp=True) as fresh:
        restored = fresh.restore(tmp_path / "session")
        assert restored.tokens == ids[:53]
        assert np.array_equal(restored.logits, session.logits)
        old, new = session.state.tensors(), restored.state.tensors()
        assert old.keys() == new.keys()
        assert all(torch.equal(old[name], new[name]) for name in old)
        assert restored.sync(ids) == 53
        session.sync(ids)
        assert np.array_equal(restored.logits, session.logits)


def test_foreign_and_damaged_sessions_are_refused(checkpoint, engine, ids, tmp_path) -> None:
    path = tmp_path / "session"
    engine.session().save(path)
    with (
        glmflash.open(checkpoint, dtype="float32") as other,  # without MTP caches
        pytest.raises(errors.CheckpointError, match="another model"),
    ):
        other.restore(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(errors.CheckpointError, match="cannot be read"):
        engine.restore(path)
    with pytest.raises(errors.CheckpointError, match="cannot be read"):
        engine.restore(tmp_path / "absent")
    with pytest.raises(errors.ResourceError, match="cannot write"):
        engine.session().save(tmp_path / "no" / "such" / "folder")


def test_an_interrupted_sync_leaves_a_clean_session(engine, ids, expected) -> None:
    session = engine.session()

    def interrupt(done: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.sync(ids[:20], progress=interrupt)
    assert session.tokens == []
    session.sync(ids[:20])
    np.testing.assert_allclose(session.logits, expected[19], **CLOSE)


def test_generate_is_greedy_stepping(engine, ids) -> None:
    answer = engine.generate(ids, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    session, tokens = engine.session(), []
    session.sync(ids)
    for _ in range(12):
        tokens.append(int(session.logits[: engine.tokenizer.vocab_length].argmax()))
        session.step(tokens[-1])
    assert list(answer.token_ids) == tokens
    assert answer.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (150, 12)
    assert len(answer.logprobs) == 12
    assert max(answer.logprobs) <= 0


def test_stream_adds_up_to_generate(engine) -> None:
    params = SamplingParams(max_tokens=40, seed=5, ignore_eos=True)
    prompt = "Tell me <think>"
    whole = engine.generate(prompt, params)
    pieces = list(engine.stream(prompt, params))
    assert "".join(p.reasoning for p in pieces) == whole.reasoning
    assert "".join(p.text for p in pieces) == whole.text
    assert [t for p in pieces for t in p.token_ids] == list(whole.token_ids)
    assert whole.reasoning, "the prompt ends inside a thought"


def test_a_stop_token_ends_the_answer(engine, ids) -> None:
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    free = engine.generate(ids, params)
    engine_defaults = engine.defaults
    stop = free.token_ids[3]
    first = free.token_ids.index(stop)
    try:
        engine.defaults = type(engine_defaults)(1.0, 1.0, (stop,))
        answer = engine.generate(ids, SamplingParams(max_tokens=30, temperature=0))
    finally:
        engine.defaults = engine_defaults
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[: first + 1]


def test_messages_are_rendered_as_a_chat(engine) -> None:
    chat = [glmflash.Message(role="user", content="Hi")]
    text = "[gMASK]<sop><|system|>Reasoning Effort: Low<|user|>Hi<|assistant|><think>"
    params = SamplingParams(max_tokens=5, temperature=0, effort="low", ignore_eos=True)
    assert engine.generate(chat, params).token_ids == engine.generate(text, params).token_ids


def test_the_checkpoints_own_template_can_be_chosen(checkpoint, tmp_path) -> None:
    own = tmp_path / "own"
    shutil.copytree(checkpoint, own)
    with pytest.raises(errors.CheckpointError, match=r"chat_template\.jinja"):
        glmflash.open(own, chat_template="checkpoint")
    (own / "chat_template.jinja").write_text("[gMASK]{{ messages[0].content }}<think>")
    chat = [glmflash.Message(role="user", content="Hi <sop>")]
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    with glmflash.open(own, chat_template="checkpoint") as engine:
        encode, control = engine.tokenizer.encode_text, engine.tokenizer.control
        ids = [control("[gMASK]"), *encode("Hi <sop>"), control("<think>")]
        assert engine.generate(chat, params).token_ids == engine.generate(ids, params).token_ids


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda e: e.logits([]), errors.RequestError, "empty"),
        (lambda e: e.generate(""), errors.RequestError, "empty"),
        (lambda e: e.generate([]), errors.RequestError, "empty"),
        (lambda e: e.logits([1, -1]), errors.RequestError, "position 1 is out of range"),
        (lambda e: e.logits([10**9]), errors.RequestError, "out of range"),
        (lambda e: e.session().step(10**9), errors.RequestError, "out of range"),
        (lambda e: e.logits([1] * 10**6), errors.RequestError, "context holds"),
        (lambda e: e.generate([1] * e.config.text.max_position_embeddings), errors.RequestError,
         "context holds"),
        (lambda e: e.logits([e.config.token_ids.image]), errors.MediaError, "pass every picture"),
        (lambda e: e.session().step(e.config.token_ids.image), errors.RequestError, "placeholder"),
        (lambda e: e.session().draft(1), errors.RequestError, "at least one token"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(engine, call, error, says) -> None:
    with pytest.raises(error, match=says):
        call(engine)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [({"dtype": "int4"}, "not known"), ({"chat_template": "x"}, "not known"),
     ({"threads": 0}, "threads"), ({"prefill_chunk": 0}, "1.."),
     ({"prefil_chunk": 8}, "did you mean 'prefill_chunk'")],
)  # fmt: skip
def test_wrong_settings_are_refused(checkpoint, overrides, says) -> None:
    with pytest.raises(errors.RequestError, match=says):
        glmflash.open(checkpoint, **overrides)


def test_targets_that_are_no_checkpoint(tmp_path) -> None:
    with pytest.raises(errors.CheckpointError, match="there is no directory"):
        glmflash.open(tmp_path / "absent")
    with pytest.raises(errors.CheckpointError, match="local hub cache"):
        glmflash.open("nobody/nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(errors.CheckpointError, match="is a file"):
        glmflash.open(tmp_path / "file")
    with pytest.raises(errors.GlmflashError):
        glmflash.open(tmp_path)


def test_without_a_tokenizer_ids_still_work(checkpoint, ids, expected, tmp_path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "tokenizer.json").unlink()
    with glmflash.open(bare, dtype="float32") as engine:
        np.testing.assert_allclose(engine.logits(ids), expected, **CLOSE)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        answer = engine.generate(ids, params)
        assert answer.text == ""
        assert len(answer.token_ids) == 3
        with pytest.raises(errors.TokenizerError, match="token ids"):
            engine.generate("text")


def test_drafts_need_the_layer(checkpoint) -> None:
    with glmflash.open(checkpoint) as engine:
        session = engine.session()
        session.sync([1, 2, 3])
        with pytest.raises(errors.RequestError, match="mtp=True"):
            session.draft(2)


def test_fp8_used_at_each_call_equals_fp8_expanded(tmp_path, ids, monkeypatch) -> None:
    path = tmp_path / "fp8"
    write_checkpoint(path, preset("tiny"), storage="fp8", seed=0)
    with glmflash.open(path) as engine:
        expanded = engine.logits(ids[:40])
    monkeypatch.setattr("glmflash.engine.api.plan_memory", lambda *_: False)
    with glmflash.open(path) as engine:
        assert np.array_equal(engine.logits(ids[:40]), expanded)
