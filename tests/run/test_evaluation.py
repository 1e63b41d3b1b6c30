"""Evaluation goes on beside training: it neither stops the server nor lengthens the run."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.commands import metrics, rises, summary, train
from tests.launch import needs

pytestmark = needs("openmpi")

STEP = 0.01
"""Seconds that a step takes at least."""
ITEM = 0.02
"""Seconds that a test item takes: 100 items, 2 s for one evaluation."""

MODULE = f"""
import time
import torch
from torch import nn
from aladdin_mpi.data.datasets import DatasetPair


class Set(torch.utils.data.Dataset):
    def __init__(self, count, pause):
        self.count, self.pause = count, pause

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        time.sleep(self.pause)
        return torch.full((4,), float(index % 2)), index % 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        time.sleep({STEP} if torch.is_grad_enabled() else 0)
        return self.layer(x)


def data():
    return DatasetPair(Set(800, 0.0), Set(100, {ITEM}), 2, 0, 0, "slow to test")


def build():
    return Net()
"""


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.long), 2])
def test_training_goes_on_during_an_evaluation(tmp_path: Path, servers: int) -> None:
    (tmp_path / "slow_test.py").write_text(MODULE)
    run_dir = tmp_path / "run"
    options = ["--model", "slow_test:build", "--dataset", "slow_test:data", "--batch-size", 8]
    options += ["--epochs", 9, "--eval-every", 1, "--log-every", 80, "--servers", servers]
    train(servers + 2, run_dir, *options, modules=tmp_path)

    evaluations = metrics(run_dir, "eval")
    assert len(evaluations) >= 3
    assert rises(evaluations)
    # Steps of 0.01 s: an evaluation of 2 s sees many gradients of each worker, if it stops none.
    meanwhile = [line["gradients_meanwhile"] for line in evaluations[:-1]]
    assert max(meanwhile) > 20, meanwhile
    # No gap in the metrics is as long as an evaluation would be.
    moments = [line["seconds"] for line in metrics(run_dir, "train")]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert max(gaps) < 100 * ITEM, gaps
    # What is due while another is under way is left out, and the last one is always made.
    assert len(evaluations) < 9
    assert evaluations[-1]["samples"] == summary(run_dir)["samples"] == 7200
    # The evaluation behind the last sample is no training time.
    assert summary(run_dir)["seconds"] < moments[-1] + 100 * ITEM
