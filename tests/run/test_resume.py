"""Checkpoints: a run that was killed goes on as if nothing had been."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.run.checkpoint import CheckpointStore
from aladdin_mpi.run.run_folder import prepare
from tests.commands import (
    EPOCH,
    checkpoint,
    checkpoint_part,
    metrics,
    refusal,
    rises,
    simulate,
    summary,
    train,
)
from tests.launch import needs

MODULE = '''
import os, signal, time
import torch
from torch import nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK")
LAST = int(os.environ.get("KILLED_AT_STEP", "0"))


class Net(nn.Module):
    """Draws random numbers, keeps statistics, and dies on demand."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3),
            nn.Linear(32, 10),
        )
        self.steps = 0

    def forward(self, x):
        # Statistics for evaluations are taken without gradients.
        if self.training and torch.is_grad_enabled():
            time.sleep(0.005 if RANK else 0)
            self.steps += 1
            if self.steps == LAST and RANK in (None, "2"):
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layers(x)


def build():
    return Net()
'''


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "mortal.py").write_text(MODULE)
    return folder


# -- virtual time: bit for bit ------------------------------------------------------------
PLAN = ["--model", "mortal:build", "--workers", 3, "--hosts", 2, "--epochs", 4, "--seed", 5]
PLAN += ["--jitter", 0.3, "--slowdown", "1=2", "--delay-us", 500, "--batch-size", 24]
PLAN += ["--log-every", 300, "--eval-every", 0.5]
SPLIT = ["--servers", 2, "--aladdin-momentum", "split", "--checkpoint-every", 700]
WORKER = ["--aladdin-momentum", "worker", "--checkpoint-every", "1.5epochs", "--nesterov"]


@pytest.mark.parametrize("options", [SPLIT, WORKER], ids=["split", "worker"])
def test_resumed_run_is_the_same_to_the_bit(
    tmp_path: Path, modules: Path, options: list[object]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    simulate(whole, *PLAN, *options, modules=modules)
    env = {"KILLED_AT_STEP": "50"}  # of one worker; the run has 240 steps
    done = simulate(killed, *PLAN, *options, modules=modules, env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    assert checkpoint_part(killed, 0)["drawn"] in range(700, 4 * EPOCH)
    assert metrics(killed)[-1]["samples"] > checkpoint_part(killed, 0)["drawn"]

    simulate(None, "--resume", killed, modules=modules)
    assert_same(whole, killed)


def assert_same(a: Path, b: Path) -> None:
    for name in ("metrics.jsonl", "model.pt", "summary.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def test_a_run_killed_before_its_summary_ends_the_same(tmp_path: Path, modules: Path) -> None:
    simulate(tmp_path / "whole", *PLAN, modules=modules)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for name in ("summary.json", "model.pt"):
        (tmp_path / "killed" / name).unlink()
    simulate(None, "--resume", tmp_path / "killed", modules=modules)
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_finished_run_can_be_extended(tmp_path: Path, modules: Path) -> None:
    run_dir = tmp_path / "run"
    simulate(run_dir, *PLAN, "--epochs", 1, "--lr-schedule", "constant", modules=modules)
    short = metrics(run_dir)
    simulate(None, "--resume", run_dir, "--epochs", 2, modules=modules)
    assert summary(run_dir)["samples"] == 2 * EPOCH
    assert "\nepochs = 2.0\n" in (run_dir / "config.toml").read_text()  # if it has to go on again
    assert metrics(run_dir)[: len(short)] == short
    assert rises(metrics(run_dir, "train"))
    evaluations = metrics(run_dir, "eval")
    assert rises(evaluations)  # the end of the first run is not measured again
    assert evaluations[-1]["samples"] == 2 * EPOCH


# -- over MPI ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, modules: Path) -> Path:
    """A run on four ranks of which one was killed, with checkpoints by time."""
    run_dir = tmp_path_factory.mktemp("mpi") / "run"
    plan = ["--model", "mortal:build", "--epochs", 10, "--log-every", 400]
    plan += ["--checkpoint-every", "0.3s", "--servers", 2]
    env = {"KILLED_AT_STEP": "150"}
    done = train(4, run_dir, *plan, modules=modules, env=env, check=False)
    assert done.returncode != 0
    return run_dir


@pytest.fixture
def copy(tmp_path: Path, killed: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "copy"))


@needs("openmpi")
def test_resumed_over_mpi(copy: Path, modules: Path) -> None:
    saved = checkpoint_part(copy, 0)["drawn"]
    assert 0 < saved < 10 * EPOCH
    before = [line for line in metrics(copy, "train") if line["samples"] <= saved]
    train(4, None, "--resume", copy, modules=modules)
    found = summary(copy)
    assert found["samples"] == 10 * EPOCH
    assert found["gradients_applied"] == found["gradients_computed"]
    workers = [checkpoint_part(copy, rank)["role"]["worker"] for rank in (2, 3)]
    assert sum(worker["samples"] for worker in workers) == 10 * EPOCH
    assert sum(worker["computed"] for worker in workers) == found["gradients_computed"]
    lines = metrics(copy, "train")
    assert lines[: len(before)] == before
    assert rises(lines) and rises(lines, "seconds")
    assert rises(metrics(copy, "eval"))
    assert lines[-1]["samples"] == 10 * EPOCH
    assert len(lines) >= 0.9 * 10 * EPOCH / 400


# -- what is not resumed -------------------------------------------------------------------
def truncate(run_dir: Path) -> None:
    file = checkpoint(run_dir) / "rank-2.pt"
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(run_dir: Path) -> None:
    file = checkpoint(run_dir) / "rank-3.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def lose_a_part(run_dir: Path) -> None:
    (checkpoint(run_dir) / "rank-1.pt").unlink()


def lose_all(run_dir: Path) -> None:
    # What a death in mid-writing leaves is not a checkpoint.
    checkpoint(run_dir).rename(run_dir / "checkpoint" / "writing-000000000700")


def empty_the_manifest(run_dir: Path) -> None:
    (checkpoint(run_dir) / "manifest.json").write_text("")


def put_another_file(run_dir: Path) -> None:
    (checkpoint(run_dir) / "manifest.json").write_text('{"epoch": 3, "optimizer": []}')


def come_from_another_version(run_dir: Path) -> None:
    edit_manifest(run_dir, format="aladdin_mpi checkpoint 7")


def edit_manifest(run_dir: Path, **changes: Any) -> None:
    file = checkpoint(run_dir) / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_the_configuration(run_dir: Path) -> None:
    config = run_dir / "config.toml"
    config.write_text(config.read_text().replace("batch-size = 32", "batch-size = 16"))


def keep(run_dir: Path) -> None:
    pass


@needs("openmpi")
@pytest.mark.parametrize(
    ("harm", "ranks", "words"),
    [
        pytest.param(
            flip_a_bit,
            4,
            ["rank 3: ", "rank-3.pt", "is damaged", "take another copy"],
            marks=pytest.mark.long,
        ),
        (keep, 5, ["another run", "ranks: 4 and 5", "or add --allow-resize"]),
    ],
)
def test_refused_over_mpi(
    copy: Path, modules: Path, harm: Callable[[Path], None], ranks: int, words: list[str]
) -> None:
    harm(copy)
    before = (copy / "metrics.jsonl").read_bytes()
    line = refusal(train(ranks, None, "--resume", copy, modules=modules, check=False))
    assert all(word in line for word in words), line
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("virtual") / "run"
    simulate(run_dir, "--workers", 3, "--samples", 640, "--checkpoint-every", 320)
    return run_dir


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (truncate, ["rank-2.pt", "is truncated", "expected", "bytes, got"]),
        (edit_the_configuration, ["option.batch-size: 32 and 16", "as it was started"]),
    ],
)
def test_refused(
    tmp_path: Path, simulated: Path, harm: Callable[[Path], None], words: list[str]
) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    harm(copy)
    line = refusal(simulate(None, "--resume", copy, "--samples", 960, check=False))
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lose_a_part, r"rank-1.pt is missing"),
        (lose_all, r"expected a checkpoint in .*--overwrite"),
        (empty_the_manifest, r"is not a checkpoint of aladdin_mpi"),
        (put_another_file, r"is not a checkpoint of aladdin_mpi"),
        (come_from_another_version, r"'aladdin_mpi checkpoint 7'.*the version"),
    ],
)
def test_not_a_checkpoint(
    tmp_path: Path, simulated: Path, harm: Callable[[Path], None], words: str
) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    store = CheckpointStore(copy)
    state = store.load(1, {"ranks": 4})
    assert state is not None and state["drawn"] == 640
    harm(copy)
    with pytest.raises(UserError, match=words):
        store.load(1, {"ranks": 4})


def test_overwriting_forgets_the_old_checkpoint(tmp_path: Path, simulated: Path) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    prepare(copy, SimulateOptions(overwrite=True))
    with pytest.raises(UserError, match="expected a checkpoint"):
        CheckpointStore(copy).load(0, {})


def test_a_run_cannot_become_shorter(tmp_path: Path, simulated: Path) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    line = refusal(simulate(None, "--resume", copy, "--samples", 320, check=False))
    assert "expected a run at least as long as it was, 640 samples" in line and "320" in line
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["model.pt", "curves.png", "checkpoint/weights.txt"])
def test_files_of_others_are_not_overwritten(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(UserError, match=r"files of the same names .*give another"):
        prepare(tmp_path / "run", SimulateOptions())
    assert file.read_text() == "mine"
    if file.parent.name == "checkpoint":
        prepare(tmp_path / "run", SimulateOptions(overwrite=True))
        assert file.read_text() == "mine", "not a part of any run"


def test_an_empty_path_is_refused() -> None:
    """As by ``--run-dir "$UNSET"``; it would be the folder in which one is."""
    line = refusal(simulate(None, "--run-dir", "", "--samples", 64, check=False))
    assert "--run-dir: expected a path, got ''" in line


def test_a_death_that_leaves_too_few_is_told_in_virtual_time(tmp_path: Path) -> None:
    done = simulate(
        tmp_path / "run", "--workers", 1, "--samples", 64, "--deaths", "0=1.001", check=False
    )
    assert "rank 0 has failed, and too few ranks are left to train on" in refusal(done)


def test_options_that_a_resumed_run_cannot_change(simulated: Path) -> None:
    line = refusal(simulate(None, "--resume", simulated, "--lr", 1, check=False))
    assert "--lr: cannot be given together with --resume" in line
    assert "--epochs" in line


def test_a_run_of_the_other_engine(simulated: Path) -> None:
    """config.toml of a simulation has options that training does not know."""
    line = refusal(train(2, None, "--resume", simulated, check=False))
    assert str(simulated) in line
