"""Training throughput on the papers' cluster at one tenth scale, with stragglers or without.

    python -m benchmarks.throughput --check
    python -m benchmarks.throughput --slowdown 1 2 10 100 -- --wire bf16

Four hosts with links of 1 Gbit/s in the network lab (needs root), eight workers whose computing
is timed, one server on each host. The ratio of communication to computing is that of the whole
model over 10 Gbit/s, as the compute times are from the paper's own training times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from aladdin_mpi.algorithms.registry import find
from aladdin_mpi.errors import UserError
from benchmarks import harness
from benchmarks.busy import BusyCores
from benchmarks.lab import Lab
from benchmarks.machine import machine

BAR_SPEEDUP = 7.7 / 8
"""Smallest speed-up for each of the workers that are all alike."""
BAR_WAIT = 0.02
"""Largest share of their time that they wait."""
SETTLED = 0.2
"""Share of a run's samples after which it is taken to be settled."""
BATCH = 1
TICKETS_AHEAD = 2
"""Steps that a slow worker may have before it when the samples are used up."""

NOTES = """\
Speed-up: samples per second of the whole run, first step to last gradient applied (`samples` and
`seconds` of summary.json), times the time of a step over its batch. Settled speed-up: the same
between the first line of metrics.jsonl after a fifth of the samples and the last, at which all
samples have been drawn: without the end of the run, when a slow worker computes alone. Ideal: the
sum over the workers of 1 / slow-down. Cores busy: of this machine, by whatever ran on it."""


@dataclass(frozen=True)
class Workload:
    """A network at one tenth: ``megabytes`` of parameters, ``seconds`` for a step."""

    name: str
    megabytes: float
    seconds: float


WORKLOADS = {
    "resnet50": Workload("ResNet-50", 9.4, 0.447),
    "vgg16": Workload("VGG-16", 55.2, 0.849),
}


@dataclass(frozen=True)
class Case:
    """A run: worker 0 is slower by ``slowdown`` than the others."""

    workload: Workload
    algorithm: str
    slowdown: float
    workers: int
    servers: int
    iterations: int

    @property
    def ideal(self) -> float:
        """The speed-up without any cost of communication."""
        return self.workers - 1 + 1 / self.slowdown

    @property
    def samples(self) -> int:
        """A multiple of those between two lines of metrics, so that one is written at the end."""
        return self.workers * max(1, round(self.iterations * self.ideal / self.workers))

    @property
    def seconds(self) -> float:
        """How long the run takes at best; a slow worker's last steps come on top."""
        return self.workload.seconds * (self.iterations + TICKETS_AHEAD * self.slowdown)

    def options(self, run_dir: Path, extra: Sequence[str]) -> list[str]:
        """The arguments of `aladdin_mpi.train`."""
        values: dict[str, object] = {
            "--algorithm": self.algorithm,
            "--model": f"size:{self.workload.megabytes:g}",
            "--compute": "timed",
            "--compute-time": self.workload.seconds,
            "--samples": self.samples,
            "--batch-size": BATCH,
            "--log-every": self.workers,
            "--run-dir": run_dir,
        }
        if self.servers:
            values["--servers"] = self.servers
        if self.slowdown > 1:
            values["--slowdown"] = f"0={self.slowdown:g}"
        words = [word for name, value in values.items() for word in (name, str(value))]
        return [*words, "--quiet", *extra]


def run(lab: Lab, case: Case, extra: Sequence[str]) -> dict[str, Any]:
    """Train once; returns a row of the table."""
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder, BusyCores() as busy:
        run_dir = Path(folder) / "run"
        args = ["-m", "aladdin_mpi.train", *case.options(run_dir, extra)]
        done = lab.run(case.servers + case.workers, args, timeout=120 + 2 * case.seconds)
        if done.returncode != 0:
            raise UserError(f"{case.algorithm}: the run failed:\n{done.stdout}{done.stderr}")
        summary = json.loads((run_dir / "summary.json").read_text())
        metrics = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return {**row(case, summary, metrics), "cores busy": busy.cores}


def row(
    case: Case, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What the two files of a run say of it."""
    step = case.workload.seconds / BATCH
    return {
        "model": case.workload.name,
        "algorithm": case.algorithm,
        "slow-down of one": case.slowdown,
        "ideal": case.ideal,
        "speed-up": summary["samples_per_second"] * step,
        "settled speed-up": settled_rate(metrics, summary["samples"]) * step,
        "wait fraction": summary["wait_fraction"],
        "coalesced": summary["gradients_coalesced"] / summary["gradients_computed"],
        "sent by a step, MB": summary["bytes_sent_per_step"] / 1e6,
        "seconds": summary["seconds"],
    }


def settled_rate(metrics: Sequence[Mapping[str, Any]], samples: int) -> float:
    """Samples per second while all workers were at it, by the lines of metrics; 0: too few."""
    lines = [line for line in metrics if line["kind"] == "train"]
    first = next((line for line in lines if line["samples"] >= SETTLED * samples), None)
    if first is None or lines[-1]["seconds"] <= first["seconds"]:
        return 0.0
    # The end of the run writes another line with the same number of samples.
    last = next(line for line in lines if line["samples"] == lines[-1]["samples"])
    return float((last["samples"] - first["samples"]) / (last["seconds"] - first["seconds"]))


def missed(table: Iterable[Mapping[str, Any]], workers: int) -> list[str]:
    """The rows without a straggler that miss a bar, in words."""
    found = []
    for line in table:
        if line["slow-down of one"] > 1:
            continue
        if line["speed-up"] < BAR_SPEEDUP * workers:
            found.append(
                f"{line['model']}: a speed-up of {line['speed-up']:.2f}, expected at least "
                f"{BAR_SPEEDUP * workers:.2f}"
            )
        if line["wait fraction"] > BAR_WAIT:
            found.append(
                f"{line['model']}: workers wait for {line['wait fraction']:.1%} of their time, "
                f"expected at most {BAR_WAIT:.0%}"
            )
    return found


def middle(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row out of several of the same case: the median of every column of numbers."""
    return {
        key: median(row[key] for row in repeats) if isinstance(value, (int, float)) else value
        for key, value in repeats[0].items()
    }


def measure(args: argparse.Namespace, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The table, from runs in one lab; the repeats of a case lie apart in time."""
    found: list[list[dict[str, Any]]] = [[] for _ in cases]
    with Lab(args.hosts, args.rate) as lab:
        for _ in range(args.repeats):
            for case, rows in zip(cases, found, strict=True):
                print(f"{case.workload.name}, slow-down {case.slowdown:g} ...", file=sys.stderr)
                rows.append(run(lab, case, args.extra))
    return [middle(rows) for rows in found]


def _cases(args: argparse.Namespace) -> list[Case]:
    servers = args.hosts if find(args.algorithm).server else 0
    return [
        Case(WORKLOADS[name], args.algorithm, slowdown, args.workers, servers, args.iterations)
        for name in args.workload
        for slowdown in args.slowdown
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("throughput", "Training throughput in the network lab.")
    add = parser.add_argument
    add("--workload", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS), help="models")
    add("--algorithm", default="aladdin", help="of aladdin_mpi.train")
    add(
        "--slowdown", type=float, nargs="+", default=[1.0], help="factors of one worker, a row each"
    )
    add("--iterations", type=int, default=200, help="of each worker that is not slowed down")
    add("--workers", type=int, default=8, help="spread over the hosts")
    add("--hosts", type=int, default=4, help="each with a server, if the algorithm has any")
    add("--rate", type=float, default=1.0, help="each host's link, in Gbit/s")
    add("--repeats", type=int, default=1, help="runs of each row, of which medians are taken")
    add("extra", nargs="*", help="after '--': further options for aladdin_mpi.train")
    args = parser.parse_args(argv)
    facts = machine()
    table = measure(args, _cases(args))
    title = f"{args.workers} workers on {args.hosts} hosts at {args.rate:g} Gbit/s, timed computing"
    found = harness.Findings(title, table, NOTES, missed(table, args.workers))
    return harness.publish("throughput", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
