"""Evaluation runs in parallel to training: it neither stops the server nor extends the run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.commands import metrics, rises, summary, train
from tests.launch import needs
from tests.run.program_runs import PROGRAMS
from tests.run.programs.slow_test_set import ITEM, ITEMS

pytestmark = needs("openmpi")


@pytest.mark.long
@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_training_continues_during_an_evaluation(tmp_path: Path, servers: int) -> None:
    run_dir = tmp_path / "run"
    options = [
        "--model",
        "slow_test_set:slow_net",
        "--dataset",
        "slow_test_set:data",
        "--batch-size",
        8,
    ]
    options += ["--epochs", 9, "--eval-every", 1, "--log-every", 80, "--servers", servers]
    train(servers + 2, run_dir, *options, modules=PROGRAMS)

    evaluations = metrics(run_dir, "eval")
    assert len(evaluations) >= 3
    assert rises(evaluations)
    # Steps of 0.01 s: during an evaluation of 2 s, many gradients of each worker arrive.
    during = [line["gradients_meanwhile"] for line in evaluations[:-1]]
    assert max(during) > 20, during
    # The metrics have no gap as long as an evaluation.
    moments = [line["seconds"] for line in metrics(run_dir, "train")]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert max(gaps) < ITEMS * ITEM, gaps
    # An evaluation that is due during another is skipped, except for the last one.
    assert len(evaluations) < 9
    assert evaluations[-1]["samples"] == summary(run_dir)["samples"] == 7200
    # The evaluation after the last sample does not count as training time.
    assert summary(run_dir)["seconds"] < moments[-1] + ITEMS * ITEM
