"""Each native operation against what the hardware can do, measured next to it in the same run.

    python benchmarks/kernels.py [--only linear,moe] [--kernels avx512,avx2] [--rounds 7]
                                 [--threads 2] [--out benchmarks/results/kernels.json]

A kernel that waits for memory is compared with a plain read of memory (one stream per thread), one
that computes with multiply-adds from registers; both are timed just before and just after it, and
a figure is the median of the rounds' ratios. A round in which threads were often pre-empted is
thrown away and done again. Weights are cycled through, so that they come from memory and not from
a cache; row-major weights are mapped from a file in the page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from glmflash import kernels
from glmflash.kernels.linear import Weight, linear
from glmflash.kernels.linear.reference import Stored
from glmflash.kernels.moe import Experts, moe

NOISY = 20  # involuntary context switches in a second of a round
MEMORY = 640 << 20  # bytes cycled through: several times any cache
HIDDEN, INNER, TOP_K, LIMIT = 4096, 2048, 8, 10.0


@dataclass(frozen=True)
class Case:
    """One thing to time. run(i) does the work on the i-th of `copies` sets of weights.

    against: "read" (bytes a second) or "peak" (floating point operations a second).
    """

    name: str
    kernel_set: str
    against: str
    bytes: int
    flops: int
    copies: int
    run: Callable[[int], object]


class MappedBytes:
    """Random bytes in a temporary file, mapped, in the page cache: as FP8 and as BF16, ordinary
    numbers of both signs."""

    def __init__(self, size: int) -> None:
        self.file = tempfile.NamedTemporaryFile(prefix="glmflash-bench-")  # noqa: SIM115
        values = torch.randint(0x30, 0x40, (size,), dtype=torch.uint8)
        values |= torch.randint(0, 2, (size,), dtype=torch.uint8) << 7
        values.numpy().tofile(self.file.name)
        self.map = mmap.mmap(self.file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE,
                             flags=mmap.MAP_PRIVATE)  # fmt: skip
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.bytes[:: mmap.PAGESIZE].sum()

    def weights(self, dtype: torch.dtype, n: int, k: int) -> list[Stored]:
        size = n * k * dtype.itemsize
        scale = torch.rand(n // 128, k // 128) if dtype == torch.float8_e4m3fn else None
        pieces = self.bytes[: len(self.bytes) // size * size].split(size)
        return [(piece.view(dtype).view(n, k), scale) for piece in pieces]


def linear_cases(data: MappedBytes, kernel_sets: list[str]) -> Iterator[Case]:
    for kernel_set in kernel_sets:
        for dtype in (torch.float8_e4m3fn, torch.bfloat16):
            stored = data.weights(dtype, HIDDEN, HIDDEN)
            for packed in (True, False):
                weights = [Weight.of(s, packed=packed, kernel_set=kernel_set) for s in stored]
                for m in (1, 2, 4, 8, 16, 32, 64, 128, 512):
                    x = torch.randn(m, HIDDEN).bfloat16()
                    out = torch.empty(m, HIDDEN, dtype=torch.bfloat16)
                    name = "fp8" if dtype.itemsize == 1 else "bf16"
                    yield Case(
                        f"linear {name} {'packed' if packed else 'rows'} M={m}",
                        kernel_set,
                        "read" if m < 8 else "peak",
                        HIDDEN * HIDDEN * dtype.itemsize,
                        2 * m * HIDDEN * HIDDEN,
                        len(weights) if m <= 16 else 2,
                        lambda i, x=x, out=out, w=weights: linear(x, w[i], out=out),
                    )


def moe_cases(data: MappedBytes, kernel_sets: list[str]) -> Iterator[Case]:
    matrices = data.weights(torch.float8_e4m3fn, INNER, HIDDEN)
    count = len(matrices) // 3 // TOP_K * TOP_K
    down = [(w.view(HIDDEN, INNER), torch.rand(HIDDEN // 128, INNER // 128)) for w, _ in matrices]
    routed = [(matrices[3 * e], matrices[3 * e + 1], down[3 * e + 2]) for e in range(count)]
    for kernel_set in kernel_sets:
        for packed in (True, False):
            experts = Experts.of(routed, packed=packed, kernel_set=kernel_set)
            for tokens in (1, 512):
                x = torch.randn(tokens, HIDDEN).bfloat16()
                ids = torch.rand(tokens, count).topk(TOP_K).indices
                if tokens == 1:
                    ids = torch.arange(TOP_K).view(1, -1)
                weights = torch.rand(tokens, TOP_K)
                out = torch.empty_like(x)

                def run(i: int, e=experts, x=x, ids=ids, w=weights, out=out) -> Tensor:
                    return moe(x, e, (ids + i * TOP_K) % count, w, limit=LIMIT, out=out)

                active = TOP_K if tokens == 1 else count
                yield Case(
                    f"moe fp8 {'packed' if packed else 'rows'} T={tokens}",
                    kernel_set,
                    "read" if tokens == 1 else "peak",
                    active * 3 * HIDDEN * INNER,
                    2 * tokens * TOP_K * 3 * HIDDEN * INNER,
                    count // TOP_K if tokens == 1 else 1,
                    run,
                )


CASES = {"linear": linear_cases, "moe": moe_cases}


class Meter:
    """Times cases between probes of memory and of the multiply-add units."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.buffer = torch.ones(MEMORY // 2, dtype=torch.uint8)

    def probe(self, case: Case) -> float:
        module = kernels.native(case.kernel_set)
        assert module is not None
        start = time.perf_counter()
        if case.against == "read":
            work = self.buffer.numel()
            module.read_probe(self.buffer.data_ptr(), work)
        else:
            work = module.peak_probe(1_000_000)
        return work / (time.perf_counter() - start)

    def measure(self, case: Case) -> dict[str, object]:
        case.run(0)
        seconds, ratios, probes, rejected = [], [], [], 0
        while len(seconds) < self.rounds and rejected < 3 * self.rounds:
            before = self.probe(case)
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            start = time.perf_counter()
            for i in range(case.copies):
                case.run(i)
            elapsed = time.perf_counter() - start
            switches = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - switches
            probe = (before + self.probe(case)) / 2
            if switches > max(1, NOISY * elapsed):
                rejected += 1
                continue
            each = elapsed / case.copies
            seconds.append(each)
            probes.append(probe)
            ratios.append((case.bytes if case.against == "read" else case.flops) / each / probe)
        result: dict[str, object] = {"name": case.name, "kernels": case.kernel_set,
                                     "against": case.against, "rejected_rounds": rejected,
                                     "rounds": len(seconds)}  # fmt: skip
        if seconds:
            median = statistics.median(seconds)
            result |= {"us": median * 1e6, "gb_per_s": case.bytes / median / 1e9,
                       "gflop_per_s": case.flops / median / 1e9,
                       "probe": statistics.median(probes) / 1e9,
                       "of_probe": statistics.median(ratios)}  # fmt: skip
        return result


def machine(threads: int) -> dict[str, object]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "")
    return {"cpu": name or platform.processor(), "cores": os.cpu_count(), "threads": threads,
            "kernels": kernels.available(), "torch": torch.__version__,
            "load": os.getloadavg()[0], "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    native = [name for name in kernels.available() if name != kernels.REFERENCE]
    parser.add_argument("--only", default=",".join(CASES), help="operations, comma separated")
    parser.add_argument("--kernels", default=native[0], help="kernel sets, comma separated")
    parser.add_argument("--match", default="", help="run only cases whose name contains this")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kernels.set_threads(options.threads)
    data, meter, results = MappedBytes(MEMORY), Meter(options.rounds), []
    for operation in options.only.split(","):
        for case in CASES[operation](data, options.kernels.split(",")):
            if options.match not in case.name:
                continue
            result = meter.measure(case)
            results.append(result)
            shown = (
                "{us:10.0f} us {gb_per_s:7.1f} GB/s {gflop_per_s:7.0f} GFLOP/s   "
                "{of_probe:4.0%} of {against} probe ({probe:.1f})".format(**result)
                if result["rounds"]
                else "too noisy"
            )
            print(f"{case.kernel_set:8} {case.name:24} {shown}", flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        facts = {"machine": machine(options.threads), "results": results}
        options.out.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
