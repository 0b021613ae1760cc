"""The reference model against transformers, on the same checkpoint and in the same run.

    python benchmarks/reference.py [--rounds 3] [--out benchmarks/results/reference.json]

Makes the `bench` checkpoint (12 layers, bf16) in a temporary folder, then runs transformers and
glmflash in turn, each in a process of its own: reading 512 tokens, and writing after 2,048. Also
the peak memory of reading 8,192 tokens through a session on 4 layers, and two times a person
feels: `glmflash --help`, and `inspect` of the released config. Speeds are ratios of medians over
the rounds; a round in which the process was often pre-empted is marked and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PREFILL, CONTEXT, STEPS, LONG = 512, 2048, 16, 8192
NOISY = 200  # involuntary context switches per second of a measurement


def timed(work) -> tuple[float, float]:
    """Seconds of work(), and involuntary context switches a second."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before) / seconds


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(prefill, decode_setup, decode_step) -> dict:
    """Medians of three prefills and of single decode steps."""
    prefill()
    runs = [timed(prefill) for _ in range(3)]
    decode_setup()
    steps = [timed(decode_step) for _ in range(STEPS)][2:]
    return {
        "prefill_tokens_per_s": PREFILL / statistics.median(s for s, _ in runs),
        "decode_ms": 1e3 * statistics.median(s for s, _ in steps),
        "switches_per_s": max(statistics.median(n for _, n in x) for x in (runs, steps)),
        "peak_rss": peak_rss(),
    }


def run_transformers(checkpoint: str) -> dict:
    import torch
    from transformers import AutoModelForImageTextToText

    torch.set_grad_enabled(False)
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint, dtype=torch.bfloat16, attn_implementation="eager"
    ).eval()
    ids = torch.tensor([tokens(CONTEXT)])
    held = {}

    def setup() -> None:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        held.update(cache=out.cache, token=out.logits[:, -1:].argmax(-1))

    def step() -> None:
        out = model(input_ids=held["token"], use_cache=True, cache=held["cache"])
        held["token"] = out.logits[:, -1:].argmax(-1)

    return measure(
        lambda: model(input_ids=ids[:, :PREFILL], use_cache=True, logits_to_keep=1), setup, step
    )


def run_glmflash(checkpoint: str) -> dict:
    import glmflash

    with glmflash.open(checkpoint) as engine:
        session = engine.session()

        def prefill() -> None:
            session.reset()
            session.sync(tokens(PREFILL))

        def setup() -> None:
            session.reset()
            session.sync(tokens(CONTEXT))

        return measure(prefill, setup, lambda: session.step(int(session.logits.argmax())))


def run_memory(checkpoint: str) -> dict:
    import glmflash

    with glmflash.open(checkpoint) as engine:
        weights = engine.store.nbytes
        engine.session().sync(tokens(8))
        before = peak_rss()
        engine.session().sync(tokens(LONG))
        return {"weights": weights, "rss_loaded": before, "peak_rss": peak_rss(),
                "above_weights": peak_rss() - weights}  # fmt: skip


def tokens(count: int) -> list[int]:
    import torch

    return torch.randint(10, 32000, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def child(what: str, checkpoint: Path) -> dict:
    command = [sys.executable, __file__, "--child", what, str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{what} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def command_seconds(*arguments: str) -> float:
    runs = []
    for _ in range(7):
        start = time.perf_counter()
        subprocess.run([str(Path(sys.executable).with_name("glmflash")), *arguments],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip
        runs.append(time.perf_counter() - start)
    return statistics.median(runs)


def make(folder: Path, name: str, *options: str) -> Path:
    out = folder / name
    subprocess.run([sys.executable, "-m", "glmflash.cli.main", "checkpoint", "random", str(out),
                    "--like", "bench", "--dtype", "bf16", *options], check=True)  # fmt: skip
    return out


def machine() -> dict:
    import torch

    name = next((line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text()
                 .splitlines() if line.startswith("model name")), platform.processor())  # fmt: skip
    return {"cpu": name, "cores": os.cpu_count(), "torch": torch.__version__,
            "threads": torch.get_num_threads(), "python": platform.python_version(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/reference.json"
    )
    parser.add_argument("--child", nargs=2)
    asked = parser.parse_args()
    if asked.child:
        what, checkpoint = asked.child
        print(json.dumps(globals()[f"run_{what}"](checkpoint)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench = make(folder, "bench")
        rounds = []
        for number in range(asked.rounds):
            rounds.append({what: child(what, bench) for what in ("transformers", "glmflash")})
            print(f"round {number + 1}:", json.dumps(rounds[-1]), flush=True)
        memory = child("memory", make(folder, "bench4", "--layers", "4"))
    report = {"machine": machine(), "rounds": rounds, "summary": summary(rounds),
              "memory_8192": memory,
              "seconds": {"help": command_seconds("--help"),
                          "inspect": command_seconds("inspect", "glm-5.3-flash")}}  # fmt: skip
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: report[k] for k in ("summary", "memory_8192", "seconds")}, indent=1))


def summary(rounds: list[dict]) -> dict:
    quiet = [r for r in rounds if max(e["switches_per_s"] for e in r.values()) < NOISY]

    def median(engine: str, key: str) -> float:
        return statistics.median(r[engine][key] for r in quiet)

    if not quiet:
        return {"rounds_used": 0}
    return {
        "rounds_used": len(quiet),
        "prefill_512_ratio": median("glmflash", "prefill_tokens_per_s")
        / median("transformers", "prefill_tokens_per_s"),
        "decode_2048_ratio": median("transformers", "decode_ms") / median("glmflash", "decode_ms"),
        **{f"{e}_{k}": median(e, k) for e in ("transformers", "glmflash")
           for k in ("prefill_tokens_per_s", "decode_ms")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
