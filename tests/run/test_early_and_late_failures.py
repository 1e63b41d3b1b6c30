"""Ranks that fail before the first step or after the last do not prevent the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands import refusal, summary
from tests.launch import Completed, needs
from tests.messages import check_names
from tests.run.jobs import ULFM
from tests.run.program_runs import run_program
from tests.simulation import start


def run_killed(
    folder: Path, algorithm: str, killed: str, moment: str, check: bool = True
) -> Completed:
    """Train on three ranks, some of which are killed ``before`` or ``after`` the training."""
    words = (algorithm, killed, moment)
    return run_program(folder, "killed_early_or_late", *words, mpirun=ULFM, check=check)


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "killed"), [("asp", 1), ("sgp", 2)])
def test_worker_failing_before_training_is_excluded(
    tmp_path: Path, algorithm: str, killed: int
) -> None:
    """Includes the first worker, whose data are the reference for all others."""
    completed = run_killed(tmp_path, algorithm, str(killed), "before")
    figures = summary(tmp_path / "run")
    assert [(each["rank"], each["what"]) for each in figures["failures"]] == [(killed, "died")]
    assert figures["samples"] == 320 and figures["samples_lost"] == 0
    check_names(completed.stderr, f"rank {killed} (host ", "at sample 0;")


@needs("openmpi")
def test_all_workers_failing_before_training_ends_the_job(tmp_path: Path) -> None:
    completed = run_killed(tmp_path, "asp", "1,2", "before", check=False)
    check_names(refusal(completed), "every worker", "before")


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asp", "ar-sgd"])
def test_worker_failing_after_the_last_sample_is_in_the_summary(
    tmp_path: Path, algorithm: str
) -> None:
    """No rank is needed any more, so no warning says that training continues."""
    completed = run_killed(tmp_path, algorithm, "2", "after")
    figures = summary(tmp_path / "run")
    assert [(each["rank"], each["what"]) for each in figures["failures"]] == [(2, "died")]
    assert figures["samples_lost"] == 0 and figures["figure"] == 1.0
    lines = [line for line in completed.stderr.splitlines() if "rank 2 (host " in line]
    assert any("at sample 320;" in line for line in lines), completed
    assert not any("training" in line for line in lines), completed


@pytest.mark.sample(2)
@pytest.mark.parametrize("algorithm", ["aladdin", "bsp", "gosgd", "sgp"])
def test_worker_failing_before_training_is_excluded_in_simulation(
    tmp_path: Path, algorithm: str
) -> None:
    killed = 1 if algorithm in ("aladdin", "bsp") else 2
    words = ["--algorithm", algorithm, "--workers", 3, "--samples", 320, "--quiet"]
    words += ["--run-dir", tmp_path / "run", "--failures", f"{killed}=0.00001"]
    figures = start(*words)
    assert [each["rank"] for each in figures["failures"]] == [killed]
    assert figures["samples"] == 320 and figures["samples_lost"] == 0
    assert figures["gradients_computed"] == figures["gradients_applied"]


def test_failed_ranks_rejoin_a_resumed_simulation(tmp_path: Path) -> None:
    """As over MPI, even if the rank was required: it failed before the resumed run."""
    plan = ["--workers", 3, "--servers", 2, "--quiet", "--checkpoint-every", 160]
    words = [*plan, "--run-dir", tmp_path / "run", "--samples", 640, "--failures", "0=1.3", "3=1.2"]
    first = start(*words)
    assert (first["workers"], first["servers"], len(first["failures"])) == (2, 1, 2)
    words = ["--resume", tmp_path / "run", "--samples", 960]
    figures = start(*words)
    assert (figures["workers"], figures["servers"], figures["samples"]) == (3, 2, 960)
    assert [each["rank"] for each in figures["failures"]] == [
        each["rank"] for each in first["failures"]
    ]
