"""The native engine against transformers bf16, on the same checkpoint and in the same run.

    python benchmarks/end_to_end.py [--rounds 3] [--quick]

Makes the `bench` checkpoint (12 layers) in bf16 and FP8 and measures, each engine in a process of
its own and in turn: reading 512, 2,048 and 8,192 tokens; writing after 512, 2,048 and 8,192;
eight sequences written together after 128 tokens each; memory. transformers reads no 8,192 tokens
at once (it would need more than 14 GB): for writing after 8,192 its cache is built in chunks of
512. --quick leaves 8,192 out. A round whose process was often pre-empted is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import child, machine, make_checkpoint, peak_rss, random_tokens, save, timed

STEPS, CHUNK, BATCH, BATCH_CONTEXT = 16, 512, 8, 128
NOISY = 100  # involuntary context switches in a second of a measurement
CONTEXTS = (512, 2048, 8192)


def rates(
    read: Callable[[int], object],
    step: Callable[[], object],
    lengths: tuple[int, ...],
    read_whole: tuple[int, ...],
) -> dict[str, float]:
    """Prefill tokens/s and decode ms at each length, and the worst rate of pre-emption."""
    facts: dict[str, float] = {}
    switches = []
    read(64)
    for length in lengths:
        runs = [timed(lambda n=length: read(n)) for _ in range(3 if length <= 2048 else 1)]
        if length in read_whole:
            facts[f"prefill_{length}"] = length / statistics.median(s for s, _ in runs)
            switches += [statistics.median(n for _, n in runs)]
        steps = [timed(step) for _ in range(STEPS)][2:]
        facts[f"decode_{length}_ms"] = 1e3 * statistics.median(s for s, _ in steps)
        switches += [statistics.median(n for _, n in steps)]
    facts["switches_per_s"] = max(switches)
    return facts


def run_transformers(checkpoint: str, lengths: tuple[int, ...]) -> dict[str, float]:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_grad_enabled(False)
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    held: dict[str, Any] = {}

    def read(length: int, rows: int = 1) -> None:
        ids = torch.stack([torch.tensor(random_tokens(length, seed)) for seed in range(rows)])
        held.clear()
        for part in ids.split(length if length <= 2048 else CHUNK, dim=1):
            cache = {"cache": held["cache"]} if held else {}
            out = model(input_ids=part, use_cache=True, logits_to_keep=1, **cache)
            held.update(cache=out.cache, token=out.logits[:, -1:].argmax(-1))

    def step() -> None:
        out = model(input_ids=held["token"], use_cache=True, cache=held["cache"])
        held["token"] = out.logits[:, -1:].argmax(-1)

    facts = rates(read, step, lengths, (512, 2048))
    read(BATCH_CONTEXT, BATCH)
    runs = [timed(step)[0] for _ in range(STEPS)][2:]
    return facts | {"batch_tokens_per_s": BATCH / statistics.median(runs)}


def run_glmflash(checkpoint: str, lengths: tuple[int, ...]) -> dict[str, float]:
    import torch

    import glmflash

    with glmflash.open(checkpoint) as engine:
        session = engine.session()

        def read(length: int) -> None:
            session.reset()
            session.sync(random_tokens(length))

        facts = rates(read, lambda: session.step(int(session.logits.argmax())), lengths, lengths)
        sessions = [engine.session() for _ in range(BATCH)]
        for seed, one in enumerate(sessions):
            one.sync(random_tokens(BATCH_CONTEXT, seed))
        tokens = torch.tensor([int(one.logits.argmax()) for one in sessions])
        model, rows = engine.model, [(one.state, 1) for one in sessions]

        def step() -> None:
            with torch.inference_mode():
                hidden = model.forward(model.embed(tokens), *rows)
                tokens.copy_(model.head(hidden).argmax(-1))

        runs = [timed(step)[0] for _ in range(STEPS)][2:]
        facts["batch_tokens_per_s"] = BATCH / statistics.median(runs)
        facts["memory_above_weights"] = peak_rss() - engine.store.nbytes
        return facts


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    quiet = [r for r in rounds if max(e["switches_per_s"] for e in r.values()) < NOISY]
    if not quiet:
        return {"rounds_used": 0}
    facts: dict[str, Any] = {"rounds_used": len(quiet)}
    engines = {e: {k: statistics.median(r[e][k] for r in quiet) for k in quiet[0][e]}
               for e in quiet[0]}  # fmt: skip
    base = engines["transformers"]
    for engine in ("bf16", "fp8"):
        for key, ours in engines[engine].items():
            if key in base and key != "switches_per_s":
                slower = key.endswith("_ms")
                facts[f"{engine}_{key}_ratio"] = base[key] / ours if slower else ours / base[key]
    return facts | {"medians": engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="without 8,192 tokens")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        engine, checkpoint, lengths = asked.child
        run = run_transformers if engine == "transformers" else run_glmflash
        print(json.dumps(run(checkpoint, tuple(json.loads(lengths)))))
        return
    lengths = json.dumps([n for n in CONTEXTS if n <= 2048 or not asked.quick])
    with tempfile.TemporaryDirectory() as name:
        paths = {dtype: make_checkpoint(Path(name) / dtype, "--like", "bench", "--dtype", dtype)
                 for dtype in ("bf16", "fp8")}  # fmt: skip
        paths["transformers"] = paths["bf16"]
        rounds = []
        for number in range(1, asked.rounds + 1):
            rounds.append({e: child(__file__, "--child", e, str(paths[e]), lengths)
                           for e in ("transformers", "bf16", "fp8")})  # fmt: skip
            print(f"round {number}:", json.dumps(rounds[-1]), flush=True)
    save("end_to_end", {"machine": machine(), "summary": summary(rounds), "rounds": rounds})


if __name__ == "__main__":
    main()
