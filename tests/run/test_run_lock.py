"""The lock that prevents a second run from using a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.run import run_folder
from tests.commands import refusal, simulate, summary, train, training
from tests.messages import check_names, naming
from tests.run.jobs import checkpoints, wait_until
from tests.run.program_runs import HERE, program


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the id of a process of Slurm job 77 that has locked ``tmp_path``."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    started = subprocess.Popen(
        [sys.executable, program("lock_holder"), str(tmp_path)],
        env={**os.environ, **HERE},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    parent, child = map(int, started.stdout.readline().split())
    try:
        yield parent
    finally:
        started.kill()
        os.kill(child, signal.SIGKILL)
        started.wait(timeout=20)


@pytest.mark.long
def test_run_lock_in_use_is_refused_and_its_owner_named(tmp_path: Path, holder: int) -> None:
    with pytest.raises(
        UserError, match=naming("--run-dir", str(tmp_path), f"process {holder} on ")
    ):
        run_folder.take(tmp_path)


@pytest.mark.long
def test_run_lock_of_a_killed_process_is_released(tmp_path: Path, holder: int) -> None:
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    lock = run_folder.take(tmp_path)
    assert json.loads((tmp_path / run_folder.NAME).read_text())["pid"] == os.getpid()
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_run_lock_is_released_only_by_its_own_process(
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


@pytest.mark.long
def test_requeued_slurm_job_takes_over_its_own_run_lock(
    tmp_path: Path, holder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=naming("--run-dir", str(tmp_path / run_folder.NAME))):
        run_folder.take(tmp_path)  # another step of the same job
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(UserError, match=naming("--run-dir", str(tmp_path / run_folder.NAME))):
        run_folder.take(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    run_folder.take(tmp_path).release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EAGAIN])
def test_run_lock_is_optional_on_file_systems_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems answer as if another process had the lock."""

    def refuse(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    monkeypatch.setattr(run_folder, "NAMING_SECONDS", 0.1)
    run_folder.take(tmp_path).release()


LONG = ("--epochs", 1000, "--quiet", "--checkpoint-every", "5epochs")
SHORT = ("--samples", 640, "--quiet")


@pytest.mark.long
def test_run_lock_refuses_a_second_run_over_mpi(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with training(2, run_dir, *LONG) as job:
        wait_until(job, lambda: checkpoints(run_dir))
        before = (run_dir / "config.toml").read_text()
        others: tuple[tuple[Path | None, list[object]], ...] = (
            (None, ["--resume", run_dir]),
            (run_dir, ["--overwrite", *SHORT]),
        )
        for folder, words in others:
            second = train(2, folder, *words, check=False)
            check_names(refusal(second), "--run-dir", str(run_dir / run_folder.NAME))
            assert (run_dir / run_folder.NAME).exists()
            assert (run_dir / "config.toml").read_text() == before
            assert job.process.poll() is None, job.so_far()
    train(2, run_dir, "--overwrite", *SHORT)  # the first run was killed
    assert summary(run_dir)["samples"] == 640
    assert not (run_dir / run_folder.NAME).exists()


def test_run_lock_refuses_a_simulation(tmp_path: Path, holder: int) -> None:
    completed = simulate(tmp_path, *SHORT, check=False)
    assert f"process {holder} on " in refusal(completed)
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.NAME]


def test_one_side_of_a_cut_link_claims_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_folder.claim(tmp_path, 1)
    assert not run_folder.claim(tmp_path, 1)
    assert run_folder.claim(tmp_path, 2)  # a later group, divided by another cut
    run_folder.drop_claims(tmp_path)
    assert run_folder.claim(tmp_path, 1)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "touch", full)
    assert not run_folder.claim(tmp_path, 1)
    assert run_folder.claim(tmp_path, 3)
