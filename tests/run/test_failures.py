"""What goes wrong in mid-run ends the whole job: soon, with its reason, leaving nothing behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import end_of, leftovers, metrics, training
from tests.launch import Completed, Job, needs

pytestmark = needs("openmpi")

SOON = 10.0
"""Seconds within which a job ends after something went wrong."""

MODULE = """
import os, threading, time
from pathlib import Path
from torch import nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK"))
HERE = Path(__file__).parent


def now(word):
    (HERE / "when").write_text(repr(time.time()))
    raise RuntimeError("deliberate: " + word)


class Net(nn.Module):
    def __init__(self, trouble):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.trouble = trouble
        self.steps = 0

    def forward(self, x):
        if self.training:
            time.sleep(0.005)
            self.steps += 1
        self.trouble(self)
        return self.layer(x.flatten(1))


def calm(net):
    pass


def in_a_step(net):
    if net.training and RANK == "2" and net.steps == 20:
        now("in a step")


def in_evaluation(net):
    if not net.training:
        now("in evaluation")


def in_a_thread(net):
    if RANK == "1" and net.steps == 20:
        threading.Thread(target=now, args=("in a thread",)).start()


def good():
    return Net(calm)


def bad_step():
    return Net(in_a_step)


def bad_evaluation():
    return Net(in_evaluation)


def bad_thread():
    return Net(in_a_thread)
"""

BAD_IMPORT = """
import os
from bad import now

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    now("in an import")
"""


@pytest.fixture
def mark() -> dict[str, str]:
    """A variable in the environment of every process of the job, to find them by."""
    return {"ALADDIN_MPI_TEST_MARK": uuid.uuid4().hex}


def ended(job: Job, mark: dict[str, str]) -> Completed:
    """The job's end, checked to leave no process behind."""
    done = job.wait(100)
    assert done.returncode != 0
    assert end_of(mark["ALADDIN_MPI_TEST_MARK"], 5), repr(done)
    return done


def modules(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(MODULE)
    (tmp_path / "bad_import.py").write_text(BAD_IMPORT)
    return tmp_path


def check_traceback(done: Completed, rank: int, word: str) -> None:
    mine = [line for line in done.stderr.splitlines() if line.startswith(f"[rank {rank}] ")]
    assert f"[rank {rank}] Traceback (most recent call last):" in mine, repr(done)
    assert f"[rank {rank}] RuntimeError: deliberate: {word}" in mine, repr(done)
    # The other ranks have nothing to say.
    assert done.stderr.count("Traceback") == 1, repr(done)


@pytest.mark.parametrize(
    ("model", "rank", "word"),
    [
        ("bad:bad_step", 2, "in a step"),
        pytest.param("bad:bad_evaluation", 0, "in evaluation", marks=pytest.mark.long),
        pytest.param("bad:bad_thread", 1, "in a thread", marks=pytest.mark.long),
        ("bad_import:good", 1, "in an import"),
    ],
)
def test_an_exception_ends_the_job(
    tmp_path: Path, mark: dict[str, str], model: str, rank: int, word: str
) -> None:
    options = ["--model", model, "--epochs", 1000]
    with training(3, tmp_path / "run", *options, modules=modules(tmp_path), env=mark) as job:
        done = ended(job, mark)
        seconds = time.time() - float((tmp_path / "when").read_text())
    check_traceback(done, rank, word)
    assert seconds < SOON


@needs("mpich")
def test_an_exception_ends_the_job_under_mpich(tmp_path: Path, mark: dict[str, str]) -> None:
    options = ["--model", "bad:bad_step", "--epochs", 1000]
    run = training(3, tmp_path / "run", *options, modules=modules(tmp_path), env=mark, mpi="mpich")
    with run as job:
        check_traceback(ended(job, mark), 2, "in a step")


@contextmanager
def long_run(
    tmp_path: Path, mark: dict[str, str], every: int = 500, seen: str = "checkpoint/samples-*"
) -> Iterator[Job]:
    """A job in mid-training, which writes a great deal; ``seen`` is there when it begins.

    ``every`` is the interval between checkpoints.
    """
    plan = ["--model", "bad:good", "--epochs", 1000, "--log-every", 32, "--eval-every", 0.1]
    plan += ["--checkpoint-every", every]
    with training(3, tmp_path / "run", *plan, modules=modules(tmp_path), env=mark) as job:
        end = time.monotonic() + 100
        while not list((tmp_path / "run").glob(seen)):
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.05)
        time.sleep(0.5)
        yield job


def check_end(job: Job, mark: dict[str, str], run_dir: Path) -> None:
    """Check that the job, just hurt, ends, and what it leaves."""
    start = time.monotonic()
    done = ended(job, mark)
    assert time.monotonic() - start < SOON
    assert "Traceback" not in done.stderr
    assert len(metrics(run_dir)) > 5
    assert leftovers(run_dir) == []
    check_checkpoint(run_dir)


def check_checkpoint(run_dir: Path) -> None:
    """Whatever bears a checkpoint's name is whole."""
    found = list((run_dir / "checkpoint").glob("samples-*"))
    assert found
    for folder in found:
        manifest = json.loads((folder / "manifest.json").read_text())
        assert len(manifest["parts"]) == 3
        for part in manifest["parts"]:
            content = (folder / part["file"]).read_bytes()
            assert hashlib.sha256(content).hexdigest() == part["sha256"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_signals_to_mpirun(tmp_path: Path, mark: dict[str, str], number: signal.Signals) -> None:
    with long_run(tmp_path, mark) as job:
        job.process.send_signal(number)
        check_end(job, mark, tmp_path / "run")


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_job(tmp_path: Path, mark: dict[str, str], rank: int) -> None:
    with long_run(tmp_path, mark) as job:
        os.kill(job.pid(rank), signal.SIGKILL)
        check_end(job, mark, tmp_path / "run")


def test_a_failing_handler_ends_the_job(tmp_path: Path, mark: dict[str, str]) -> None:
    """Rank 0 writes metrics while it handles a worker's message."""
    # No checkpoints: the other ranks write none and so cannot be the first to fail.
    with long_run(tmp_path, mark, every=10**9, seen="metrics.jsonl") as job:
        (tmp_path / "run").rename(tmp_path / "gone")
        start = time.monotonic()
        done = ended(job, mark)
    assert time.monotonic() - start < SOON
    assert "[rank 0] FileNotFoundError" in done.stderr
