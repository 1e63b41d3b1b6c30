"""Half precision with a loss scale that all workers share and that does not change gradients."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from aladdin_mpi import DataParallel
from aladdin_mpi.control.budget import FIRST_EXPONENT
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import summary, train
from tests.launch import needs
from tests.messages import naming
from tests.run.program_runs import run_program

pytestmark = needs("openmpi")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {}),
        pytest.param("ar-sgd", {"clip": 0.1, "accumulate": 2}, marks=pytest.mark.long),
        pytest.param("bsp", {"wait_free": False}, marks=pytest.mark.long),
        ("multistep", {"multistep": {"exchange": "activations"}}),
    ],
)
def test_loss_scale_leaves_training_bit_identical(
    tmp_path: Path, algorithm: str, settings: dict[str, object]
) -> None:
    """The scale is a power of two, so fp32 results are bit-identical."""
    words = (algorithm, json.dumps(settings), tmp_path)
    completed = run_program(tmp_path, "scaled_loss", *words, timeout=120)
    assert completed.stdout.count("equal") == 3


def test_overflowing_gradient_is_skipped_and_halves_the_loss_scale_everywhere(
    tmp_path: Path,
) -> None:
    completed = run_program(tmp_path, "overflowing_loss", tmp_path / "run", ranks=2, timeout=120)
    first, second = re.findall(r"exponents ([\d ]+)", completed.stdout)
    assert first == second  # the workers of a round have the same
    exponents = list(map(int, first.split()))
    assert exponents == sorted(exponents, reverse=True)
    assert exponents[0] == FIRST_EXPONENT and exponents[-1] == FIRST_EXPONENT - 1 - (
        exponents.count(FIRST_EXPONENT) == 4
    )
    assert summary(tmp_path / "run")["gradients_refused"] == 2
    scales = re.findall(r"worker 0 .*: .*overflow.* float16 .* (\d+)\b", completed.stderr)
    assert scales and int(scales[0]) == 2 ** (FIRST_EXPONENT - 1)
    assert "gradient refused" not in completed.stderr


@pytest.mark.long
def test_model_learns_in_float16(tmp_path: Path) -> None:
    train(3, tmp_path / "run", "--precision", "fp16", "--epochs", 2)
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9


def test_scale_is_refused_for_parameters_in_float16(tmp_path: Path) -> None:
    """As by torch's GradScaler: gradients would be divided in float16."""
    module = nn.Linear(2, 1).half()

    def main(transport: Transport) -> None:
        run = DataParallel(
            module,
            transport=transport,
            algorithm="ar-sgd",
            run_dir=tmp_path / "run",
            steps=1,
            batch_size=1,
            compute_time=1.0,
        )
        for x in run.batches(torch.ones(4, 2).half()):
            run.scale(module(x).sum()).backward()

    with pytest.raises(UserError, match=naming("run.scale():", "float16", "autocast")):
        VirtualCluster(1, Cluster(hosts=1), 0).run(main)
