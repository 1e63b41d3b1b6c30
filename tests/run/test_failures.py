"""A failure during a run ends the whole job quickly, with its reason, and leaves no processes."""

from __future__ import annotations

import hashlib
import json
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.commands import end_of, leftovers, metrics, training
from tests.launch import Completed, Job, needs
from tests.run.jobs import checkpoints, kill_ranks, wait_until
from tests.run.program_runs import PROGRAMS

pytestmark = needs("openmpi")

SOON = 10.0
"""Seconds within which a job ends after something went wrong."""


@pytest.fixture
def mark() -> dict[str, str]:
    """Set a variable in the environment of every process of the job, to find them."""
    return {"ALADDIN_MPI_TEST_MARK": uuid.uuid4().hex}


def ended(job: Job, mark: dict[str, str]) -> Completed:
    """Wait for the job, which must fail, and check that no process remains."""
    completed = job.wait(100)
    assert completed.returncode != 0
    assert end_of(mark["ALADDIN_MPI_TEST_MARK"], 5), repr(completed)
    return completed


def troubled(
    tmp_path: Path, mark: dict[str, str], *options: object, **how: Any
) -> AbstractContextManager[Job]:
    """Start three ranks with a model that writes the time of its failure to the file ``when``."""
    env = {**mark, "TROUBLE_FILE": str(tmp_path / "when")}
    return training(3, tmp_path / "run", *options, modules=PROGRAMS, env=env, **how)


def check_traceback(completed: Completed, rank: int, place: str) -> None:
    own = [line for line in completed.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
    assert f"[rank {rank}] Traceback (most recent call last):" in own, repr(completed)
    assert f"[rank {rank}] RuntimeError: deliberate: {place}" in own, repr(completed)
    # The other ranks print no traceback.
    assert completed.stderr.count("Traceback") == 1, repr(completed)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("model", "rank", "place"),
    [
        ("troubled_models:bad_step", 2, "in a step"),
        pytest.param("troubled_models:bad_evaluation", 0, "in evaluation", marks=pytest.mark.long),
        pytest.param("troubled_models:bad_thread", 1, "in a thread", marks=pytest.mark.long),
        ("troubled_import:good", 1, "in an import"),
    ],
)
def test_exception_on_one_rank_ends_the_job(
    tmp_path: Path, mark: dict[str, str], model: str, rank: int, place: str
) -> None:
    with troubled(tmp_path, mark, "--model", model, "--epochs", 1000) as job:
        completed = ended(job, mark)
        seconds = time.time() - float((tmp_path / "when").read_text())
    check_traceback(completed, rank, place)
    assert seconds < SOON


@pytest.mark.long
@needs("mpich")
def test_exception_on_one_rank_ends_the_job_under_mpich(
    tmp_path: Path, mark: dict[str, str]
) -> None:
    options = ["--model", "troubled_models:bad_step", "--epochs", 1000]
    with troubled(tmp_path, mark, *options, mpi="mpich") as job:
        check_traceback(ended(job, mark), 2, "in a step")


@contextmanager
def long_run(
    tmp_path: Path, mark: dict[str, str], every: int = 500, seen: str = "checkpoint/samples-*"
) -> Iterator[Job]:
    """Yield a job during training that writes frequently; the file ``seen`` exists when it begins.

    ``every`` is the interval between checkpoints.
    """
    plan = [
        "--model",
        "troubled_models:good",
        "--epochs",
        1000,
        "--log-every",
        32,
        "--eval-every",
        0.1,
    ]
    plan += ["--checkpoint-every", every]
    with troubled(tmp_path, mark, *plan) as job:
        wait_until(job, lambda: list((tmp_path / "run").glob(seen)), seconds=100)
        time.sleep(0.5)
        yield job


def check_end(job: Job, mark: dict[str, str], run_dir: Path) -> None:
    """Check that the interrupted job ends, and check its files and processes."""
    start = time.monotonic()
    completed = ended(job, mark)
    assert time.monotonic() - start < SOON
    assert "Traceback" not in completed.stderr
    assert len(metrics(run_dir)) > 5
    assert leftovers(run_dir) == []
    check_checkpoint(run_dir)


def check_checkpoint(run_dir: Path) -> None:
    """Check that every folder with a checkpoint's name is complete."""
    folders = checkpoints(run_dir)
    assert folders
    for folder in folders:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert len(manifest["parts"]) == 3
        for part in manifest["parts"]:
            content = (folder / part["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == part["sha256"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_signal_to_mpirun_ends_the_job_and_keeps_the_checkpoint(
    tmp_path: Path, mark: dict[str, str], number: signal.Signals
) -> None:
    with long_run(tmp_path, mark) as job:
        job.process.send_signal(number)
        check_end(job, mark, tmp_path / "run")


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_killed_rank_ends_the_job_and_keeps_the_checkpoint(
    tmp_path: Path, mark: dict[str, str], rank: int
) -> None:
    with long_run(tmp_path, mark) as job:
        kill_ranks(job, [rank])
        check_end(job, mark, tmp_path / "run")


def test_exception_in_message_handler_ends_the_job(tmp_path: Path, mark: dict[str, str]) -> None:
    """Rank 0 writes metrics while it handles a worker's message."""
    # Without checkpoints, the other ranks write no files and so cannot be the first to fail.
    with long_run(tmp_path, mark, every=10**9, seen="metrics.jsonl") as job:
        (tmp_path / "run").rename(tmp_path / "gone")
        start = time.monotonic()
        completed = ended(job, mark)
    assert time.monotonic() - start < SOON
    assert "[rank 0] FileNotFoundError" in completed.stderr
