"""Measure the memory of a rank: a single worker, and members of islands.

    python -m benchmarks.island_memory --check --save
    python -m benchmarks.island_memory --quick

Four workers, and a server for each part of the model if the algorithm has any, on the CPUs of this
machine; AdamW; islands of two.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aladdin_mpi.options.algorithms import ALGORITHMS
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.island_memory"
KINDS = ("single", "replicated", "sharded")
USUAL = ("aladdin-ahead", "aladdin-local", "bsp", "ar-sgd", "diloco", "async-diloco")
WORKERS, PARTS = 4, 2
LIMIT = 300.0
NOTES = """\
Bytes of all tensors of a worker after a step, the largest of the four, in multiples of the model's
size in fp32: parameters, gradients, AdamW's state, the algorithm's vectors and the buffers of
messages; without activations and temporary memory of the passes. A GPU has the buffers in pinned
host memory. A sharded model is held twice, by FSDP and by the run.

Bars: half of a single worker's memory, and what is not divided: with replicated islands the model,
its gradient, and a model's buffers to exchange both; with sharded ones FSDP's own parameters and
gradients, one model in all."""
UNDIVIDED = {"replicated": 3.0, "sharded": 1.0}
ALLOWANCE = 0.1
QUICK = {"algorithm": ["ar-sgd"], "width": 64}


def measure(name: str, kind: str, width: int) -> float:
    """Return the memory of a worker in models."""
    servers = PARTS if ALGORITHMS[name].has_servers else 0
    words = ["--algorithm", name, "--kind", kind, "--servers", str(PARTS), "--width", str(width)]
    lines = harness.reports(WORKERS + servers, ["-m", PROGRAM, *words], LIMIT, WORKERS)
    return max(float(line["models"]) for line in lines)


def missed(table: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a description of each figure above its bar."""
    return [
        f"{row['algorithm']}, {kind}: {row[kind]:.2f} models, expected at most "
        f"{row['single'] / PARTS + undivided:.2f}"
        for row in table
        for kind, undivided in UNDIVIDED.items()
        if row[kind] > row["single"] / PARTS + undivided + ALLOWANCE
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    able = [name for name, algorithm in ALGORITHMS.items() if algorithm.islands]
    parser = harness.make_parser("island_memory", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--algorithm", nargs="+", choices=able, default=list(USUAL), help="algorithms")
    add("--width", type=whole(), default=800, help="inputs and outputs of each of eight layers")
    args: argparse.Namespace = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = [
        {"algorithm": name} | {kind: measure(name, kind, args.width) for kind in KINDS}
        for name in args.algorithm
    ]
    found = harness.Findings("Memory of a rank, in models", table, NOTES, missed(table))
    return harness.publish("island_memory", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
