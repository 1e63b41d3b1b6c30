"""Compare ALADDIN's variants on real data in simulations.

The paper contradicts itself in places (docs/design/aladdin.md); each reading is an option.
This benchmark trains with each of them::

    python -m benchmarks.ablation --seeds 3 --save ablation -- --workers 8 --epochs 20 --lr 0.01

Arguments after ``--`` are passed to ``aladdin_mpi.simulate``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.bounds import whole
from benchmarks.machine import describe_machine
from benchmarks.results import result_name, table, write_result

BASE = {"normalize": "workers", "alpha": "theory", "momentum": "worker", "trigger": "accumulate"}
"""The base variant; the others differ from it in one or two options."""

VARIANTS: dict[str, dict[str, str]] = {
    "base": {},
    "normalize count": {"normalize": "count"},
    "normalize none": {"normalize": "none"},
    "alpha since-last": {"alpha": "since-last"},
    "alpha literal": {"alpha": "literal"},
    "momentum split": {"momentum": "split"},
    "trigger drop": {"trigger": "drop"},
    "normalize count, momentum split": {"normalize": "count", "momentum": "split"},
    "as printed": {"normalize": "none", "alpha": "literal", "trigger": "drop"},
    "pi 1": {"pi": "1"},
    "pi 2": {"pi": "2"},
    "pi 8": {"pi": "8"},
}
RUN_SECONDS = 3600.0


def final_figures(options: Sequence[str]) -> dict[str, Any]:
    """Run one simulation and return its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "aladdin_mpi.simulate", "--run-dir", folder, "--overwrite"]
        command += ["--quiet", "--eval-every", "0", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)
        if done.returncode:
            raise SystemExit(f"{shlex.join(command)}\n{done.stderr}")
        summary: dict[str, Any] = json.loads((Path(folder) / "summary.json").read_text())
        return summary


def row(name: str, seeds: int, options: Sequence[str], pool: ThreadPoolExecutor) -> dict[str, str]:
    """Train a variant with each seed and return its row of the table."""
    chosen = {**BASE, **VARIANTS[name]}
    flags = [word for key, value in chosen.items() for word in (f"--aladdin-{key}", value)]
    runs = [[*options, *flags, "--seed", str(seed)] for seed in range(seeds)]
    found = list(pool.map(final_figures, runs))
    accuracy = [100 * summary["test_accuracy"] for summary in found]
    loss = [summary["test_loss"] for summary in found]
    return {
        "variant": name,
        "test accuracy, %": f"{statistics.mean(accuracy):.2f}",
        "lowest to highest": f"{min(accuracy):.2f} to {max(accuracy):.2f}",
        "test loss": f"{statistics.mean(loss):.4f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--seeds", type=whole(), default=3, help="number of runs of each variant")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--jobs", type=whole(), default=1, help="number of runs at the same time")
    parser.add_argument(
        "--save", type=result_name, metavar="NAME", help="save the table in benchmarks/results"
    )
    args = parser.parse_args(words[:split])
    options = words[split + 1 :]
    print(describe_machine())
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for name in args.variants:
            rows.append(row(name, args.seeds, options, pool))
            print("  ".join(rows[-1].values()), flush=True)
    print(table(rows))
    if args.save:
        command = shlex.join(["python", "-m", "benchmarks.ablation", *words])
        title = f"ALADDIN's variants, {args.seeds} seeds each"
        write_result(args.save, title, rows, command)
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
