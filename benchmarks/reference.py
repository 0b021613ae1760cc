"""The torch reference against transformers, on the same checkpoint and in the same run.

    python benchmarks/reference.py [--rounds 3]

Makes the `bench` checkpoint (12 layers, bf16) in a temporary folder, then runs transformers and
glmflash (GLMFLASH_KERNELS=reference: no compiled code of ours) in turn, each in a process of its
own: reading 512 tokens, and writing after 2,048. Also the peak memory of reading 8,192 tokens
through a session on 4 layers, and times that a person feels: `--help`, and `inspect` of the
released config. Speeds are ratios of medians over the rounds; a round whose process was often
pre-empted is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import (
    child,
    machine,
    make_checkpoint,
    peak_rss,
    random_tokens,
    save,
    timed,
)

PREFILL, CONTEXT, STEPS, LONG = 512, 2048, 16, 8192
NOISY = 100  # involuntary context switches in a second of a measurement


def measure(
    prefill: Callable[[], object], setup: Callable[[], object], step: Callable[[], object]
) -> dict[str, Any]:
    """Medians of three prefills and of single decode steps."""
    prefill()
    runs = [timed(prefill) for _ in range(3)]
    setup()
    steps = [timed(step) for _ in range(STEPS)][2:]
    return {
        "prefill_tokens_per_s": PREFILL / statistics.median(s for s, _ in runs),
        "decode_ms": 1e3 * statistics.median(s for s, _ in steps),
        "switches_per_s": max(statistics.median(n for _, n in x) for x in (runs, steps)),
        "peak_rss": peak_rss(),
    }


def run_transformers(checkpoint: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_grad_enabled(False)
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([random_tokens(CONTEXT)])
    held: dict[str, Any] = {}

    def setup() -> None:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        held.update(cache=out.cache, token=out.logits[:, -1:].argmax(-1))

    def step() -> None:
        out = model(input_ids=held["token"], use_cache=True, cache=held["cache"])
        held["token"] = out.logits[:, -1:].argmax(-1)

    return measure(
        lambda: model(input_ids=ids[:, :PREFILL], use_cache=True, logits_to_keep=1), setup, step
    )


def run_glmflash(checkpoint: str) -> dict[str, Any]:
    import glmflash

    with glmflash.open(checkpoint) as engine:
        session = engine.session()

        def read(count: int) -> None:
            session.reset()
            session.sync(random_tokens(count))

        return measure(
            lambda: read(PREFILL),
            lambda: read(CONTEXT),
            lambda: session.step(int(session.logits.argmax())),
        )


def run_memory(checkpoint: str) -> dict[str, Any]:
    import glmflash

    with glmflash.open(checkpoint) as engine:
        engine.session().sync(random_tokens(8))
        loaded = peak_rss()
        engine.session().sync(random_tokens(LONG))
        weights = engine.store.nbytes
        return {
            "weights": weights,
            "rss_loaded": loaded,
            "peak_rss": peak_rss(),
            "above_weights": peak_rss() - weights,
        }


def command_seconds(*arguments: str) -> float:
    command = [str(Path(sys.executable).with_name("glmflash")), *arguments]
    runs = []
    for _ in range(9):
        start = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    quiet = [r for r in rounds if max(e["switches_per_s"] for e in r.values()) < NOISY]
    if not quiet:
        return {"rounds_used": 0}

    def median(engine: str, key: str) -> float:
        return statistics.median(r[engine][key] for r in quiet)

    speed, delay = "prefill_tokens_per_s", "decode_ms"
    return {
        "rounds_used": len(quiet),
        "prefill_512_ratio": median("glmflash", speed) / median("transformers", speed),
        "decode_2048_ratio": median("transformers", delay) / median("glmflash", delay),
        **{f"{e}_{k}": median(e, k) for e in ("transformers", "glmflash") for k in (speed, delay)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        what, checkpoint = asked.child
        print(json.dumps(globals()[f"run_{what}"](checkpoint)))
        return
    with tempfile.TemporaryDirectory() as name:
        like = ("--like", "bench", "--dtype", "bf16")
        bench = make_checkpoint(Path(name) / "bench", *like)
        rounds = []
        for number in range(1, asked.rounds + 1):
            engines = ("transformers", "glmflash")
            rounds.append(
                {e: child(__file__, "--child", e, str(bench), kernels="reference") for e in engines}
            )
            print(f"round {number}:", json.dumps(rounds[-1]), flush=True)
        short = make_checkpoint(Path(name) / "short", *like, "--layers", "4")
        memory = child(__file__, "--child", "memory", str(short), kernels="reference")
    facts = summary(rounds)
    facts["memory_8192_above_weights"] = memory["above_weights"]
    facts["help_seconds"] = command_seconds("--help")
    facts["inspect_seconds"] = command_seconds("inspect", "glm-5.3-flash")
    save("reference", {"machine": machine(), "summary": facts, "rounds": rounds, "memory": memory})


if __name__ == "__main__":
    main()
