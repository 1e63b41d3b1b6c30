"""A folder in which a run is writing is not given to another."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.run import run_folder
from tests.commands import refusal, simulate, summary, train, training
from tests.launch import ROOT

# Takes a folder as a run does, and starts what a data loader is: a fork that outlives it.
HOLDER = """
import os, sys, time
from pathlib import Path
from aladdin_mpi.run import run_lock
lock = run_lock.take(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(100)
    os._exit(0)
time.sleep(100)
"""
IN_USE = "--run-dir: expected a folder that no other run is using"


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The id of a process that has taken ``tmp_path``, of the Slurm job 77."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    started = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    parent, child = map(int, started.stdout.readline().split())
    try:
        yield parent
    finally:
        started.kill()
        os.kill(child, signal.SIGKILL)
        started.wait(timeout=20)


def test_it_is_refused_and_its_owner_named(tmp_path: Path, holder: int) -> None:
    with pytest.raises(UserError, match=f"{IN_USE}, got '{tmp_path}', where process {holder} on "):
        run_folder.take(tmp_path)


def test_whoever_is_killed_has_it_no_more(tmp_path: Path, holder: int) -> None:
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    lock = run_folder.take(tmp_path)
    assert json.loads((tmp_path / run_folder.NAME).read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_only_its_own_process_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    lock = run_folder.take(Path("run"))
    monkeypatch.chdir("/")
    if (child := os.fork()) == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / run_folder.NAME).exists()
    lock.release()
    assert not (tmp_path / "run" / run_folder.NAME).exists()


def test_a_job_that_is_started_again_takes_it_from_itself(
    tmp_path: Path, holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=IN_USE):
        run_folder.take(tmp_path)  # another step of the same start
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(UserError, match=IN_USE):
        run_folder.take(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    run_folder.take(tmp_path).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EAGAIN])
def test_without_locks_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems have none; some of them answer as if another process had it."""

    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(run_folder, "NAMING_SECONDS", 0.1)
    run_folder.take(tmp_path).release()


LONG = ("--epochs", 1000, "--quiet", "--checkpoint-every", "5epochs")
SHORT = ("--samples", 640, "--quiet")


def test_beside_a_run_over_mpi(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(2, run_dir, *LONG) as job:
        end = time.monotonic() + 60
        while not list(run_dir.glob("checkpoint/samples-*")):
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.05)
        before = (run_dir / "config.toml").read_text()
        others: tuple[tuple[Path | None, list[object]], ...] = (
            (None, ["--resume", run_dir]),
            (run_dir, ["--overwrite", *SHORT]),
        )
        for folder, words in others:
            second = train(2, folder, *words, check=False)
            assert IN_USE in refusal(second)
            assert (run_dir / run_folder.NAME).exists()
            assert (run_dir / "config.toml").read_text() == before
            assert job.process.poll() is None, job.so_far()
    train(2, run_dir, "--overwrite", *SHORT)  # the first was killed
    assert summary(run_dir)["samples"] == 640
    assert not (run_dir / run_folder.NAME).exists()


def test_in_virtual_time(tmp_path: Path, holder: int) -> None:
    done = simulate(tmp_path, *SHORT, check=False)
    assert f"process {holder} on " in refusal(done)
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.NAME]
