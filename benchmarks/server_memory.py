"""Measure the memory of a server, and compare it with the adviser's estimate.

    python -m benchmarks.server_memory --check --save
    python -m benchmarks.server_memory --quick

One or two servers and two or four workers on the CPUs of this machine, with SGD.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from aladdin_mpi.advice.candidates import Candidate
from aladdin_mpi.advice.memory import server_models
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.machine import machine

PROGRAM = "benchmarks.programs.server_memory"
USUAL = (
    "aladdin",
    "aladdin-ahead",
    "aladdin-local",
    "asp",
    "bsp",
    "easgd",
    "adsp",
    "async-diloco",
)
CASES = ((1, 2), (1, 4), (2, 4))
"""Numbers of servers and workers."""
LIMIT = 300.0
BAR = 0.15
"""Largest difference of the estimate from the measurement, as a share of it."""
NOTES = f"""\
Peak of the resident memory of a server's process, the largest of the servers, in multiples of the
model's size in fp32, without what the process had before the model was made. Estimate: of
`python -m aladdin_mpi.advise`. Expected: within {BAR:.0%}."""
QUICK = {"algorithm": ["asp"], "width": 300}


def measure(name: str, servers: int, workers: int, width: int) -> float:
    """Return the memory of a server in models."""
    words = ["--algorithm", name, "--servers", str(servers), "--width", str(width)]
    lines = harness.reports(servers + workers, ["-m", PROGRAM, *words], LIMIT, servers)
    return max(float(line["models"]) for line in lines)


def row(name: str, servers: int, workers: int, width: int) -> dict[str, Any]:
    """Return a row of the table."""
    found = measure(name, servers, workers, width)
    estimate = server_models(Candidate(name, servers, False), workers)
    assert estimate is not None
    return {
        "algorithm": name,
        "servers": servers,
        "workers": workers,
        "models": found,
        "estimate": estimate,
        "estimate / models": estimate / found,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("server_memory", (__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--algorithm", nargs="+", choices=USUAL, default=list(USUAL), help="algorithms")
    add("--width", type=whole(), default=2000, help="inputs and outputs of each of eight layers")
    args: argparse.Namespace = quick.parse(parser, argv, QUICK)
    facts = machine()
    table = [
        row(name, servers, workers, args.width)
        for name in args.algorithm
        for servers, workers in CASES
    ]
    missed = [
        f"{each['algorithm']}, {each['servers']} servers, {each['workers']} workers: "
        f"{each['models']:.2f} models, estimated as {each['estimate']:.2f}"
        for each in table
        if abs(each["estimate / models"] - 1) > BAR
    ]
    found = harness.Findings("Memory of a server, in models", table, NOTES, missed)
    return harness.publish("server_memory", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
