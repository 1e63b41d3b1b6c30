"""A cell: one training run with timed computing, described for either engine.

A cell is a row of a table: a network of a given size, an algorithm, the slowdown of one worker,
workers, servers and hosts. `benchmarks/engines.py` runs it over MPI in the network lab or in a
simulation, with the same options and the same row of figures.

The networks and their times are those of the ALADDIN study (Ko et al., CIKM 2021, section 5.1) at
one tenth: parameters and links are a tenth as large, so the ratio of communication to computing is
that of the whole model over 10 Gbit/s.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression
from typing import Any

from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.cluster import Cluster
from benchmarks.ipdps_paper import JITTER
from benchmarks.spread import spread

BATCH = 1
SETTLED = 0.4
"""Share of a run's samples after which the rate counts as settled, at the earliest.

Before that, workers may still be requesting more batches ahead while their links fill up. Including
that phase, eight workers were 3 % faster than eight times one."""
TICKETS_AHEAD = 2
"""Steps that a slow worker may still have to do when the samples are used up."""
BOUNDED = {"ssp": 3}
"""Steps that workers may be ahead of the slowest, if the algorithm has such a bound."""


@dataclass(frozen=True)
class Workload:
    """A network at one tenth: ``megabytes`` of parameters, ``seconds`` for a step.

    ``key`` is its name as an option.
    """

    key: str
    name: str
    megabytes: float
    seconds: float


WORKLOADS = {
    workload.key: workload
    for workload in (
        Workload("resnet50", "ResNet-50", 9.4, 0.447),
        Workload("vgg16", "VGG-16", 55.2, 0.849),
    )
}
"""Step times, from the hours in the study's table 2 for training with one worker."""


@dataclass(frozen=True)
class Cell:
    """One run, in which worker 0 is slower than the others by the factor ``slowdown``.

    Args:
        workload: the network.
        algorithm: of aladdin_mpi.train.
        slowdown: slowdown factor of worker 0's computing, at least 1.
        workers: number of workers, the same on each host; see `placement`.
        servers: number of servers, the first ranks; 0 if the algorithm has none.
        hosts: number of hosts.
        rate_gbit: rate of each host's link in Gbit/s, in each direction.
        iterations: steps of a worker that is not slowed down; in lockstep, of every worker.
        extra: further options of both aladdin_mpi.train and aladdin_mpi.simulate.
        mpi_extra: options for MPI only, such as the library that sums gradients.
    """

    workload: Workload
    algorithm: str
    slowdown: float
    workers: int
    servers: int
    hosts: int
    rate_gbit: float
    iterations: int
    extra: tuple[str, ...] = ()
    mpi_extra: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Return the number of servers and workers."""
        return self.servers + self.workers

    @property
    def placement(self) -> list[int]:
        """Return the host of each rank, servers first, as in the simulation; see `spread`."""
        cluster = Cluster(hosts=self.hosts, placement=spread(self.servers))
        return [cluster.host_of(rank, self.ranks) for rank in range(self.ranks)]

    @property
    def lockstep(self) -> bool:
        """Return whether all workers take the same number of steps."""
        return find_algorithm(self.algorithm).lockstep

    @property
    def keeps_pace(self) -> bool:
        """Return whether the slowest worker limits the speed of all in the long run."""
        return self.lockstep or self.algorithm in BOUNDED

    @property
    def ideal(self) -> float:
        """Return the sum of 1 / slowdown over the workers: no communication cost, no waiting."""
        return self.workers - 1 + 1 / self.slowdown

    @property
    def samples(self) -> int:
        """The run's samples: a multiple of the metrics interval, so that a line marks the end."""
        if self.keeps_pace:
            return BATCH * self.workers * self.iterations
        rounds = max(1, round(self.iterations * self.ideal / self.workers))
        return BATCH * self.workers * rounds

    @property
    def settled_from(self) -> int:
        """Return the samples that are granted before the rate counts as settled.

        Workers that may run ahead do so at once, and then proceed at the pace of the slowest.
        """
        ahead = BOUNDED.get(self.algorithm, 0)
        at_once = BATCH * self.workers * (ahead + TICKETS_AHEAD) if ahead else 0
        return max(round(SETTLED * self.samples), at_once)

    @property
    def seconds(self) -> float:
        """Return the run's minimum duration, by its computing alone."""
        if self.keeps_pace:
            return self.workload.seconds * self.iterations * self.slowdown
        tail = TICKETS_AHEAD * self.slowdown
        return self.workload.seconds * max(self.iterations + 1.0, tail)

    @property
    def key(self) -> str:
        """Return a text that identifies this cell."""
        return json.dumps(asdict(self), sort_keys=True)

    def describe(self) -> str:
        """Return a short description for progress messages."""
        extra = f", {' '.join(self.extra)}" if self.extra else ""
        return (
            f"{self.workload.name}, {self.algorithm}, {self.workers} workers, slowdown "
            f"{self.slowdown:g}{extra}"
        )

    def options(self, run_dir: Path) -> list[str]:
        """Return the arguments shared by aladdin_mpi.train and aladdin_mpi.simulate."""
        values: dict[str, object] = {
            "--algorithm": self.algorithm,
            "--model": f"size:{self.workload.megabytes:g}",
            "--compute": "timed",
            "--compute-time": self.workload.seconds,
            # With none, workers that hold up one another fall into one rhythm. Over MPI chance
            # upsets it; in virtual time nothing does.
            "--jitter": JITTER,
            "--samples": self.samples,
            "--batch-size": BATCH,
            "--log-every": BATCH * self.workers,
            "--run-dir": run_dir,
        }
        if self.servers:
            values["--servers"] = self.servers
        if self.slowdown > 1:
            values["--slowdown"] = f"0={self.slowdown:g}"
        words = [word for name, value in values.items() for word in (name, str(value))]
        return [*words, "--quiet", *self.extra]


ROW_NOTES = f"""\
Speed-up: samples per second times the time of a step divided by its batch, so that a single worker
has 1. It is measured while all workers are training. If they step in rounds, that is the whole run,
from the first step to the last applied gradient. Otherwise it is the slope of the lines in
metrics.jsonl from two fifths of the samples on (with `ssp` also not before all workers have run
ahead as far as allowed) up to the line at which all samples have been granted; after it a slow
worker computes alone. Both engines are evaluated in the same way. The speedup may exceed the ideal
by the position of the lines within the steps, 1 % in runs of a hundred steps. Whole run: the same
over all of the run, `samples` and `seconds` of summary.json. Ideal: the sum of 1 / slowdown over
the workers; the slow worker's computing is stretched by that factor, as in the study. The time of a
step varies by {JITTER:.1%} (log-normal; IPDPS 2021, section VI.C), in the same way with both
engines."""


def row(
    cell: Cell, summary: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the figures from a run's two files; times are in seconds of its engine's clock."""
    step = cell.workload.seconds / BATCH
    whole = summary["samples_per_second"]
    settled = whole if cell.lockstep else settled_rate(metrics, summary["samples"], cell)
    return {
        "speed-up": settled * step,
        "whole run": whole * step,
        "wait fraction": summary["wait_fraction"],
        "wait until all are drawn": _wait_until_drawn(metrics, summary["samples"]),
        "coalesced": summary["gradients_coalesced"] / summary["gradients_computed"],
        "dropped": summary["gradients_dropped"],
        "sent by a step, MB": summary["bytes_sent_per_step"] / 1e6,
        "seconds": summary["seconds"],
    }


def _wait_until_drawn(metrics: Sequence[Mapping[str, Any]], samples: int) -> float | None:
    """Return the share of time spent waiting until the last lease; then the run only winds down."""
    lines = (line for line in metrics if line["kind"] == "train" and line["samples"] == samples)
    first = next(lines, None)
    return None if first is None else first.get("wait_fraction")


def settled_rate(metrics: Sequence[Mapping[str, Any]], samples: int, cell: Cell) -> float:
    """Return samples per second while all workers train, from metrics lines; 0: too few lines."""
    lines = [line for line in metrics if line["kind"] == "train"]
    # The end of the run writes another line with the same number of samples.
    whole = next((place for place, line in enumerate(lines) if line["samples"] == samples), -1)
    shown = [line for line in lines[: whole + 1] if line["samples"] >= cell.settled_from]
    seconds = [float(line["seconds"]) for line in shown]
    if len(shown) < 2 or seconds[0] == seconds[-1]:
        return 0.0
    # A fit to all lines: workers request in bunches, and a line may fall anywhere in one.
    return linear_regression(seconds, [float(line["samples"]) for line in shown]).slope
