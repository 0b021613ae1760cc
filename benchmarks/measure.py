"""What the benchmarks share: noise, peak memory, machine facts, processes of their own, results."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of work(), and involuntary context switches a second."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw - before) / seconds


def peak_rss() -> int:
    """Highest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def major_faults() -> int:
    """Pages of this process that came from disk so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def machine() -> dict[str, Any]:
    """What ran the benchmark."""
    import torch

    name = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def child(script: str, *arguments: str, kernels: str | None = None) -> dict[str, Any]:
    """Run a benchmark script in a process of its own; its last line of output is JSON."""
    environment = dict(os.environ)
    if kernels:
        environment["GLMFLASH_KERNELS"] = kernels
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts


def make_checkpoint(out: Path, *options: str) -> Path:
    """A random checkpoint by the command that people use."""
    command = [sys.executable, "-m", "glmflash.cli.main", "checkpoint", "random", str(out)]
    subprocess.run([*command, *options], check=True)
    return out


def random_tokens(count: int, seed: int = 1) -> list[int]:
    """Ids of ordinary tokens of the bench model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 32000, (count,), generator=generator).tolist()


def save(name: str, report: dict[str, Any]) -> None:
    """Write a report to benchmarks/results and show its summary."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report.get("summary", report), indent=1))
    print(f"written to {path}")
