"""A host's link is cut during training: the other workers continue, and no rank hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from benchmarks import netns
from benchmarks.lab import Lab
from tests import warm
from tests.commands import EPOCH, end_of, metrics, running, words
from tests.launch import rank_processes

REASON = Lab.available()

pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.slow,
]

SILENCE = 5
SUSPENDED = 75
PLAN = ["--worker-timeout", SILENCE, "--epochs", 10_000, "--lr-schedule", "constant"]


class Run:
    """A job in the lab, whose output can be read while it runs."""

    def __init__(self, lab: Lab, folder: Path, placement: list[int], *options: object) -> None:
        self.folder = folder / "run"
        self._log = (folder / "output.log").open("w+")
        train = [warm.python(), "-m", "aladdin_mpi.train"]
        program = [*train, *words(self.folder, [*PLAN, "--log-every", 320, *options])]
        command = lab.mpirun_command(placement, program, options=["--with-ft", "ulfm"])
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT
        )

    def pid(self, rank: int) -> int:
        return rank_processes(sorted(running(str(self.folder))))[rank]

    def said(self) -> str:
        return Path(self._log.name).read_text()

    def reports(self, pattern: str) -> bool:
        return re.search(pattern, self.said()) is not None

    def until(self, what: Callable[[], bool], seconds: float = 100) -> None:
        end = time.monotonic() + seconds
        while not what():
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.05)

    def samples(self) -> int:
        if not (self.folder / "metrics.jsonl").exists():
            return 0
        lines = metrics(self.folder)
        return int(lines[-1]["samples"]) if lines else 0


@contextmanager
def cut(lab: Lab, host: int) -> Iterator[None]:
    """Take down a host's link to the switch within the block."""
    port = ["ip", "-n", f"{lab.name}-switch", "link", "set", f"h{host}"]
    netns.run_tool(*port, "down")
    try:
        yield
    finally:
        netns.run_tool(*port, "up")


@pytest.mark.long
def test_workers_behind_cut_link_are_excluded_and_reported(tmp_path: Path) -> None:
    def name_of(rank: int) -> str:
        return re.escape(f"rank {rank} (host {lab.host_name(2)})")

    with Lab(hosts=3) as lab:
        run = Run(lab, tmp_path, [0, 1, 2, 2])
        run.until(lambda: run.samples() >= EPOCH)
        with cut(lab, 2):
            for rank in (2, 3):
                run.until(
                    partial(run.reports, rf"{name_of(rank)} .*\bheartbeat\b.*\b{SILENCE} s\b")
                )
        # Reported by rank 0, or by the workers themselves if they detect it first.
        for rank in (2, 3):
            run.until(partial(run.reports, rf"{name_of(rank)} .*\b(excluded|cut off)\b"))
        samples = run.samples()
        run.until(lambda: run.samples() >= samples + EPOCH)
        os.kill(run.process.pid, signal.SIGUSR1)  # forwarded by mpirun
        assert run.process.wait(60) == SUSPENDED, run.said()
        assert "Traceback" not in run.said()
        assert end_of(str(run.folder), 10)


@pytest.mark.long
def test_only_larger_side_continues_if_link_of_rank_0_is_cut(tmp_path: Path) -> None:
    """Both could, and would write to the same files."""
    with Lab(hosts=3) as lab:
        hosts = [0, 1, 2, 0, 1]
        run = Run(lab, tmp_path, hosts, "--algorithm", "gosgd", "--worker-timeout", 2 * SILENCE)
        run.until(lambda: run.samples() >= EPOCH)
        first = run.pid(0)
        with cut(lab, 0):
            run.until(lambda: not Path(f"/proc/{first}").exists())
        rank = r"rank \d \(host {}\)".format
        zero, one = rank(lab.host_name(0)), rank(lab.host_name(1))
        run.until(partial(run.reports, f"{one} has sent no heartbeat .*{zero} .*cut, and exits"))
        run.until(partial(run.reports, f"{zero} .*excluded.*{one} is the new coordinator"))
        assert not run.reports(f"{one} .*excluded")
        samples = run.samples()
        run.until(lambda: run.samples() >= samples + EPOCH)
        os.kill(run.process.pid, signal.SIGUSR1)
        assert run.process.wait(60) == SUSPENDED, run.said()
        assert "Traceback" not in run.said()


@pytest.mark.long
def test_rank_0_continues_if_most_ranks_of_other_hosts_hang(tmp_path: Path) -> None:
    """The silence is that of a cut link, but the other side does not claim the run."""
    hosts, hanging = [0, 1, 1, 1, 0], (1, 2, 4)
    with Lab(hosts=2) as lab:
        names = [re.escape(f"rank {r} (host {lab.host_name(hosts[r])})") for r in hanging]
        run = Run(lab, tmp_path, hosts, "--algorithm", "gosgd", "--epochs", 8)
        run.until(lambda: run.samples() >= EPOCH)
        for rank in hanging:
            os.kill(run.pid(rank), signal.SIGSTOP)
        assert run.process.wait(100) == 0, run.said()
    for name in names:
        assert run.reports(f"{name} has sent no heartbeat .*excluded"), run.said()
    assert metrics(run.folder)[-1]["samples"] == 8 * EPOCH
    assert end_of(str(run.folder), 10)


@pytest.mark.long
@pytest.mark.parametrize(
    ("stopped", "killed"),
    [
        pytest.param([1, 3], True, id="one per host"),
        pytest.param([2, 3], False, id="a whole host", marks=pytest.mark.long),
    ],
)
def test_job_ends_with_stopped_ranks_on_two_hosts(
    tmp_path: Path, stopped: list[int], killed: bool
) -> None:
    """Ranks of their host kill them; where there is none, Open MPI ends them."""
    with Lab(hosts=2) as lab:
        names = [re.escape(f"rank {r} (host {lab.host_name(r // 2)})") for r in stopped]
        run = Run(lab, tmp_path, [0, 0, 1, 1], "--algorithm", "gosgd", "--epochs", 8)
        run.until(lambda: run.samples() >= EPOCH)
        for rank in stopped:
            os.kill(run.pid(rank), signal.SIGSTOP)
        assert run.process.wait(100) == 0, run.said()
    end = "killed" if killed else "ended with the job"
    for name in names:
        assert run.reports(rf"still hanging, {end}: .*{name}"), run.said()
    assert metrics(run.folder)[-1]["samples"] == 8 * EPOCH
    assert end_of(str(run.folder), 10)
