"""Cells and runs of `benchmarks.outer`: a task on a cluster with slow links, and a run there.

A step of an ordinary worker takes one second, so that seconds are steps. Every worker is alone on a
host, whose link carries ``1 / link`` of an fp32 gradient per step in each direction with a latency
of half a step. A server has its own host, whose link is never the bottleneck.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm
from benchmarks import harness

PARAMETERS = {"gpt": 110_400, "resnet20": 269_722}
BATCH = {"gpt": 4, "resnet20": 16}
SPEEDS = ("equal", "slow 3", "slow 10", "three", "pauses")
LATENCY, JITTER = 0.5, 0.03
SERVER_GBIT = 10.0
POINTS = 16
"""Evaluations of a run."""
PAUSE_EVERY, PAUSE = 100.0, 30.0
"""Mean steps between two pauses of a worker, and mean steps of a pause; both are exponential."""
PAUSES_UNTIL = 10
"""Pauses are drawn for this many times the steps of a run; slower runs end without pauses."""
RECEIVED_FILE = "received.json"
PROGRAM = Path(__file__).parent / "programs" / "outer.py"


@dataclass(frozen=True)
class Cell:
    """A task and a cluster.

    Args:
        task: a key of `PARAMETERS`.
        workers: number of workers.
        link: a worker's link carries 1 / ``link`` of an fp32 gradient per step, each way.
        speeds: one of `SPEEDS`.
        steps: of every worker, if all take the same number.
    """

    task: str = "gpt"
    workers: int = 8
    link: int = 50
    speeds: str = "equal"
    steps: int = 200

    @property
    def samples(self) -> int:
        """The samples of a run."""
        return self.steps * self.workers * BATCH[self.task]

    @property
    def is_even(self) -> bool:
        """Whether no worker is slower than the others or pauses."""
        return self.speeds == "equal"

    def slowdowns(self) -> list[float]:
        """Return the slowdown factor of every worker."""
        kind, _, factor = self.speeds.partition(" ")
        if kind == "slow":
            return [float(factor), *[1.0] * (self.workers - 1)]
        return [1.0 + index % 3 if kind == "three" else 1.0 for index in range(self.workers)]

    def pauses(self, seed: int, servers: int) -> list[str]:
        """Return the workers' pauses, as values of ``--pauses``."""
        if self.speeds != "pauses":
            return []
        drawn, found = random.Random(seed), []
        for worker in range(self.workers):
            now = drawn.expovariate(1 / PAUSE_EVERY)
            while now < PAUSES_UNTIL * self.steps:
                length = drawn.expovariate(1 / PAUSE)
                found.append(f"{servers + worker}:{now:.3f}:{length:.3f}")
                now += length + drawn.expovariate(1 / PAUSE_EVERY)
        return found

    def options(self, seed: int, servers: int) -> list[str]:
        """Return the options of the modelled cluster."""
        gbit = 4 * PARAMETERS[self.task] * 8e-9 / self.link
        slow = [f"{w}={factor:g}" for w, factor in enumerate(self.slowdowns()) if factor > 1]
        pauses = self.pauses(seed, servers)
        values: dict[str, object] = {
            "--workers": self.workers,
            "--hosts": self.workers + 1,
            "--bandwidth-gbit": f"{gbit:.6g}",
            "--links": f"0={SERVER_GBIT:g}",
            "--latency-us": f"{LATENCY * 1e6:g}",
            "--compute-time": 1,
            "--jitter": JITTER,
            "--worker-timeout": 0,
        }
        words = [str(word) for pair in values.items() for word in pair]
        words += ["--worker-hosts", *map(str, range(1, self.workers + 1))]
        words += ["--slowdown", *slow] if slow else []
        return [*words, "--pauses", *pauses] if pauses else words


@dataclass(frozen=True)
class Run:
    """A run of an algorithm in a cell.

    Args:
        cell: the task and the cluster.
        algorithm: name of the algorithm.
        options: its options by name, such as ``--diloco-steps``.
        peak: largest learning rate of the workers' optimizer.
        seed: of the weights, the order of the data, the times of steps and the pauses.
    """

    cell: Cell
    algorithm: str
    options: tuple[tuple[str, str], ...]
    peak: float
    seed: int

    @property
    def key(self) -> str:
        """Return a text that identifies this run."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def teacher(self) -> Run | None:
        """Return the run with the same gradients in the cell of equal workers and usual links.

        If all workers advance in rounds, what they learn depends neither on the links nor on their
        speeds. None if this is that run, or if workers do not advance in rounds.
        """
        plain = replace(self.cell, link=Cell.link, speeds=Cell.speeds)
        if plain == self.cell or not find_algorithm(self.algorithm).lockstep:
            return None
        return replace(self, cell=plain)

    def command(self, folder: Path, data: Path | None, timed: bool = False) -> list[str]:
        """Return the command line, with ``folder`` as run folder and the folder of CIFAR-10.

        With ``timed``, all gradients are zero.
        """
        cell = self.cell
        servers = 1 if find_algorithm(self.algorithm).has_servers else 0
        own = [word for pair in self.options for word in pair]
        name = f"{cell.task} timed" if timed else cell.task
        arguments = [name, folder, self.seed, cell.steps, cell.workers, self.peak, POINTS]
        if cell.task != "gpt" and not timed:
            if data is None:
                raise UserError(f"--data-dir: {cell.task} requires the folder of CIFAR-10; give it")
            arguments.append(data)
        words = [sys.executable, "-m", "aladdin_mpi.simulate", str(PROGRAM)]
        words += ["--algorithm", self.algorithm, *own, *cell.options(self.seed, servers)]
        return [*words, "--", *map(str, arguments)]


def carry_out(run: Run, data: Path | None, timed: bool = False) -> dict[str, Any]:
    """Simulate a run and return its figures; with ``timed``, without learning anything.

    Returns:
        ``loss`` on the held-out samples; ``curve``, a list of evaluations with ``samples``,
        ``seconds`` and ``test_loss``; ``seconds`` of the whole run; ``waiting``, a share of the
        workers' time until all samples are granted; ``sent`` and ``received`` by a worker per step,
        relative to an fp32 gradient; ``cpu_seconds`` of this machine.

    Raises:
        UserError: the run failed.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outer-") as temporary:
        folder = Path(temporary) / "run"
        done = subprocess.run(
            run.command(folder, data, timed),
            capture_output=True,
            text=True,
            check=False,
            env=harness.environment(),
        )
        if done.returncode:
            raise UserError(f"{run.key}: the run failed:\n{done.stdout}{done.stderr}")
        summary = json.loads((folder / "summary.json").read_text())
        lines = [json.loads(text) for text in (folder / "metrics.jsonl").open()]
        received = json.loads((folder / RECEIVED_FILE).read_text())
    return _figures(run.cell, summary, lines, received) | {"took": time.monotonic() - began}


def _figures(
    cell: Cell, summary: Mapping[str, Any], lines: Sequence[Mapping[str, Any]], received: int
) -> dict[str, Any]:
    expected = PARAMETERS[cell.task]
    if summary["parameters"] != expected:
        raise UserError(
            f"{cell.task}: expected {expected} parameters, got {summary['parameters']}; correct "
            "PARAMETERS, which the links depend on"
        )
    keys = ("samples", "seconds", "test_loss", "test_accuracy")
    curve = [
        {key: line[key] for key in keys if key in line} for line in lines if line["kind"] == "eval"
    ]
    granted = [
        line["wait_fraction"]
        for line in lines
        if line["kind"] == "train" and line["samples"] == summary["samples"]
    ]
    steps = cell.steps * cell.workers
    return {
        "loss": curve[-1]["test_loss"],
        "curve": curve,
        "seconds": summary["seconds"],
        "waiting": granted[0],
        "sent": summary["bytes_sent_per_step"] / (4 * expected),
        "received": received / steps / (4 * expected),
    }


def taught(figures: Mapping[str, Any], times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run that learns as in ``figures`` in the time of ``times``."""
    curve = [
        {**line, "seconds": timed["seconds"]}
        for line, timed in zip(figures["curve"], times["curve"], strict=True)
        if line["samples"] == timed["samples"]
    ]
    assert len(curve) == len(times["curve"])
    return {**times, "loss": figures["loss"], "curve": curve}


def time_to(curve: Sequence[Mapping[str, Any]], target: float) -> float | None:
    """Return the steps until a loss is reached, linear between evaluations; None: never."""
    before: Mapping[str, Any] | None = None
    for line in curve:
        loss = line["test_loss"]
        if loss is not None and loss <= target:
            if before is None or before["test_loss"] is None:
                return float(line["seconds"])
            share = (before["test_loss"] - target) / (before["test_loss"] - loss)
            return float(before["seconds"] + share * (line["seconds"] - before["seconds"]))
        before = line
    return None
