"""Evaluations that the workers make in equal parts: the figures are those of one rank."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.commands import metrics, summary, train, training
from tests.launch import needs

pytestmark = needs("openmpi")

ULFM = ["--with-ft", "ulfm"]
MODEL = """
from torch import nn

def build():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
        nn.Linear(288, 10),
    )
"""
SLOW = """
import time
import torch
from aladdin_mpi.data.datasets import DatasetPair


class Set(torch.utils.data.Dataset):
    def __init__(self, count, pause):
        self.count, self.pause = count, pause

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((4,), float(index % 2)), index % 2


def data():
    return DatasetPair(Set(800, 0.0), Set(300, 0.02), 2, 0, 0, "slow to test")


def build():
    return torch.nn.Linear(4, 2)
"""
"""Three workers take two seconds for an evaluation, and rank 0 alone six."""


def measured(run: Path) -> list[tuple[int, float, float]]:
    return [
        (line["samples"], line["test_accuracy"], line["test_loss"]) for line in metrics(run, "eval")
    ]


def trained(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(run / "model.pt", weights_only=True)
    return found


def small_runs(folder: Path, algorithm: str, runs: dict[str, list[Any]]) -> dict[str, Path]:
    """The folders of short runs with different options."""
    (folder / "small_net.py").write_text(MODEL)
    options = ["--model", "small_net:build", "--algorithm", algorithm, "--epochs", 2]
    for name, more in runs.items():
        train(4, folder / name, *options, *more, modules=folder)
    return {name: folder / name for name in runs}


@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin"])
def test_the_figures_are_those_of_one_rank(tmp_path: Path, algorithm: str) -> None:
    # A rate at which nothing is learned: the model is the same whenever it is copied.
    same = ["--lr", 1e-30, "--eval-every", 0.5, "--evaluate-on"]
    runs = small_runs(
        tmp_path, algorithm, {"alone": [*same, "rank-0"], "shared": [*same, "workers"]}
    )
    found = measured(runs["alone"]), measured(runs["shared"])
    for run, lines in zip(runs.values(), found, strict=True):
        assert len(lines) >= 2 and lines[-1][0] == summary(run)["samples"]
    figures = [line[1:] for lines in found for line in lines]
    assert figures == [(figures[0][0], pytest.approx(figures[0][1], rel=1e-6))] * len(figures)


def test_training_draws_as_without_evaluations(tmp_path: Path) -> None:
    """Its dropout: no evaluation draws from the generator, or puts it back."""
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


def test_rank_0_measures_alone_where_a_worker_has_died(tmp_path: Path) -> None:
    (tmp_path / "slow_set.py").write_text(SLOW)
    run = tmp_path / "run"
    options: list[Any] = [
        "--algorithm",
        "aladdin",
        "--model",
        "slow_set:build",
        "--dataset",
        "slow_set:data",
    ]
    options += ["--slowdown", "0=2", "--epochs", 60, "--eval-every", 1, "--log-every", 80]
    options += ["--evaluate-on", "workers"]
    with training(4, run, *options, modules=tmp_path, mpirun=ULFM) as job:
        end = time.monotonic() + 60
        while not (run / "metrics.jsonl").exists() or len(metrics(run, "train")) < 12:
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.02)
        # An evaluation has begun with the second epoch, and takes longer than this.
        os.kill(job.pid(2), signal.SIGKILL)
        done = job.wait(100)
    assert done.returncode == 0, repr(done)
    assert [failure["rank"] for failure in summary(run)["failures"]] == [2]
    lines = measured(run)
    assert len(lines) >= 2 and lines[-1][0] == summary(run)["samples"]
    assert summary(run)["test_accuracy"] == 1.0
