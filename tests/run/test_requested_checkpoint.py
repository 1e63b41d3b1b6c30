"""Checkpoints that the training loop requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import ClosedError, UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.loop_lab import DATA, PLAN, flat, loss_of, network
from tests.quadratic import NO_DELAY

SAMPLES, BATCHES = 96, 4
WORKERS = 2


def train(
    folder: Path, algorithm: str, ranks: int, request_at: int = -1, close: bool = False
) -> torch.Tensor:
    """Train; all workers request a checkpoint after one of their batches, and may close later."""
    plan = {**PLAN, "run_dir": folder, "resume": "auto", "algorithm": algorithm}

    def rank(transport: Any) -> torch.Tensor:
        model = network()
        run = DataParallel(model, transport=transport, **{**plan, "samples": SAMPLES})
        try:
            for number, (inputs, labels) in enumerate(run.batches(DATA)):
                if close and number == request_at + BATCHES:
                    run.close()
                    break
                loss_of(model, inputs, labels).backward()
                run.step()
                if number == request_at:
                    run.checkpoint()
        except ClosedError:
            pass
        return flat(model)

    models: list[Any] = VirtualCluster(ranks, NO_DELAY).run(rank)
    return models[-1]


@pytest.mark.parametrize(
    ("algorithm", "ranks"), [("ar-sgd", 2), ("aladdin-ahead", 3), ("gosgd", 2), ("diloco", 2)]
)
def test_run_continues_from_requested_checkpoint(
    tmp_path: Path, algorithm: str, ranks: int
) -> None:
    train(tmp_path / "run", algorithm, ranks, request_at=1, close=True)
    (checkpoint,) = CheckpointStore(tmp_path / "run").all()
    assert 0 < int(re.findall(r"\d+", checkpoint.name)[0]) < SAMPLES
    resumed = train(tmp_path / "run", algorithm, ranks)
    if algorithm == "ar-sgd":
        assert torch.equal(resumed, train(tmp_path / "whole", algorithm, ranks))


def test_request_before_the_loop_is_refused(tmp_path: Path) -> None:
    def rank(transport: Any) -> None:
        run = DataParallel(network(), transport=transport, **{**PLAN, "run_dir": tmp_path / "run"})
        run.checkpoint()

    with pytest.raises(UserError, match=r"run\.batches\(\) was not called"):
        VirtualCluster(1, NO_DELAY).run(rank)
