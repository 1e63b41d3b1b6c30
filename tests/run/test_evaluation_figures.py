"""The figures that a script's ``evaluate`` returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.user_metrics import EVALUATED
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import metrics, summary
from tests.messages import naming


def train(folder: Path, figures: Any) -> None:
    def main(transport: Transport) -> None:
        model = nn.Linear(1, 1)
        run = DataParallel(
            model, transport=transport, algorithm="asp", evaluate=lambda _: figures, epochs=2,
            batch_size=2, run_dir=folder, quiet=True, compute_time=1.0,
        )  # fmt: skip
        for x in run.batches([1.0, 2.0, 3.0, 4.0]):
            run.step(model(x.float().view(-1, 1)).sum().backward())

    VirtualCluster(3, Cluster(hosts=1), 0).run(main)


def test_figures_may_be_tensors_and_numbers_of_numpy(tmp_path: Path) -> None:
    figures = {"loss": torch.tensor(0.5), "auc": np.float32(0.25), "hits": 3, "score": 0.75}
    expected = {"loss": 0.5, "auc": 0.25, "hits": 3.0, "score": 0.75}
    train(tmp_path, figures)
    lines = metrics(tmp_path, "eval")
    assert lines
    for line in (*lines, summary(tmp_path)):
        assert {name: line[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("figures", "names"),
    [
        (None, ["evaluate", "a dict", "NoneType"]),
        ({"samples": 3}, ["evaluate", "samples", "another name"]),
        ({"scores": [0.5]}, ["evaluate", "scores", "list", "float()"]),
        ({"score": torch.ones(2)}, ["evaluate", "score", "Tensor", "float()"]),
    ],
)
def test_other_figures_are_refused(tmp_path: Path, figures: Any, names: list[str]) -> None:
    with pytest.raises(UserError, match=naming(*names)):
        train(tmp_path, figures)


def test_names_of_the_run_are_those_of_its_summary(tmp_path: Path) -> None:
    """``evaluate`` may replace the accuracy and loss that the built-in training measures."""
    train(tmp_path, {"score": 0.75})
    own = set(summary(tmp_path)) - {"test_accuracy", "test_loss", "score"}
    own |= {name for line in metrics(tmp_path, "eval") for name in line} - {"score"}
    assert own <= EVALUATED, own - EVALUATED
