"""Runs that are closed before their loop ends, and later runs in the same process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.commands import summary
from tests.launch import Completed, needs
from tests.messages import check_names
from tests.run.program_runs import run_alone, run_program, run_script

pytestmark = needs("openmpi")

FAULTS = """forward RuntimeError
backward RuntimeError
after backward ValueError
algorithm UserError
data OSError
interrupt KeyboardInterrupt
evaluate ZeroDivisionError
constructor MemoryError
"""


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", pytest.param("multistep", marks=pytest.mark.long)])
def test_run_after_a_failed_run_equals_a_fresh_one(tmp_path: Path, algorithm: str) -> None:
    """The failed run leaves no hook, thread or lock, however it is closed."""
    completed = run_alone(tmp_path, "failing_runs", algorithm)
    assert (completed.returncode, completed.stdout) == (0, FAULTS), completed
    assert completed.stderr.count("nn.ModuleDict") == 2, completed


@pytest.mark.long
def test_close_keeps_the_model_of_the_last_step(tmp_path: Path) -> None:
    """As in plain PyTorch. A block that exits without an error ends the run as ``break`` does."""
    completed = run_alone(tmp_path, "closed_runs")
    assert (completed.returncode, completed.stdout, completed.stderr) == (0, "True True\n", "")
    assert not (tmp_path / "run" / "summary.json").exists()
    assert (tmp_path / "left" / "summary.json").exists()


@pytest.mark.long
def test_interactive_session_survives_interrupts_and_errors(tmp_path: Path) -> None:
    completed = run_alone(tmp_path, "interactive_runs")
    assert (completed.returncode, completed.stdout) == (
        0,
        "interrupted\n" * 3 + "still running\n",
    ), completed


def trained(completed: Completed) -> set[str]:
    ranks = re.findall(r"^rank (\d) (.*)$", completed.stdout, re.M)
    assert sorted(rank for rank, _ in ranks) == ["0", "1", "2"], completed
    return {values for _, values in ranks}


def caught(completed: Completed) -> list[str]:
    """Return the errors caught by the ranks."""
    return sorted(re.findall(r"^caught (\w+)$", completed.stdout, re.M))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "failing", "way", "errors"),
    [
        ("ar-sgd", "1", "with", ["ClosedError", "ClosedError", "ValueError"]),
        ("bsp", "1", "close", ["ClosedError", "ClosedError", "ValueError"]),
        pytest.param("ar-sgd", "all", "close", ["ValueError"] * 3, marks=pytest.mark.long),
        pytest.param("bsp", "all", "with", None, marks=pytest.mark.long),
    ],
)
def test_error_on_one_rank_closes_the_run_on_all_ranks(
    tmp_path: Path, algorithm: str, failing: str, way: str, errors: list[str] | None
) -> None:
    """Also for servers; the next run equals a fresh one."""
    completed = run_program(tmp_path, "failing_ranks", algorithm, failing, way, timeout=120)
    assert caught(completed) == errors if errors else len(caught(completed)) == 3, completed
    (weights,) = trained(completed)
    assert not (tmp_path / "failed" / "summary.json").exists()
    assert summary(tmp_path / "run")["samples"] == 2 * 96
    (tmp_path / "fresh").mkdir()
    fresh = run_program(tmp_path / "fresh", "failing_ranks", algorithm, "fresh", way, timeout=120)
    assert trained(fresh) == {weights}


def test_uncaught_error_in_a_with_block_ends_the_job(tmp_path: Path) -> None:
    words = ("bsp", "1", "uncaught")
    completed = run_program(tmp_path, "failing_ranks", *words, check=False, timeout=120)
    assert completed.returncode != 0
    assert "after the failed run" not in completed.stdout
    assert completed.stderr.count("ValueError: in the loop") == 1, completed


def test_second_run_on_several_ranks_is_refused_with_a_remedy(tmp_path: Path) -> None:
    text = """
from torch import nn
from aladdin_mpi import DataParallel
first = DataParallel(nn.Linear(2, 1), samples=8, algorithm="ar-sgd")
DataParallel(nn.Linear(2, 1), samples=8, algorithm="ar-sgd")
"""
    completed = run_script(tmp_path, text, ranks=2, check=False)
    check_names(completed.stderr, "DataParallel:", "run.close()", "with DataParallel")


@pytest.mark.long
def test_close_ends_all_simulated_ranks(tmp_path: Path) -> None:
    """All simulated ranks share one process, and each receives a ``ClosedError``."""
    words = ("--workers", 2, "--", "bsp", "1", "with")
    command = ("-m", "aladdin_mpi.simulate")
    completed = run_alone(tmp_path, "failing_ranks", *words, command=command)
    assert caught(completed) == ["ClosedError", "ClosedError", "ValueError"], completed
    assert len(trained(completed)) == 1


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("leaves", ["break", "error"])
def test_leaving_the_loop_after_its_last_step_keeps_the_results(
    tmp_path: Path, leaves: str, ranks: int
) -> None:
    """Training is complete by then: a block that exits without an error keeps its results."""
    run_program(tmp_path, "left_loops", leaves, ranks=ranks)
    if ranks > 1 or leaves == "break":
        for folder in ("first", "second"):
            assert summary(tmp_path / folder)["samples"] == 3 * 4 * ranks


def test_failed_run_ignored_by_the_script_ends_the_program_with_an_error(
    tmp_path: Path,
) -> None:
    """Python prints an error raised at its exit, but would end with status 0."""
    completed = run_program(tmp_path, "ignored_failure", ranks=2, check=False)
    assert completed.returncode != 0
    assert "aladdin_mpi: error" in completed.stderr and "Traceback" not in completed.stderr, (
        completed
    )
