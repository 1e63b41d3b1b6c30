"""Ranks that hang over MPI are detected, named and excluded, or the job ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.commands import EPOCH, end_of, metrics, refusal, rises, summary, train, training
from tests.launch import Completed, Job, needs
from tests.messages import check_names
from tests.run.jobs import ULFM, checkpoints, samples_so_far, wait_until

pytestmark = [needs("openmpi"), pytest.mark.slow]

SILENCE = 6.0
PLAN = ["--log-every", 320, "--checkpoint-every", EPOCH, "--worker-timeout", SILENCE]
ENDLESS = [*PLAN, "--epochs", 10_000, "--lr-schedule", "constant"]
SUSPENDED = 75
BATCH = 32
SERVED = ("aladdin", "bsp")
"""Algorithms with a server, so that two of four ranks remain as workers."""


def host() -> str:
    return os.uname().nodename


def stop(job: Job, run_dir: Path, rank: int) -> int:
    """Make a rank hang as soon as there is a checkpoint, and return its process."""
    wait_until(job, lambda: checkpoints(run_dir), seconds=100)
    pid = job.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    return pid


def suspend_after_another_epoch(job: Job, run_dir: Path, first: int) -> Completed:
    """Suspend the job by its first rank once it has trained on, and check how it ends."""
    enough = samples_so_far(run_dir) + EPOCH
    wait_until(job, lambda: samples_so_far(run_dir) >= enough)
    os.kill(job.pid(first), signal.SIGUSR1)
    completed = job.wait(60)
    assert completed.returncode == SUSPENDED, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    assert end_of(str(run_dir), 10)
    return completed


@pytest.mark.parametrize(
    ("algorithm", "returns"),
    [
        ("ar-sgd", True),  # its all-reduce must not be completed by the rank that returns
        pytest.param("aladdin", True, marks=pytest.mark.long),
        pytest.param("aladdin", False, marks=pytest.mark.long),
        pytest.param("gosgd", False, marks=pytest.mark.long),
        pytest.param("gosgd", True, marks=pytest.mark.long),
        pytest.param("bsp", True, marks=pytest.mark.long),
    ],
)
def test_surviving_ranks_continue_after_a_worker_hangs(
    tmp_path: Path, algorithm: str, returns: bool
) -> None:
    """It gets a place again if it returns; if it never does, it is killed with the job."""
    run = tmp_path / "run"
    with training(4, run, "--algorithm", algorithm, *ENDLESS, mpirun=ULFM) as job:
        pid = stop(job, run, 2)
        job.wait_for(f"no heartbeat for {SILENCE:g} s at sample")
        if returns:
            os.kill(pid, signal.SIGCONT)
            job.wait_for(f"rank 2 (host {host()}) was excluded")
            job.wait_for(f"rank 2 (host {host()}) has returned")
            job.wait_for("the run continues with")
        completed = suspend_after_another_epoch(job, run, 0)
        named = [line for line in completed.stderr.splitlines() if "no heartbeat" in line]
        check_names(
            named[0],
            f"rank 2 (host {host()}) ",
            "excluded",
            "with 2 workers" if algorithm in SERVED else "with 3 workers",
        )
    samples = metrics(run)[-1]["samples"] + 3 * EPOCH
    train(4, None, "--resume", run, "--samples", samples, mpirun=ULFM)
    figures = summary(run)
    (failure,) = figures["failures"]
    assert (failure["rank"], failure["what"]) == (2, "left out")
    assert ("returned" in failure) == returns
    assert figures["samples"] == samples
    assert figures["samples_lost"] == failure["samples_lost"] < EPOCH
    lost = figures.get("gradients_lost", 0)
    assert figures["gradients_computed"] == figures["gradients_applied"] + lost
    if algorithm in SERVED:  # which count the failed worker's gradients too
        assert BATCH * figures["gradients_computed"] >= samples - figures["samples_lost"]
    assert rises(metrics(run, "train"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("stopped", "status"), [([2, 3], 0), pytest.param([0, 1, 2], 1, marks=pytest.mark.long)]
)
def test_job_ends_with_several_stopped_ranks(
    tmp_path: Path, stopped: list[int], status: int
) -> None:
    """They are killed, as Open MPI's launcher would wait for them. One rank alone is too few."""
    run = tmp_path / "run"
    plan = ["--algorithm", "gosgd", *PLAN, "--epochs", 8]
    with training(4, run, *plan, mpirun=ULFM) as job:
        for rank in stopped:
            stop(job, run, rank)
        completed = job.wait(120)
    assert completed.returncode == status, repr(completed)
    names = ", ".join(f"rank {rank} (host {host()})" for rank in stopped)
    check_names(completed.stderr, f"still hanging, killed: {names}")
    assert "Traceback" not in completed.stderr, repr(completed)
    assert end_of(str(run), 10)
    if status:
        check_names(refusal(completed), "rank 0 ", "no heartbeat", f"--resume {run}")
        return
    assert "MPI_ABORT" not in completed.stderr
    assert [failure["rank"] for failure in summary(run)["failures"]] == stopped
    assert summary(run)["samples"] == 8 * EPOCH


@pytest.mark.long
@pytest.mark.parametrize("returns", [True, False])
def test_surviving_ranks_continue_after_rank_0_hangs(tmp_path: Path, returns: bool) -> None:
    """Its standby coordinator excludes it, and the first rank of the next group takes over."""
    run = tmp_path / "run"
    plan = ["--algorithm", "aladdin", "--servers", 2, *PLAN, "--epochs", 40, "--slowdown", "0=3"]
    with training(5, run, *plan, mpirun=ULFM) as job:
        pid = stop(job, run, 0)
        job.wait_for(" with 3 workers and 1 server from sample")
        if returns:
            os.kill(pid, signal.SIGCONT)
            job.wait_for(f"rank 0 (host {host()}) was excluded")
            job.wait_for(f"rank 0 (host {host()}) has returned")
        completed = job.wait(120)
    assert completed.returncode == 0, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    assert ("still hanging" in completed.stderr) != returns
    (failure,) = summary(run)["failures"]
    assert (failure["rank"], failure["what"]) == (0, "left out")
    assert summary(run)["samples"] == 40 * EPOCH
    assert end_of(str(run), 10)


@pytest.mark.long
def test_rank_that_does_not_join_in_time_returns(tmp_path: Path) -> None:
    """It hangs as another rank fails, so that the leader excludes it and not a heartbeat."""
    run = tmp_path / "run"
    plan = ["--algorithm", "sgp", *ENDLESS]
    with training(4, run, *plan, mpirun=ULFM) as job:
        pid = stop(job, run, 2)
        os.kill(job.pid(0), signal.SIGKILL)
        job.wait_for("the run continues with 2 workers")
        os.kill(pid, signal.SIGCONT)
        job.wait_for(f"rank 2 (host {host()}) has returned")
        job.wait_for("the run continues with 3 workers")
        suspend_after_another_epoch(job, run, 1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "hanging", "requires_ulfm"),
    [("aladdin", 2, True), pytest.param("asp", 0, False, marks=pytest.mark.long)],
)
def test_job_ends_if_it_cannot_continue_without_the_hanging_rank(
    tmp_path: Path, algorithm: str, hanging: int, requires_ulfm: bool
) -> None:
    run = tmp_path / "run"
    with training(4, run, "--algorithm", algorithm, *ENDLESS) as job:
        stop(job, run, hanging)
        completed = job.wait(90)
    assert completed.returncode not in (0, SUSPENDED)
    line = refusal(completed)
    check_names(line, f"rank {hanging} (host {host()}) ", "no heartbeat")
    assert ("--with-ft ulfm" in line) == requires_ulfm
    check_names(completed.stderr, f"--resume {run}")
    assert end_of(str(run), 10)


@pytest.mark.long
def test_suspended_and_continued_job_excludes_no_rank(tmp_path: Path) -> None:
    """Batch systems suspend jobs in this way: no rank may be considered hanging afterwards."""
    run = tmp_path / "run"
    plan = ["--algorithm", "aladdin", *PLAN, "--epochs", 4, "--slowdown", "0=20,1=20,2=20"]
    with training(4, run, *plan, mpirun=ULFM) as job:
        stop(job, run, 0)
        pids = [job.pid(rank) for rank in range(4)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(4 * SILENCE)
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        completed = job.wait(120)
    assert completed.returncode == 0, repr(completed)
    assert summary(run)["failures"] == []
    assert "heartbeat" not in completed.stderr and "excluded" not in completed.stderr
