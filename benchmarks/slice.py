"""Decoding at the real widths: one layer of each kind, measured and added up to the 45 layers.

    python benchmarks/slice.py [--keep DIR]

Writes (or takes from --keep) a 4-layer slice of GLM-5.3-Flash in FP8 with all 288 experts (about
11 GB), maps it, and times every part of a decode step at batch 1: a KDA layer's attention, a
sparse layer's, a dense MLP, an expert layer, an mHC site, the head. Each part is timed beside a
plain read of memory; the page cache is warm and a part that had to fetch pages from disk is
measured again. The sum over the released model's layers is arithmetic, shown line by line.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import machine, major_faults, make_checkpoint, random_tokens, save, timed

import glmflash
from glmflash import kernels
from glmflash.config import shipped
from glmflash.model.mhc import expand_streams, new_routing
from glmflash.weights.table import expected_tensors

ROUNDS, CONTEXT, PROBE_BYTES = 15, 512, 1 << 30
OPTIONS = ("--like", "glm-5.3-flash", "--layers", "4", "--dtype", "fp8", "--no-vision", "--no-mtp")


def parts(engine: glmflash.Engine) -> dict[str, tuple[Callable[[], object], int]]:
    """Every part of a decode step with how often the released model runs it."""
    from glmflash.kernels.mhc import site

    session = engine.session()
    session.sync(random_tokens(CONTEXT))
    layers, states = engine.model.layers, session.state.layers
    width = engine.config.text.hidden_size
    kda, sparse, count = layers[0], layers[3], [1]

    def x() -> torch.Tensor:
        return torch.randn(1, width).to(engine.dtype)

    streams, routing = expand_streams(x(), 4), new_routing(1, 4)
    site(kda.attention_site, streams, routing)
    return {
        "KDA attention": (lambda: kda.attention(x(), [states[0]], count), 34),
        "sparse attention": (lambda: sparse.attention(x(), [states[3]], count), 11),
        "dense MLP": (lambda: kda.mlp(x()), 3),
        "experts": (lambda: sparse.mlp(x()), 42),
        "mHC site": (lambda: site(kda.attention_site, streams, routing, x()), 90),
        "head": (lambda: engine.model.head(x()), 1),
    }


def bytes_read() -> dict[str, float]:
    """Bytes of weights that one run of each part reads, from the released config alone."""
    config = shipped("glm-5.3-flash")
    total: Counter[str] = Counter()
    for spec in expected_tensors(config, "fp8").values():
        total[spec.component] += spec.nbytes
    text = config.text
    expert = total["routed_experts"] / 42 / text.n_routed_experts
    return {
        "KDA attention": total["kda"] / 34,
        "sparse attention": (total["mla"] + total["indexer"]) / 11,
        "dense MLP": total["dense_mlp"] / 3,
        "experts": expert * text.num_experts_per_tok
        + (total["shared_experts"] + total["router"]) / 42,
        "mHC site": total["mhc"] / 90,
        "head": total["head"],
    }


def measure(run: Callable[[], object], probe: Callable[[], float]) -> dict[str, float]:
    """Median seconds of a part and bytes/s of the probes around it, without page faults."""
    for _ in range(5):
        run()
        before, faults = probe(), major_faults()
        runs = [timed(run) for _ in range(ROUNDS)]
        if major_faults() == faults:
            return {
                "ms": 1e3 * statistics.median(s for s, _ in runs),
                "probe_gb_s": (before + probe()) / 2 / 1e9,
                "switches_per_s": statistics.median(n for _, n in runs),
            }
    raise SystemExit("pages kept coming from disk: the slice does not fit the page cache here")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="where the slice is, or is to be kept")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, torch.inference_mode():
        path = asked.keep or Path(name) / "slice"
        if not path.exists():
            make_checkpoint(path, *OPTIONS)
        report = run(path)
    save("slice", report)


def run(path: Path) -> dict[str, Any]:
    memory = torch.randint(0, 100, (PROBE_BYTES,), dtype=torch.uint8)
    module = kernels.native()
    if module is None:
        raise SystemExit("this benchmark needs compiled kernels")

    def probe() -> float:
        start = time.perf_counter()
        module.read_probe(memory.data_ptr(), PROBE_BYTES)
        return PROBE_BYTES / (time.perf_counter() - start)

    for shard in path.glob("*.safetensors"):
        shard.read_bytes()  # into the page cache
    wanted, rows = bytes_read(), []
    with glmflash.open(path) as engine:
        for part, (work, times) in parts(engine).items():
            facts = measure(work, probe)
            rate = wanted[part] / facts["ms"] * 1e3
            rows.append({"part": part, "times": times, "bytes": wanted[part], **facts,
                         "gb_s": rate / 1e9, "of_probe": rate / 1e9 / facts["probe_gb_s"],
                         "sum_ms": facts["ms"] * times})  # fmt: skip
            print(rows[-1], flush=True)
    step = sum(row["sum_ms"] for row in rows)
    read = sum(row["bytes"] * row["times"] for row in rows)
    probes = statistics.median(row["probe_gb_s"] for row in rows)
    summary = {
        "step_ms": step,
        "tokens_per_s": 1e3 / step,
        "bytes_per_token": read,
        "gb_s": read / step / 1e6,
        "of_probe": read / step / 1e6 / probes,
        "context": CONTEXT,
    }
    return {"machine": machine(), "kernels": kernels.active(), "summary": summary, "parts": rows}


if __name__ == "__main__":
    main()
