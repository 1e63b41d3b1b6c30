"""Batch jobs of the tests: submission, states and output."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests import warm
from tests.launch import ROOT, environment
from tests.slurm_cluster import SlurmCluster

SCRIPTS = ROOT / "slurm"
GPU_NODES = ("-p", "gpu", "--gpus-per-node=2", "--ntasks-per-node=2", "--cpus-per-task=1")
"""Nodes with two workers each."""
TIMED = ("--compute", "timed", "--compute-time", "0.05", "--model", "size:1", "--device", "cpu")
"""A training that takes time without using the processor."""
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}


@dataclass
class BatchJob:
    """A job in the queue, running or finished."""

    cluster: SlurmCluster
    number: str
    pattern: Path
    """Path of its output; %a stands for the index in an array."""

    def output(self, place: int = 0) -> str:
        """Return its output, or that of a task of an array."""
        path = Path(str(self.pattern).replace("%a", str(place)))
        return path.read_text(errors="replace") if path.exists() else ""

    def states(self) -> set[str]:
        """Return the states of the job, its parts and its tasks."""
        seen = self.cluster.run("squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T")
        return set(seen.stdout.split())

    def wait(self, timeout: float = 270) -> str:
        """Wait for its end; return its state, such as COMPLETED. A requeued job starts at once."""
        self.until(self.ended, timeout, hasten=True)
        return ",".join(sorted(self.states()))

    def ended(self) -> bool:
        """Return whether all of it has ended."""
        seen = self.states()
        return bool(seen) and seen <= ENDED

    def until(
        self, condition: Callable[[], bool], timeout: float = 270, hasten: bool = False
    ) -> None:
        """Wait for a condition.

        Raises:
            AssertionError: the condition did not become true; includes the output.
        """
        end = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > end:
                self.cluster.run("scancel", self.number, check=False)
                logs = "".join(p.read_text() for p in self.pattern.parent.glob("*.out"))
                raise AssertionError(
                    f"job {self.number}: {self.states()} after {timeout} s\n{logs}"
                )
            if hasten:  # Slurm would make a requeued job wait for two minutes
                self.hasten()
            time.sleep(0.3)

    def hasten(self) -> None:
        """Let requeued tasks start in two seconds; their predecessors must have ended by then."""
        words = ("squeue", "-h", "-r", "-t", "PENDING", "-j", self.number, "-o", "%i %r %S")
        for line in self.cluster.run(*words, check=False).stdout.splitlines():
            number, reason, start = line.split(maxsplit=2)
            if reason == "BeginTime" and start != "N/A" and _seconds_until(start) > 10:
                self.cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now+2seconds")


def _seconds_until(moment: str) -> float:
    """Return the seconds until a local time in Slurm's format."""
    return (datetime.fromisoformat(moment) - datetime.now()).total_seconds()


def submit(
    cluster: SlurmCluster,
    script: str,
    options: Sequence[object],
    words: Sequence[object],
    env: Mapping[str, str] | None = None,
) -> BatchJob:
    """Run ``sbatch OPTIONS slurm/SCRIPT WORDS`` in a folder that is removed with the cluster."""
    name = f"{script.partition('.')[0]}-{time.monotonic_ns()}"
    output = cluster.shared / f"{name}.out"
    if "--array" in " ".join(map(str, options)):
        output = cluster.shared / f"{name}-%a.out"
    completed = cluster.run(
        *("sbatch", "--parsable", "--chdir", cluster.shared, "--output", output),
        *(*options, SCRIPTS / script, *words),
        env=_variables(env or {}),
    )
    return BatchJob(cluster, completed.stdout.strip().partition(";")[0], output)


def submit_array(
    cluster: SlurmCluster,
    options: Sequence[object],
    words: Sequence[object],
    env: Mapping[str, str],
) -> BatchJob:
    """Run ``examples/slurm_array.sh WORDS``, with the site's ``options``."""
    output = cluster.shared / f"array-{time.monotonic_ns()}-%a.out"
    site = ["--parsable", "--chdir", cluster.shared, "--output", output, *options]
    completed = cluster.run(
        *("bash", ROOT / "examples" / "slurm_array.sh", *words),
        env=_variables({"SBATCH_ARGS": " ".join(map(str, site)), **env}),
    )
    return BatchJob(cluster, completed.stdout.strip().partition(";")[0], output)


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment from which a job is submitted."""
    variables = {
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "PYTHON": warm.python(),
        "PYTHONPATH": str(ROOT),
        "ALADDIN_SLURM": str(SCRIPTS),
    }
    return environment("openmpi", {**variables, **env})
