"""What a user sees of refused gradients: warnings, counts, the end, and the last checkpoint."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from tests.commands import checkpoint_part, metrics, refusal, train
from tests.failing import Net
from tests.launch import needs

PLAN = ["--model", "tests.failing:build", "--workers", 3, "--epochs", 2, "--quiet"]


def start(*words: object) -> dict[str, Any]:
    return simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("aladdin_mpi: worker")]


def test_refusals_are_named_counted_and_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Net, "spoilt", range(3, 15))
    found = start(*PLAN, "--run-dir", tmp_path / "run", "--log-every", 200, "--seed", 1)
    assert found["gradients_refused"] == 3 * 12
    assert found["gradients_applied"] == found["gradients_computed"]
    assert [(f["rank"], f["what"], f["count"]) for f in found["failures"]] == [
        (rank, "gradient refused", 12) for rank in (1, 2, 3)
    ]
    assert found["test_accuracy"] > 0.4
    lines = metrics(tmp_path / "run", "train")
    assert all(line["loss"] is None or isfinite(line["loss"]) for line in lines)
    assert lines[-1]["gradients_refused"] == 36
    # The first three of each, and the tenth.
    told = [line for line in warnings(capsys.readouterr().err) if "worker 0 (rank 1, " in line]
    assert [line.rsplit(" (", 1)[1] for line in told[1:]] == [
        "2 so far)",
        "3 so far)",
        "10 so far)",
    ]
    assert re.fullmatch(
        r".*worker 0 \(rank 1, host 0\): gradient refused: NaN in bucket 0 at sample \d+", told[0]
    )
    # Batch norm's statistics would have stayed NaN.
    local = checkpoint_part(tmp_path / "run", 1)["local"]["buffers"]
    assert all(torch.isfinite(buffer).all() for buffer in local)


def test_of_layers_that_exchange_activations_and_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the activations of one worker would be in everyone's gradient."""
    monkeypatch.setattr(Net, "spoilt", range(3, 5))
    plan = [*PLAN, "--algorithm", "multistep", "--multistep-exchange", "activations"]
    found = start(*plan, "--run-dir", tmp_path / "run")
    assert found["gradients_refused"] == 3 * 2
    assert found["test_accuracy"] > 0.4


def test_a_worker_that_has_only_such_gradients_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the last checkpoint is from before, and good to go on from."""
    monkeypatch.setattr(Net, "spoilt", range(8, 1000))
    plan = [*PLAN, "--epochs", 4, "--run-dir", tmp_path / "run", "--checkpoint-every", 300]
    with pytest.raises(UserError, match=r"worker \d \(rank \d, .* last 20 gradients.*lower --lr"):
        start(*plan)
    assert "no checkpoint at 900 samples" in capsys.readouterr().err
    assert checkpoint_part(tmp_path / "run", 0)["drawn"] == 600
    monkeypatch.setattr(Net, "spoilt", range(0))
    assert start("--resume", tmp_path / "run")["test_accuracy"] > 0.6


def test_a_loss_that_is_too_large(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of such a batch is used: with a limit that no batch keeps, the model stays."""
    found = start(
        *PLAN, "--epochs", 0.2, "--max-loss", 0.001, "--run-dir", tmp_path, "--weight-decay", 0
    )
    assert found["gradients_refused"] == found["gradients_computed"]
    told = warnings(capsys.readouterr().err)
    assert re.search(r"a loss of 2\.\d+ is above --max-loss at sample \d+$", told[0])
    torch.manual_seed(0)
    first = {name: value for name, value in Net().named_parameters()}
    last = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(first[name], last[name]) for name in first)


USERS_MODEL = """
from torch import nn

class Net(nn.Sequential):
    steps = 0

    def forward(self, x):
        Net.steps += self.training
        return super().forward(x) * (float("nan") if Net.steps > 5 else 1.0)

def build(num_classes):
    return Net(nn.Flatten(), nn.Linear(64, num_classes))
"""


@needs("openmpi")
def test_over_mpi_the_end_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "explodes.py").write_text(USERS_MODEL)
    plan = ["--model", "explodes:build", "--checkpoint-every", 100, "--lr-schedule", "constant"]
    done = train(3, tmp_path / "run", *plan, modules=tmp_path, check=False, timeout=100)
    line = refusal(done)
    assert re.search(r"worker \d \(rank \d, host .*\): .* NaN in bucket 0 at sample \d+", line)
    assert len(warnings(done.stderr)) <= 8
    part = checkpoint_part(tmp_path / "run", 1)["role"]
    assert part["parameters"].isfinite().all()
    assert not (tmp_path / "run" / "summary.json").exists()
