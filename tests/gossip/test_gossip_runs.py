"""Algorithms without servers in complete simulations: checkpoints, evaluation, timed computing."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from tests.commands import EPOCH, checkpoint_part, metrics
from tests.failing import Failure, Net
from tests.messages import naming
from tests.simulation import start

VARIANTS = [
    ["--algorithm", "sgp"],
    ["--algorithm", "osgp", "--osgp-tau", 2],
    ["--algorithm", "osgp", "--osgp-order", "push-first"],
    ["--algorithm", "gosgd", "--gosgd-p", 0.3],
    ["--algorithm", "ad-psgd"],
    ["--algorithm", "ad-psgd", "--ad-psgd-graph", "exponential"],
]
NAMES = ["sgp", "osgp", "osgp-push-first", "gosgd", "ad-psgd", "ad-psgd-exponential"]
each = pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)


@pytest.mark.sample(1)
@each
def test_resumed_gossip_run_is_bit_identical(
    tmp_path: Path, variant: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["--model", "tests.failing:build", "--workers", 5, "--hosts", 2, "--epochs", 2]
    plan += ["--seed", 5, "--jitter", 0.3, "--slowdown", "1=2", "--delay-us", 500]
    plan += ["--log-every", 300, "--eval-every", 0.5, "--checkpoint-every", 700, "--quiet"]
    plan += ["--bucket-mb", 0.002]
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    start(*plan, *variant, "--run-dir", whole)
    monkeypatch.setattr(Net, "steps", 0)
    monkeypatch.setattr(Net, "last", 75)  # of 90
    with pytest.raises(Failure):
        start(*plan, *variant, "--run-dir", failed)
    assert checkpoint_part(failed, 0)["drawn"] in range(1400, 2 * EPOCH)
    start("--resume", failed)
    for name in ("metrics.jsonl", "model.pt", "summary.json"):
        assert (whole / name).read_bytes() == (failed / name).read_bytes(), name
    losses = [line["test_loss"] for line in metrics(whole, "eval")]
    assert len(losses) >= 4
    assert losses == sorted(losses, reverse=True)


@each
def test_timed_gossip_run_sends_the_expected_bytes(tmp_path: Path, variant: list[object]) -> None:
    plan = ["--compute", "timed", "--model", "size:0.5", "--samples", 1600, "--batch-size", 10]
    plan += ["--workers", 4, "--hosts", 4, "--bucket-mb", 0.3, "--quiet"]
    summary = start(*plan, *variant, "--run-dir", tmp_path / "run")
    assert summary["samples"] == 1600
    assert summary["gradients_computed"] == 160
    model = 500_000
    sent = summary["bytes_sent_per_step"]
    assert isinstance(sent, float)
    share = {"sgp": 1.0, "osgp": 1.0, "gosgd": 0.3, "ad-psgd": 1.0}[str(variant[1])]
    spread = 0.3 if share < 1 else 0.1  # gossip peers are random; last reports lack the last step
    assert abs(sent / model - share) < spread * share


@each
def test_gossip_with_one_worker_is_refused(variant: list[object], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming(f"--algorithm {variant[1]}:", "--workers 2")):
        start("--workers", 1, *variant, "--run-dir", tmp_path / "run", "--quiet")
