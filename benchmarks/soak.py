"""Run ALADDIN for hours while workers are killed and paused, and check for leaks and lost samples.

    python -m benchmarks.soak --minutes 120 --check

Four workers train over MPI with ULFM. At random times one is killed, or stopped by SIGSTOP, for a
moment or for longer than `--worker-timeout`. When fewer than two remain, the job is ended,
alternately by a signal, which makes it write a checkpoint, and by SIGKILL of all ranks. It then
resumes from its last checkpoint with all workers. At the end the run is completed and its counters
are compared.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

from aladdin_mpi.errors import SUSPENDED_STATUS, UserError
from aladdin_mpi.process.identity import stat_fields
from benchmarks import harness
from benchmarks.bounds import at_least, positive, whole
from benchmarks.machine import machine

SERVERS = 1
BATCH = 32
SUSPEND = signal.SIGUSR1
PATIENCE = 180.0
"""Time limit in seconds for the start or the end of a job."""
SETTLED = 60.0
"""Seconds after a rank's start from which its memory counts as settled."""
BAR_GROWTH = 10.0
"""Largest growth of the resident memory of rank 0, which runs longest, in MB per hour."""
BAR_REQUESTS = 1.5
"""Largest number of requests at the end, as a multiple of that in a settled job."""

NOTES = """\
Growth: of resident memory, the slope of a line through all observations of one process after its
first minute, the median over the jobs. Requests: MPI requests in flight, the ratio of the medians
of the last and the first quarter of each job after its first minute, and the median over the jobs.
Accounting: samples granted, samples in gradients that the server applied, samples lost with
workers. Pauses shorter than --worker-timeout must not exclude a rank."""


@dataclass
class Events:
    """Counts of the disturbances and of the job's reactions."""

    killed: int = 0
    paused: int = 0
    excluded: int = 0
    came_back: int = 0
    suspended: int = 0
    crashed: int = 0
    unexpected: list[str] = field(default_factory=list)


class Job:
    """One mpirun, from a start or a resume to its end."""

    def __init__(self, folder: Path, number: int, workers: int, options: Sequence[str]) -> None:
        self.observed = folder / f"observed-{number}"
        self.observed.mkdir()
        self.workers = workers
        self.log: IO[str] = (folder / f"job-{number}.log").open("w+")
        program = ["-m", "benchmarks.programs.observed", str(self.observed), "5", "--", *options]
        command = harness.mpirun_here(SERVERS + workers, program, ["--with-ft", "ulfm"])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=harness.environment(),
            start_new_session=True,
        )

    def pids(self) -> dict[int, int]:
        """Return the process of every running rank."""
        found = {}
        for path in self.observed.glob("rank-*.jsonl"):
            lines = path.read_text().splitlines()
            pid = json.loads(lines[0])["pid"] if lines else 0
            if pid and _lives(pid):
                found[int(path.stem.removeprefix("rank-"))] = pid
        return found

    def said(self) -> str:
        """Return the job's output so far."""
        return Path(self.log.name).read_text()

    def wait_for(self, text: str) -> None:
        """Wait until the job has printed ``text``.

        Raises:
            UserError: the job has not printed it in time.
        """
        end = time.monotonic() + PATIENCE
        while text not in self.said():
            if self.process.poll() is not None or time.monotonic() > end:
                raise UserError(f"the job did not print {text!r}:\n{self.said()}")
            time.sleep(0.2)

    def end(self) -> int:
        """Wait for the job's end and return its exit status.

        Raises:
            UserError: the job does not end in time.
        """
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise UserError(f"the job did not end:\n{self.said()}") from None

    def close(self) -> None:
        """Kill the remaining processes."""
        for pid in [*self.pids().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def _lives(pid: int) -> bool:
    try:
        state = stat_fields(pid)[0]
    except OSError:
        return False
    return state not in "ZX"


class Soak:
    """The jobs and their disturbances.

    Args:
        folder: folder for the run and the observations.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args = args
        self._folder = folder
        self._chance = random.Random(args.seed)
        self._end = time.monotonic() + 60 * args.minutes
        self.events = Events()
        self.jobs: list[Path] = []

    def run(self) -> dict[str, Any]:
        """Run all jobs and return the summary of the run."""
        for number in range(1000):
            with self._job(number, self._options(number)) as job:
                job.wait_for("ULFM")
                self._trouble(job)
                self._stop(job, by_signal=number % 2 == 0 or time.monotonic() >= self._end)
            if time.monotonic() >= self._end:
                break
        drawn = self._drawn()
        with self._job(number + 1, ["--resume", str(self._run), "--samples", str(drawn)]) as job:
            if job.end() != 0:
                raise UserError(f"the last job failed:\n{job.said()}")
        summary: dict[str, Any] = json.loads((self._run / "summary.json").read_text())
        return summary

    @property
    def _run(self) -> Path:
        return self._folder / "run"

    def _options(self, number: int) -> list[str]:
        if number:
            return ["--resume", str(self._run)]
        args = self._args
        slow = ",".join(f"{worker}={args.slowdown:g}" for worker in range(args.workers))
        values = {
            "--run-dir": self._run,
            "--algorithm": "aladdin",
            "--model": args.model,
            "--batch-size": BATCH,
            "--samples": 10**9,
            "--lr-schedule": "constant",
            "--eval-every": 1,
            "--checkpoint-every": f"{args.checkpoint:g}s",
            "--worker-timeout": args.worker_timeout,
            "--slowdown": slow,
        }
        return [str(word) for pair in values.items() for word in pair] + args.extra

    @contextlib.contextmanager
    def _job(self, number: int, options: Sequence[str]) -> Iterator[Job]:
        job = Job(self._folder, number, self._args.workers, options)
        self.jobs.append(job.observed)
        try:
            yield job
        finally:
            job.close()

    def _trouble(self, job: Job) -> None:
        """Kill and pause workers until fewer than two remain, or the time is over."""
        left = list(range(SERVERS, SERVERS + self._args.workers))
        kills = [self._kill, self._pause_for_long]
        while len(left) >= 2 and time.monotonic() < self._end:
            for trouble in (self._pause, self._chance.choice(kills)):
                self._sleep(self._args.every * self._chance.uniform(0.7, 1.3))
                if job.process.poll() is not None:
                    raise UserError(f"the job ended unexpectedly:\n{job.said()}")
                if time.monotonic() < self._end:
                    trouble(job, left)

    def _sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._end - time.monotonic())))

    def _kill(self, job: Job, left: list[int]) -> None:
        rank = self._chance.choice(left)
        os.kill(job.pids()[rank], signal.SIGKILL)
        self.events.killed += 1
        left.remove(rank)
        job.wait_for(f"rank {rank} (host {os.uname().nodename}) has failed")

    def _pause(self, job: Job, left: list[int]) -> None:
        rank = self._chance.choice(left)
        words = f"rank {rank} (host {os.uname().nodename}) has not been heard of"
        with self._stopped(job, rank):
            time.sleep(self._chance.uniform(0.2, 0.5) * self._args.worker_timeout)
        self.events.paused += 1
        time.sleep(2.0)
        if words in job.said():
            left.remove(rank)
            self.events.unexpected.append(f"rank {rank} was excluded after a short pause")

    def _pause_for_long(self, job: Job, left: list[int]) -> None:
        rank = self._chance.choice(left)
        left.remove(rank)
        with self._stopped(job, rank):
            job.wait_for(f"rank {rank} (host {os.uname().nodename}) has not been heard of")
            self.events.excluded += 1
            time.sleep(self._chance.uniform(0.0, 2.0) * self._args.worker_timeout)
        job.wait_for(f"rank {rank} (host {os.uname().nodename}) was left out")
        self.events.came_back += 1

    @contextlib.contextmanager
    def _stopped(self, job: Job, rank: int) -> Iterator[None]:
        pid = job.pids()[rank]
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _stop(self, job: Job, by_signal: bool) -> None:
        if by_signal:
            os.kill(job.pids()[0], SUSPEND)
            status = job.end()
            if status != SUSPENDED_STATUS:
                raise UserError(f"expected status {SUSPENDED_STATUS}, got {status}:\n{job.said()}")
            self.events.suspended += 1
        else:
            os.kill(job.process.pid, signal.SIGKILL)
            self.events.crashed += 1

    def _drawn(self) -> int:
        lines = (self._run / "metrics.jsonl").read_text().splitlines()
        last = max(json.loads(line)["samples"] for line in lines)
        # One more epoch, so that the last job trains too.
        return int(last) + 100 * BATCH


def observations(job: Path, rank: int) -> list[dict[str, float]]:
    """Resources of a rank in one job, after its first minute."""
    path = job / f"rank-{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["time"] - lines[0]["time"] > SETTLED]


def slope(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the slope of a line through the observations, per hour."""
    times = [line["time"] / 3600 for line in lines]
    values = [line[name] for line in lines]
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    above = sum((t - middle) * (v - mean) for t, v in zip(times, values, strict=True))
    return above / sum((t - middle) ** 2 for t in times)


def growth(jobs: Sequence[Path], rank: int) -> dict[str, Any]:
    """Return a row of the table: the resources of one rank's processes."""
    long = [lines for job in jobs if len(lines := observations(job, rank)) >= 8]
    ratios = []
    for lines in long:
        quarter = len(lines) // 4
        first, last = lines[:quarter], lines[-quarter:]
        held = [median(line["requests"] for line in part) for part in (first, last)]
        ratios.append(held[1] / held[0] if held[0] else 1.0)
    if not long:
        return {"rank": rank, "processes": 0}
    return {
        "rank": rank,
        "processes": len(long),
        "longest, min": max(lines[-1]["time"] - lines[0]["time"] for lines in long) / 60,
        "resident, MB": median(lines[-1]["resident"] for lines in long) / 1e6,
        "growth, MB/h": median(slope(lines, "resident") for lines in long) / 1e6,
        "requests": median(lines[-1]["requests"] for lines in long),
        "requests, end / start": median(ratios),
        "abandoned": max(lines[-1]["abandoned"] for lines in long),
        "descriptors, growth/h": median(slope(lines, "descriptors") for lines in long),
        "threads": max(line["threads"] for lines in long for line in lines),
    }


def books(summary: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return a description of the run's counters, and of any that do not agree."""
    computed, applied = summary["gradients_computed"], summary["gradients_applied"]
    samples, lost = summary["samples"], summary["samples_lost"]
    text = (
        f"Accounting: {samples} samples granted, {lost} lost with workers; {computed} gradients "
        f"computed, {applied} applied, {summary['gradients_refused']} refused."
    )
    wrong = [] if computed == applied else [f"{computed} gradients computed, {applied} applied"]
    # The last gradients before a checkpoint are of smaller batches, so there may be more.
    if computed * BATCH < samples - lost:
        wrong.append(f"{computed} gradients of up to {BATCH} cannot hold {samples - lost} samples")
    return text, wrong


def missed(rows: Sequence[Mapping[str, Any]], events: Events, wrong: list[str]) -> list[str]:
    """Return a description of each bar that was missed."""
    found = [*wrong, *events.unexpected]
    for row in rows:
        if row.get("growth, MB/h", 0.0) > BAR_GROWTH and row["rank"] == 0:
            found.append(f"rank {row['rank']} grows by {row['growth, MB/h']:.1f} MB in an hour")
        if row.get("requests, end / start", 0.0) > BAR_REQUESTS:
            found.append(f"the requests of rank {row['rank']} grow")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser(
        "soak", "Run ALADDIN for hours while workers are killed and paused."
    )
    add = parser.add_argument
    add("--minutes", type=positive, default=120.0, help="length in minutes")
    add("--workers", type=whole(), default=4, help="number of workers")
    add("--every", type=positive, default=120.0, help="mean seconds between two disturbances")
    add("--checkpoint", type=positive, default=60.0, help="seconds between checkpoints")
    add("--worker-timeout", type=positive, default=15.0, help="--worker-timeout of the run in s")
    add("--model", default="digits", help="model to train")
    add(
        "--slowdown",
        type=at_least(1),
        default=10.0,
        help="slowdown factor of all workers, to reduce the load",
    )
    add("--seed", type=whole(0), default=0, help="random seed of the disturbances")
    add("extra", nargs="*", help="after '--': further options for aladdin_mpi.train")
    args = parser.parse_args(argv)
    facts = machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end the job as well
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        soak = Soak(args, Path(folder))
        summary = soak.run()
        rows = [growth(soak.jobs, rank) for rank in range(SERVERS + args.workers)]
    text, wrong = books(summary)
    events = soak.events
    happened = (
        f"{events.killed} workers killed, {events.paused} paused for a moment, {events.excluded} "
        f"for long and excluded, of which {events.came_back} came back and left; "
        f"{len(soak.jobs)} jobs, {events.suspended} ended by a signal, {events.crashed} by "
        f"SIGKILL; test accuracy {summary['test_accuracy']:.3f}."
    )
    title = f"{args.minutes:g} minutes of ALADDIN with {args.workers} failing workers"
    notes = "\n\n".join([NOTES, text, happened])
    found = harness.Findings(title, rows, notes, missed(rows, events, wrong))
    return harness.publish("soak", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
