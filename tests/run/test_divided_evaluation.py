"""Evaluations divided among the workers yield the figures of an evaluation on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import metrics, summary, train, training
from tests.launch import needs
from tests.run.jobs import ULFM, kill_ranks, metrics_so_far, wait_until
from tests.run.program_runs import PROGRAMS

pytestmark = needs("openmpi")


def measured(run: Path) -> list[tuple[int, float, float]]:
    return [
        (line["samples"], line["test_accuracy"], line["test_loss"]) for line in metrics(run, "eval")
    ]


def trained(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(run / "model.pt", weights_only=True)
    return state


def small_runs(folder: Path, algorithm: str, runs: dict[str, list[Any]]) -> dict[str, Path]:
    """Return the folders of short runs with different options."""
    options = ["--model", "small_net:build", "--algorithm", algorithm, "--epochs", 2]
    for name, more in runs.items():
        train(4, folder / name, *options, *more, modules=PROGRAMS)
    return {name: folder / name for name in runs}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin"])
def test_divided_evaluation_has_the_figures_of_one_rank(tmp_path: Path, algorithm: str) -> None:
    # The learning rate is too low to learn: the model is the same whenever it is copied.
    same = ["--lr", 1e-30, "--eval-every", 0.5, "--evaluate-on"]
    runs = small_runs(
        tmp_path, algorithm, {"alone": [*same, "rank-0"], "shared": [*same, "workers"]}
    )
    evaluations = measured(runs["alone"]), measured(runs["shared"])
    for run, lines in zip(runs.values(), evaluations, strict=True):
        assert len(lines) >= 2 and lines[-1][0] == summary(run)["samples"]
    figures = [line[1:] for lines in evaluations for line in lines]
    assert figures == [(figures[0][0], pytest.approx(figures[0][1], rel=1e-6))] * len(figures)


@pytest.mark.long
def test_evaluation_does_not_change_random_numbers_of_training(tmp_path: Path) -> None:
    """Dropout: no evaluation draws from the generator or resets it."""
    often = ["--eval-every", 0.25, "--evaluate-on"]
    runs = small_runs(
        tmp_path,
        "ar-sgd",
        {
            "only at the end": ["--eval-every", 0],
            "rank 0": [*often, "rank-0"],
            "workers": [*often, "workers"],
        },
    )
    first, *others = (trained(run) for run in runs.values())
    for name, value in first.items():
        assert all(torch.equal(value, each[name]) for each in others), name
    first_line, *lines = (measured(run)[-1] for run in runs.values())
    assert all(line[:2] == first_line[:2] for line in lines)


@pytest.mark.long
def test_rank_0_evaluates_alone_after_a_worker_fails(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options: list[Any] = ["--algorithm", "aladdin", "--model", "slow_test_set:linear"]
    options += ["--dataset", "slow_test_set:more_data"]
    options += ["--slowdown", "0=2", "--epochs", 60, "--eval-every", 1, "--log-every", 80]
    options += ["--evaluate-on", "workers"]
    with training(4, run, *options, modules=PROGRAMS, mpirun=ULFM) as job:
        wait_until(job, lambda: len(metrics_so_far(run, "train")) >= 12)
        # An evaluation began with the second epoch, and takes longer than this.
        kill_ranks(job, [2])
        completed = job.wait(100)
    assert completed.returncode == 0, repr(completed)
    assert [failure["rank"] for failure in summary(run)["failures"]] == [2]
    lines = measured(run)
    assert len(lines) >= 2 and lines[-1][0] == summary(run)["samples"]
    assert summary(run)["test_accuracy"] == 1.0
