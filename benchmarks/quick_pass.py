"""Run every benchmark reduced, to check that all of them work here; `make bench-quick`.

    python -m benchmarks.quick_pass
    python -m benchmarks.quick_pass --only stragglers kernels

Its figures are not results. Benchmarks that require the network lab are skipped if it cannot be
built.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import harness
from benchmarks.lab import Lab
from benchmarks.results import table

LIMIT = 300.0
"""Time limit of one benchmark in s."""
WORK = "{work}"
"""Placeholder in arguments for a folder that benchmarks share."""


@dataclass(frozen=True)
class Pass:
    """One benchmark's name and the arguments of its reduced run."""

    name: str
    args: tuple[str, ...] = ("--quick",)
    needs_lab: bool = False


_SHARED = ("--quick", "--work", WORK)
PASSES = (
    Pass("stragglers", _SHARED),
    Pass("scaling", _SHARED),
    Pass("islands", _SHARED),
    Pass("adviser", needs_lab=True),
    Pass("learned", ()),
    Pass("agreement", _SHARED, needs_lab=True),
    Pass("calibration", ("--repeats", "2"), needs_lab=True),
    Pass("sharing", needs_lab=True),
    Pass("ulfm"),
    Pass("ulfm", ("--quick", "--failure")),
    Pass("regrouping"),
    Pass("server_memory"),
    Pass("takeover"),
    Pass(
        "throughput",
        ("--workers", "4", "--hosts", "2", "--iterations", "20", "--workload", "resnet50"),
        needs_lab=True,
    ),
    Pass("large"),
    Pass("ipdps"),
    Pass("convergence"),
    Pass(
        "ablation",
        ("--seeds", "1", "--variants", "base", "pi 2", "--", "--workers", "2", "--epochs", "1"),
    ),
    Pass("variance"),
    Pass("breakdown"),
    Pass("gpt", ("--quick", "--out", WORK)),
    Pass("halves"),
    Pass("lookahead"),
    Pass("outer"),
    Pass("outer_advice"),
    Pass("intake"),
    Pass("step"),
    Pass("feed"),
    Pass("gradient"),
    Pass("kernels"),
    Pass("heap"),
    Pass("island_memory"),
    Pass("peers"),
    Pass("torchft_diloco", needs_lab=True),
    Pass("allreduce", ("--megabytes", "0.04", "4", "--steps", "2", "--repeats", "1")),
    Pass("progress", ("--megabytes", "8", "--compute", "0.2", "--repeats", "1"), needs_lab=True),
    Pass(
        "soak",
        (
            *("--minutes", "1.5", "--every", "8", "--worker-timeout", "5"),
            *("--checkpoint", "5", "--cut", "8", "--full", "8"),
        ),
        needs_lab=True,
    ),
)


def run(one: Pass, work: Path) -> tuple[int | None, float]:
    """Run a benchmark and show its output; return its exit status (None: ended) and seconds."""
    words = [word.replace(WORK, str(work)) for word in one.args]
    command = [sys.executable, "-m", f"benchmarks.{one.name}", *words]
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=harness.environment())
    try:
        status: int | None = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            process.terminate()  # the benchmark ends its ranks
            process.wait(60)
    return status, time.monotonic() - start


def verdict(status: int | None) -> str:
    """Return a description of a status."""
    if status is None:
        return f"ended after {LIMIT:g} s"
    return "ok" if status == 0 else f"failed with status {status}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 0 if all benchmarks worked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quick_pass", description="Run every benchmark reduced."
    )
    names = [one.name for one in PASSES]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    chosen = parser.parse_args(argv).only
    no_lab = Lab.available()
    rows, wrong = [], False
    with tempfile.TemporaryDirectory(prefix="bench-quick-") as folder:
        for one in [one for one in PASSES if one.name in chosen]:
            print(f"\n=== {one.name}", flush=True)
            if one.needs_lab and no_lab:
                rows.append({"benchmark": one.name, "result": f"skipped: {no_lab}", "s": 0.0})
                continue
            status, seconds = run(one, Path(folder))
            wrong |= status != 0
            rows.append({"benchmark": one.name, "result": verdict(status), "s": seconds})
    total = sum(float(str(row["s"])) for row in rows)
    print(f"\n{table(rows)}\n\n{total:.0f} s in all")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
