"""Run ALADDIN for hours while everything happens to it, and check for leaks and lost samples.

    python -m benchmarks.soak --minutes 120 --check --save

Workers train over MPI with ULFM in the network lab, in a run folder on a small disk. At random
times a worker is killed, one or two are stopped by SIGSTOP, for a moment or for longer than
`--worker-timeout`, a host's link is cut, or the disk is full; excluded workers return. When fewer
than two workers remain, the job ends in one of three ways in turn: by a signal, which makes it
write a checkpoint, by SIGKILL of all ranks, or because another job with another number of workers
takes the run over by `--join`. The next job resumes from the last checkpoint. At the end the run
is completed and its counters are compared.
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from aladdin_mpi.errors import SUSPENDED_STATUS, UserError
from aladdin_mpi.process.identity import stat_fields
from benchmarks import harness, netns
from benchmarks.bounds import at_least, positive, whole
from benchmarks.lab import Lab
from benchmarks.machine import machine

SERVERS = 1
HOSTS = 3
BATCH = 32
DISK_BYTES = 200_000_000
"""Size of the disk with the run folder."""
SUSPEND = signal.SIGUSR1
PATIENCE = 180.0
"""Time limit in seconds for the start or the end of a job, and for its reactions."""
SETTLED = 60.0
"""Seconds after a rank's start from which its memory counts as settled."""
LEAST = 12
"""Smallest number of observations, after that, of a process whose memory is judged."""
BAR_MEMORY = 1.05
"""Largest resident memory of a process at its end, as a multiple of that when it had settled."""
BAR_REQUESTS = 1.5
"""Largest number of requests at the end, as a multiple of that in a settled job."""

NOTES = """\
Resident memory and requests in flight: the ratio of the medians of the last and the first quarter
of each process's observations after its first minute; the largest over the jobs, and for requests
the median. Accounting: samples granted, samples in gradients that the server applied, samples lost
with workers. Short pauses must not exclude a rank, and a checkpoint must follow a full disk."""


@dataclass(frozen=True)
class Trouble:
    """A disturbance: ``cost`` is the number of workers that it costs, at most."""

    name: str
    cost: int
    cause: Callable[[Job, list[int]], None]


class Job:
    """One mpirun, from a start, a resume or a takeover to its end.

    Rank r is on host r modulo their number; the server is rank 0.
    """

    def __init__(
        self, lab: Lab, folder: Path, number: int, workers: int, options: Sequence[object]
    ) -> None:
        self.observed = folder / f"observed-{number}"
        self.observed.mkdir()
        self.workers = list(range(SERVERS, SERVERS + workers))
        self.returns: Counter[int] = Counter()
        self._lab = lab
        self.log: IO[str] = (folder / f"job-{number}.log").open("w+")
        program = ["-m", "benchmarks.programs.observed", str(self.observed), "5", "--"]
        command = lab.mpirun_command(
            SERVERS + workers,
            [sys.executable, *program, *map(str, options)],
            options=["--with-ft", "ulfm"],
        )
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def host(self, rank: int) -> int:
        """Return a rank's host."""
        return rank % self._lab.hosts

    def name(self, rank: int) -> str:
        """Return a rank's name in messages."""
        return f"rank {rank} (host {self._lab.host_name(self.host(rank))})"

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

    def wait_for(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()``.

        Raises:
            UserError: it does not hold in time, or the job has ended.
        """
        end = time.monotonic() + PATIENCE
        while not holds():
            if self.process.poll() is not None or time.monotonic() > end:
                raise UserError(f"the job did not reach this: {what}\n{self.said()}")
            time.sleep(0.2)

    def excludes(self, rank: int) -> bool:
        """Return whether a rank has been excluded, since its last return if any."""
        text = f"{self.name(rank)} has sent no heartbeat"
        return self.said().count(text) > self.returns[rank]

    def returns_or_exits(self, rank: int) -> bool:
        """Return whether an excluded rank has returned, or exited."""
        has_returned = self.said().count(f"{self.name(rank)} has returned") > self.returns[rank]
        return has_returned or rank not in self.pids()

    def wait_for_text(self, text: str) -> None:
        """Wait until the job has printed ``text``."""
        self.wait_for(text, lambda: text in self.said())

    def end(self) -> int:
        """Wait for the job's end and return its exit status.

        Raises:
            UserError: the job does not end in time.
        """
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise UserError(f"the job did not end:\n{self.said()}") from None

    def kill(self) -> None:
        """Kill all of its processes."""
        for pid in [*self.pids().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Kill the remaining processes."""
        self.kill()
        self.log.close()


def _lives(pid: int) -> bool:
    try:
        state = stat_fields(pid)[0]
    except OSError:
        return False
    return state not in "ZX"


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """Mount a small disk on a folder within the block."""
    folder.mkdir()
    size = f"size={DISK_BYTES}"
    netns.run_tool("mount", "-t", "tmpfs", "-o", size, "aladdin-soak", str(folder))
    try:
        yield folder
    finally:
        netns.run_tool("umount", "--lazy", str(folder))


class Soak:
    """The jobs and their disturbances.

    Args:
        lab: the hosts.
        folder: folder for the observations.
        disk: folder for the run.
    """

    def __init__(self, args: argparse.Namespace, lab: Lab, folder: Path, disk: Path) -> None:
        self._args = args
        self._lab = lab
        self._folder = folder
        self._disk = disk
        self._run = disk / "run"
        self._chance = random.Random(args.seed)
        self._end = time.monotonic() + 60 * args.minutes
        self.events: Counter[str] = Counter()
        self.unexpected: list[str] = []
        self.jobs: list[Job] = []
        self._harmless = [
            Trouble("a pause", 0, self._pause),
            Trouble("a pause of two", 0, self._pause_two),
            Trouble("a full disk", 0, self._fill_disk),
        ]
        self._harmful = [
            Trouble("a kill", 1, self._kill),
            Trouble("a long pause", 1, self._pause_for_long),
            Trouble("a long pause of two", 2, self._pause_two_for_long),
            Trouble("a cut link", 2, self._cut_link),
        ]

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._end

    def run(self) -> dict[str, Any]:
        """Run all jobs and return the summary of the run."""
        job = self._start(self._args.workers, self._first_options())
        try:
            while not self._is_over:
                self._disturb(job)
                job = self._replace(job)
            self._suspend(job)
            workers = self._args.workers
            options = ["--resume", self._run, "--allow-resize", "--samples", self._drawn()]
            job = self._start(workers, [*options, *self._slowed(workers)], trains=False)
            if job.end() != 0:
                raise UserError(f"the last job failed:\n{job.said()}")
        finally:
            for each in self.jobs:
                each.close()
        summary: dict[str, Any] = json.loads((self._run / "summary.json").read_text())
        return summary

    def _first_options(self) -> list[object]:
        args = self._args
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
            "--slowdown": ",".join(f"{n}={args.slowdown:g}" for n in range(args.workers)),
        }
        return [word for pair in values.items() for word in pair] + args.extra

    def _start(self, workers: int, options: Sequence[object], trains: bool = True) -> Job:
        job = Job(self._lab, self._folder, len(self.jobs), workers, options)
        self.jobs.append(job)
        if trains:
            job.wait_for_text("ULFM")
        return job

    def _replace(self, job: Job) -> Job:
        """End a job in one of three ways, and start the next one."""
        resume: list[object] = ["--resume", self._run, "--allow-resize"]
        way = len(self.jobs) % 3
        if way == 0:
            self.events["joined by another job"] += 1
            workers = self._args.workers + self._chance.choice([-1, 1])
            following = self._start(workers, ["--join", self._run, *self._slowed(workers)])
            self._await_suspension(job)
            return following
        if way == 1:
            self.events["ended by a signal"] += 1
            self._suspend(job)
        else:
            self.events["ended by SIGKILL"] += 1
            job.kill()
        workers = self._args.workers
        return self._start(workers, [*resume, *self._slowed(workers)])

    def _slowed(self, workers: int) -> list[str]:
        return ["--slowdown", ",".join(f"{n}={self._args.slowdown:g}" for n in range(workers))]

    def _suspend(self, job: Job) -> None:
        os.kill(job.pids()[0], SUSPEND)
        self._await_suspension(job)

    def _await_suspension(self, job: Job) -> None:
        if (status := job.end()) != SUSPENDED_STATUS:
            raise UserError(f"expected {SUSPENDED_STATUS}, got {status}:\n{job.said()}")

    # -- disturbances -----------------------------------------------------------------
    def _disturb(self, job: Job) -> None:
        """Disturb a job until fewer than two workers remain, or the time is over."""
        left = list(job.workers)
        while len(left) >= 2 and not self._is_over:
            possible = [each for each in self._harmful if each.cost < len(left)]
            for trouble in (self._chance.choice(self._harmless), self._chance.choice(possible)):
                pause = self._args.every * self._chance.uniform(0.7, 1.3)
                time.sleep(max(0.0, min(pause, self._end - time.monotonic())))
                if self._is_over:
                    return
                self.events[trouble.name] += 1
                trouble.cause(job, left)
                if job.process.poll() is not None:
                    raise UserError(f"the job ended after {trouble.name}:\n{job.said()}")

    def _kill(self, job: Job, left: list[int]) -> None:
        rank = self._chance.choice(left)
        os.kill(job.pids()[rank], signal.SIGKILL)
        left.remove(rank)
        job.wait_for_text(f"{job.name(rank)} has failed")

    def _pause(self, job: Job, left: list[int], ranks: int = 1) -> None:
        paused = self._chance.sample(left, min(ranks, len(left)))
        with self._stopped(job, paused):
            time.sleep(self._chance.uniform(0.2, 0.5) * self._args.worker_timeout)
        time.sleep(2.0)
        for rank in paused:
            if job.excludes(rank):
                left.remove(rank)
                self.unexpected.append(f"rank {rank} was excluded after a short pause")

    def _pause_two(self, job: Job, left: list[int]) -> None:
        self._pause(job, left, 2)

    def _pause_for_long(self, job: Job, left: list[int], ranks: int = 1) -> None:
        paused = self._chance.sample(left, ranks)
        with self._stopped(job, paused):
            self._await_exclusion(job, left, paused)
            time.sleep(self._chance.uniform(0.0, 2.0) * self._args.worker_timeout)
        self._await_return(job, left, paused)

    def _pause_two_for_long(self, job: Job, left: list[int]) -> None:
        self._pause_for_long(job, left, 2)

    def _cut_link(self, job: Job, left: list[int]) -> None:
        """Cut the link of a host without the server."""
        host = job.host(self._chance.choice([rank for rank in left if job.host(rank) != 0] or left))
        cut = [rank for rank in left if job.host(rank) == host]
        if host == 0 or len(cut) == len(left):
            return self._kill(job, left)
        port = ["ip", "-n", f"{self._lab.name}-switch", "link", "set", f"h{host}"]
        start = time.monotonic()
        netns.run_tool(*port, "down")
        try:
            self._await_exclusion(job, left, cut)
            time.sleep(max(0.0, self._args.cut - (time.monotonic() - start)))
        finally:
            netns.run_tool(*port, "up")
        self._await_return(job, left, cut)

    def _await_exclusion(self, job: Job, left: list[int], ranks: Sequence[int]) -> None:
        for rank in ranks:
            left.remove(rank)
            job.wait_for(f"the exclusion of {job.name(rank)}", partial(job.excludes, rank))

    def _await_return(self, job: Job, left: list[int], ranks: Sequence[int]) -> None:
        """Wait until excluded ranks have returned, or exited as their link seemed cut."""
        for rank in ranks:
            job.wait_for(f"the return of {job.name(rank)}", partial(job.returns_or_exits, rank))
            if rank in job.pids():
                self.events["a return"] += 1
                job.returns[rank] += 1
                left.append(rank)

    def _fill_disk(self, job: Job, left: list[int]) -> None:
        """Fill the disk; after it, the next checkpoint must succeed."""
        filler = self._disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):
                pass
        time.sleep(self._args.full)
        kept = self._checkpoints()
        if not kept:
            self.unexpected.append("no checkpoint remained while the disk was full")
        filler.unlink()
        job.wait_for("a checkpoint", lambda: bool(self._checkpoints() - kept))

    def _checkpoints(self) -> set[str]:
        return {path.name for path in (self._run / "checkpoint").glob("samples-*")}

    @contextlib.contextmanager
    def _stopped(self, job: Job, ranks: Sequence[int]) -> Iterator[None]:
        pids = [job.pids()[rank] for rank in ranks]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

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


def ratio(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """Return the median of the last quarter of the observations by that of the first."""
    quarter = len(lines) // 4
    first, last = (median(line[name] for line in p) for p in (lines[:quarter], lines[-quarter:]))
    return last / first if first else 1.0


def growth(jobs: Sequence[Path], rank: int) -> dict[str, Any]:
    """Return a row of the table: the resources of one rank's processes."""
    long = [lines for job in jobs if len(lines := observations(job, rank)) >= LEAST]
    if not long:
        return {"rank": rank, "processes": 0}
    return {
        "rank": rank,
        "processes": len(long),
        "longest, min": max(lines[-1]["time"] - lines[0]["time"] for lines in long) / 60,
        "resident, MB": median(lines[-1]["resident"] for lines in long) / 1e6,
        "resident, end / start": max(ratio(lines, "resident") for lines in long),
        "requests": median(lines[-1]["requests"] for lines in long),
        "requests, end / start": median(ratio(lines, "requests") for lines in long),
        "abandoned": max(lines[-1]["abandoned"] for lines in long),
        "descriptors, end / start": max(ratio(lines, "descriptors") for lines in long),
        "threads": max(line["threads"] for lines in long for line in lines),
    }


def books(summary: Mapping[str, Any]) -> tuple[str, list[str]]:
    """Return a description of the run's counters, and of any that do not agree."""
    computed, applied = summary["gradients_computed"], summary["gradients_applied"]
    gone = sum(summary.get(f"gradients_{name}", 0) for name in ("dropped", "lost", "refused"))
    samples, lost = summary["samples"], summary["samples_lost"]
    text = (
        f"Accounting: {samples} samples granted, {lost} lost with workers; {computed} gradients "
        f"computed, {applied} applied, {gone} dropped, lost or refused."
    )
    wrong = []
    if computed != applied + gone:
        wrong.append(f"{computed} gradients computed, {applied} applied, {gone} gone")
    # The last gradients before a checkpoint are of smaller batches, so there may be more.
    if computed * BATCH < samples - lost:
        wrong.append(f"{computed} gradients of up to {BATCH} cannot hold {samples - lost} samples")
    return text, wrong


def missed(rows: Sequence[Mapping[str, Any]], wrong: list[str]) -> list[str]:
    """Return a description of each bar that was missed."""
    found = list(wrong)
    for row in rows:
        grown = row.get("resident, end / start", 1.0)
        if grown > BAR_MEMORY:
            found.append(f"rank {row['rank']} grows to {grown:.2f} times its memory")
        if row.get("requests, end / start", 0.0) > BAR_REQUESTS:
            found.append(f"the requests of rank {row['rank']} grow")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = harness.make_parser("soak", "Run ALADDIN for hours while everything happens to it.")
    add = parser.add_argument
    add("--minutes", type=positive, default=120.0, help="length in minutes")
    add("--workers", type=whole(3), default=4, help="number of workers")
    add("--every", type=positive, default=60.0, help="mean seconds between two disturbances")
    add("--checkpoint", type=positive, default=30.0, help="seconds between checkpoints")
    add("--worker-timeout", type=positive, default=15.0, help="--worker-timeout of the run in s")
    add("--cut", type=positive, default=20.0, help="shortest cut of a host's link in s")
    add("--full", type=positive, default=30.0, help="time with a full disk in s")
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
    with (
        tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder,
        disk(Path(folder) / "disk") as run_disk,
        Lab(HOSTS) as lab,
    ):
        soak = Soak(args, lab, Path(folder), run_disk)
        summary = soak.run()
        jobs = [job.observed for job in soak.jobs]
        rows = [growth(jobs, rank) for rank in range(SERVERS + args.workers + 1)]
    text, wrong = books(summary)
    happened = ", ".join(f"{name}: {count}" for name, count in sorted(soak.events.items()))
    happened = f"{happened}; {len(jobs)} jobs, test accuracy {summary['test_accuracy']:.3f}."
    title = f"{args.minutes:g} minutes of ALADDIN with {args.workers} disturbed workers"
    notes = "\n\n".join([NOTES, text, happened])
    found = harness.Findings(title, rows, notes, missed(rows, [*wrong, *soak.unexpected]))
    return harness.publish("soak", argv, args, facts, found)


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
