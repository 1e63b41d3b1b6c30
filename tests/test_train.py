"""Training over MPI as a user starts it: what is printed, what is written, and the accounts."""

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
from tests.commands import EPOCH, checkpoint_part, leftovers, metrics, rises, summary, train
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
        options += ["--wire", "int8"]  # or the links' room would choose the bits
    else:
        options += ["--algorithm", "aladdin", "--servers", 2, "--wire", "bf16"]
        options += ["--log-every", 1000, "--eval-every", 3]
    yield folder, train(4, folder, *options)


def test_reaches_its_accuracy(run: Run) -> None:
    assert summary(run[0])["test_accuracy"] >= 0.97


def test_summary_has_every_field_and_right_accounts(run: Run) -> None:
    found = summary(run[0])
    assert not [name for name in FIELDS.split() if name not in found]
    algorithm = "aladdin-ahead" if found["servers"] == 1 else "aladdin"
    assert (found["algorithm"], found["engine"]) == (algorithm, "mpi")
    assert found["workers"] + found["servers"] == 4
    assert found["samples"] == 12 * EPOCH
    assert found["gradients_applied"] == found["gradients_computed"] >= 12 * EPOCH / 32
    assert found["samples_per_second"] == pytest.approx(
        found["samples"] / found["seconds"], rel=1e-5
    )
    assert 0 <= found["wait_fraction"] <= 1
    assert found["failures"] == []
    model = build_model("digits", 10, 1, 8)
    numel = sum(p.numel() for p in model.parameters())
    assert found["parameters"] == numel
    # A step sends the whole gradient, and besides it draws, reports and headers only. On a
    # busy machine gradients are added up and sent as one; the last reports miss some steps.
    computed, coalesced = found["gradients_computed"], found["gradients_coalesced"]
    sent = (computed - coalesced) / computed
    per_step = numel * (1 if found["servers"] == 1 else 2)
    assert 0.95 * sent * per_step <= found["bytes_sent_per_step"] < 1.05 * sent * per_step + 1000


def test_metrics_rise_to_the_budget(run: Run) -> None:
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


def test_configuration_reads_back(run: Run) -> None:
    config = read_back(run[0])
    assert config.epochs == 12
    assert config.servers == summary(run[0])["servers"]
    assert config.run_dir == run[0]
    first = (run[0] / "config.toml").read_text().splitlines()[0]
    assert first.startswith("# mpirun -np 4 python -m aladdin_mpi.train ")
    check(first.removeprefix("# "), run[0])


def test_model_is_a_plain_state_dict(run: Run) -> None:
    model = build_model("digits", 10, 1, 8)
    model.load_state_dict(torch.load(run[0] / "model.pt", weights_only=True))


def test_curves_are_a_picture(run: Run) -> None:
    content = (run[0] / "curves.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert b"IEND" in content[-12:]


def test_tensorboard_shows_the_metrics(run: Run) -> None:
    board = EventAccumulator(str(run[0] / "tensorboard")).Reload()
    shown = board.Scalars("eval/test_accuracy")
    lines = metrics(run[0], "eval")
    assert {(s.step, round(s.value, 4)) for s in shown} == {
        (line["samples"], round(line["test_accuracy"], 4)) for line in lines
    }
    assert "train/loss" in board.Tags()["scalars"]


def test_the_log_is_plain_text(run: Run) -> None:
    printed = run[1].stdout + run[1].stderr
    assert not re.findall(r"[^\n\x20-\x7e]", printed)
    assert run[1].stderr.startswith("aladdin_mpi: starting 4 ranks\n")
    line = r" *\d+ % +[\d,]+ of 17,244 samples  [\d,.]+ samples/s +loss .*  [23] workers( .* left)?"
    lines = [each for each in run[1].stderr.splitlines() if " samples/s" in each]
    assert len(lines) >= 10
    assert all(re.fullmatch(line, each) for each in lines)
    assert lines[-1].startswith("100 %  17,244 of 17,244 samples  ")
    assert "  accuracy 0.9" in lines[-1]


def test_ends_with_a_table(run: Run) -> None:
    lines = run[1].stdout.splitlines()
    assert str(run[0]) in lines[-1]
    accuracy = summary(run[0])["test_accuracy"]
    assert any(re.fullmatch(rf" *test accuracy +{accuracy:.4g}", line) for line in lines)
    assert sum("gradients computed" in line for line in lines) == 1


def test_nothing_half_done_is_left(run: Run) -> None:
    assert leftovers(run[0]) == []
    assert [p.name for p in (run[0] / "checkpoint").iterdir()] == ["samples-000000017244"]


def test_options_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("samples = 1001\nbatch-size = 16\nmodel = 'mlp'\n[aladdin]\npi = 2\n")
    options = ["--config", file, "--batch-size", 10, "--quiet"]
    done = train(2, tmp_path / "run", *options)
    config = read_back(tmp_path / "run")
    assert (config.batch_size, config.model, own(config, AladdinOptions).pi) == (10, "mlp", 2)
    found = summary(tmp_path / "run")
    # 100 batches of 10, and the rest.
    assert (found["samples"], found["gradients_computed"], found["workers"]) == (1001, 101, 1)
    assert done.stdout == ""
    assert "%" not in done.stderr


SLOW_MODEL = """
import time
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, x):
        time.sleep(0.01 if self.training else 0)
        return self.layer(x.flatten(1))

def build():
    return Slow()
"""


def test_a_slow_worker_takes_fewer_samples(tmp_path: Path) -> None:
    (tmp_path / "slow_model.py").write_text(SLOW_MODEL)
    run_dir = tmp_path / "run"
    options = ["--model", "slow_model:build", "--epochs", 2, "--slowdown", "0=5"]
    train(3, run_dir, *options, modules=tmp_path)
    slow, fast = (checkpoint_part(run_dir, rank)["role"]["worker"]["samples"] for rank in (1, 2))
    assert slow + fast == summary(run_dir)["samples"] == 2 * EPOCH
    assert 0 < slow < fast / 2


@needs("mpich")
def test_under_mpich(tmp_path: Path) -> None:
    done = train(2, tmp_path / "run", "--epochs", 6, mpi="mpich")
    found = summary(tmp_path / "run")
    assert found["test_accuracy"] >= 0.9
    assert found["samples"] == 6 * EPOCH
    assert found["gradients_applied"] == found["gradients_computed"]
    assert "\n100 %  8,622 of 8,622 samples  " in done.stderr
