"""``--join``: another job saves its run and ends, and this one resumes it with its own ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import CONFIG_NAME
from aladdin_mpi.run import handover, run_folder
from tests.commands import EPOCH, metrics, refusal, rises, summary, train, training
from tests.launch import needs
from tests.messages import check_names
from tests.run.jobs import samples_so_far, wait_until

HOLDER = """
import sys, time
from pathlib import Path
from aladdin_mpi.run import run_folder
lock = run_folder.take(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(60)
"""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run folder in another process, as a run does that never looks for a request."""
    (folder / CONFIG_NAME).touch()
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "before", "after"),
    [("aladdin", 3, 4), pytest.param("ar-sgd", 3, 2, marks=pytest.mark.long)],
)
def test_running_job_hands_its_run_to_another_job(
    tmp_path: Path, algorithm: str, before: int, after: int
) -> None:
    run, total = tmp_path / "run", 12 * EPOCH
    plan = ["--algorithm", algorithm, "--samples", total, "--log-every", 320]
    with training(before, run, *plan, "--slowdown", "0=20") as job:
        wait_until(job, lambda: samples_so_far(run) >= EPOCH, seconds=100)
        joined = train(after, None, "--join", run)
        completed = job.wait(30)
    assert completed.returncode == os.EX_TEMPFAIL, repr(completed)
    check_names(completed.stderr, "stopped by --join of a job", f"{after} ranks")
    check_names(joined.stderr, "waiting until the run in", str(run))
    figures = summary(run)
    assert figures["samples"] == total
    assert figures["workers"] == after - (algorithm == "aladdin")
    assert rises(metrics(run, "train"))
    left = [run / name for name in (run_folder.NAME, run_folder.REQUEST)]
    assert not any(path.exists() for path in left)
    assert "is complete" in train(after, None, "--join", run).stdout


def test_request_is_withdrawn_if_the_run_does_not_end(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(UserError, match=r"not ended within 0.5 s.*--timeout"):
        handover.receive(tmp_path, 2, 0.5)
    assert not (tmp_path / run_folder.REQUEST).exists()


def test_folder_of_an_ended_job_is_received_at_once(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert run_folder.is_in_use(tmp_path)
    handover.receive(tmp_path, 2, 0.0)  # the job has been killed, and its lock file remains


def test_stale_request_does_not_stop_the_next_run(tmp_path: Path) -> None:
    (tmp_path / run_folder.REQUEST).write_text("{}")
    run_folder.take(tmp_path).release()
    assert not (tmp_path / run_folder.REQUEST).exists()


@needs("openmpi")
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--resume", "auto"], ["--join", "--resume"]),
        ([], ["--join", "config.toml"]),
        (["--batch-size", 8], ["--batch-size", "--resume"]),
    ],
)
def test_join_refuses_what_it_cannot_resume(
    tmp_path: Path, options: list[object], names: list[str]
) -> None:
    completed = train(2, None, "--join", tmp_path / "none", *options, check=False)
    check_names(refusal(completed), *names)
