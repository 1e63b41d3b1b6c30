"""A killed run resumes from its checkpoint as if it had not been interrupted."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.options.run import SimulateOptions
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
from tests.messages import check_names, naming
from tests.run.program_runs import PROGRAMS

MODULE = (PROGRAMS / "mortal.py").read_text()
"""Environment for tests in other folders."""


# -- simulation: bit-identical ------------------------------------------------------------
PLAN = ["--model", "mortal:build", "--workers", 3, "--hosts", 2, "--epochs", 4, "--seed", 5]
PLAN += ["--jitter", 0.3, "--slowdown", "1=2", "--delay-us", 500, "--batch-size", 24]
PLAN += ["--log-every", 300, "--eval-every", 0.5]
SPLIT = ["--servers", 2, "--aladdin-momentum", "split", "--checkpoint-every", 700]
WORKER = ["--aladdin-momentum", "worker", "--checkpoint-every", "1.5epochs", "--nesterov"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [SPLIT, WORKER], ids=["split", "worker"])
def test_resumed_simulation_is_bit_identical(tmp_path: Path, options: list[object]) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    simulate(whole, *PLAN, *options, modules=PROGRAMS)
    env = {"KILLED_AT_STEP": "50"}  # of one worker; the run has 240 steps
    completed = simulate(killed, *PLAN, *options, modules=PROGRAMS, env=env, check=False)
    assert completed.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    assert checkpoint_part(killed, 0)["drawn"] in range(700, 4 * EPOCH)
    assert metrics(killed)[-1]["samples"] > checkpoint_part(killed, 0)["drawn"]

    simulate(None, "--resume", killed, modules=PROGRAMS)
    assert_same(whole, killed)


def assert_same(a: Path, b: Path) -> None:
    for name in ("metrics.jsonl", "model.pt", "summary.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def test_resumed_run_killed_before_its_summary_is_bit_identical(tmp_path: Path) -> None:
    simulate(tmp_path / "whole", *PLAN, modules=PROGRAMS)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for name in ("summary.json", "model.pt"):
        (tmp_path / "killed" / name).unlink()
    simulate(None, "--resume", tmp_path / "killed", modules=PROGRAMS)
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.long
def test_resume_extends_a_finished_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    simulate(run_dir, *PLAN, "--epochs", 1, "--lr-schedule", "constant", modules=PROGRAMS)
    short = metrics(run_dir)
    simulate(None, "--resume", run_dir, "--epochs", 2, modules=PROGRAMS)
    assert summary(run_dir)["samples"] == 2 * EPOCH
    assert "\nepochs = 2.0\n" in (run_dir / "config.toml").read_text()  # for a further resume
    assert metrics(run_dir)[: len(short)] == short
    assert rises(metrics(run_dir, "train"))
    evaluations = metrics(run_dir, "eval")
    assert rises(evaluations)  # the end of the first run is not measured again
    assert evaluations[-1]["samples"] == 2 * EPOCH


@pytest.mark.long
def test_checkpoint_by_time_does_not_cut_a_round_of_diloco(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    plan = [*PLAN, "--algorithm", "diloco", "--diloco-steps", 7]
    simulate(whole, *plan, "--checkpoint-every", "never", modules=PROGRAMS)
    env = {"KILLED_AT_STEP": "50"}
    simulate(killed, *plan, "--checkpoint-every", "1s", modules=PROGRAMS, env=env, check=False)
    drawn = checkpoint_part(killed, 0)["drawn"]
    assert drawn > 0
    assert drawn % (7 * 3 * 24) == 0
    simulate(None, "--resume", killed, modules=PROGRAMS)
    models = [torch.load(run_dir / "model.pt") for run_dir in (whole, killed)]
    assert all(map(torch.equal, *(model.values() for model in models)))


# -- over MPI ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run on four ranks of which one was killed, with checkpoints by time."""
    run_dir = tmp_path_factory.mktemp("mpi") / "run"
    plan = ["--model", "mortal:build", "--epochs", 10, "--log-every", 400]
    plan += ["--checkpoint-every", "0.3s", "--servers", 2]
    env = {"KILLED_AT_STEP": "150"}
    completed = train(4, run_dir, *plan, modules=PROGRAMS, env=env, check=False)
    assert completed.returncode != 0
    return run_dir


@pytest.fixture
def copy(tmp_path: Path, killed: Path) -> Path:
    return Path(shutil.copytree(killed, tmp_path / "copy"))


@needs("openmpi")
def test_killed_run_resumes_over_mpi(copy: Path) -> None:
    saved = checkpoint_part(copy, 0)["drawn"]
    assert 0 < saved < 10 * EPOCH
    before = [line for line in metrics(copy, "train") if line["samples"] <= saved]
    train(4, None, "--resume", copy, modules=PROGRAMS)
    figures = summary(copy)
    assert figures["samples"] == 10 * EPOCH
    assert figures["gradients_applied"] == figures["gradients_computed"]
    workers = [checkpoint_part(copy, rank)["role"]["worker"] for rank in (2, 3)]
    assert sum(worker["samples"] for worker in workers) == 10 * EPOCH
    assert sum(worker["computed"] for worker in workers) == figures["gradients_computed"]
    lines = metrics(copy, "train")
    assert lines[: len(before)] == before
    assert rises(lines) and rises(lines, "seconds")
    assert rises(metrics(copy, "eval"))
    assert lines[-1]["samples"] == 10 * EPOCH
    assert len(lines) >= 0.9 * 10 * EPOCH / 400


# -- runs that cannot be resumed ------------------------------------------------------------
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
    # A partially written folder is not a checkpoint.
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


@pytest.mark.long
@needs("openmpi")
@pytest.mark.parametrize(
    ("harm", "ranks", "names"),
    [
        pytest.param(flip_a_bit, 4, ["rank 3: ", "rank-3.pt", "SHA-256"], marks=pytest.mark.long),
        (keep, 5, ["ranks: 4 and 5", "--allow-resize"]),
    ],
)
def test_resume_over_mpi_refuses_damaged_or_mismatched_checkpoint(
    copy: Path, harm: Callable[[Path], None], ranks: int, names: list[str]
) -> None:
    harm(copy)
    before = (copy / "metrics.jsonl").read_bytes()
    line = refusal(train(ranks, None, "--resume", copy, modules=PROGRAMS, check=False))
    check_names(line, *names)
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("virtual") / "run"
    simulate(run_dir, "--workers", 3, "--samples", 640, "--checkpoint-every", 320)
    return run_dir


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (truncate, ["rank-2.pt", "truncated", "bytes"]),
        (edit_the_configuration, ["option.batch-size: 32 and 16"]),
    ],
)
def test_resume_refuses_damaged_checkpoint_or_changed_configuration(
    tmp_path: Path, simulated: Path, harm: Callable[[Path], None], names: list[str]
) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    harm(copy)
    line = refusal(simulate(None, "--resume", copy, "--samples", 960, check=False))
    check_names(line, *names)


@pytest.mark.parametrize(
    ("harm", "names"),
    [
        (lose_a_part, ["rank-1.pt", "missing"]),
        (lose_all, ["--resume", "checkpoint", "--overwrite"]),
        (empty_the_manifest, ["manifest.json", "not a checkpoint"]),
        (put_another_file, ["manifest.json", "not a checkpoint"]),
        (come_from_another_version, ["'aladdin_mpi checkpoint 7'", "version"]),
    ],
)
def test_checkpoint_store_refuses_invalid_checkpoint(
    tmp_path: Path, simulated: Path, harm: Callable[[Path], None], names: list[str]
) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    store = CheckpointStore(copy)
    state = store.load(1, {"ranks": 4})
    assert state is not None and state["drawn"] == 640
    harm(copy)
    with pytest.raises(UserError, match=naming(*names)):
        store.load(1, {"ranks": 4})


def test_overwrite_removes_the_old_checkpoint(tmp_path: Path, simulated: Path) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    prepare(copy, SimulateOptions(overwrite=True))
    with pytest.raises(UserError, match=naming("checkpoint", "--overwrite")):
        CheckpointStore(copy).load(0, {})


def test_resume_refuses_a_shorter_run(tmp_path: Path, simulated: Path) -> None:
    copy = Path(shutil.copytree(simulated, tmp_path / "copy"))
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    line = refusal(simulate(None, "--resume", copy, "--samples", 320, check=False))
    check_names(line, "--samples", "640", "320")
    assert {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("name", ["model.pt", "curves.png", "checkpoint/weights.txt"])
def test_run_folder_refuses_to_overwrite_foreign_files(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(
        UserError, match=naming("--run-dir", f"({Path(name).parts[0]})", "--overwrite")
    ):
        prepare(tmp_path / "run", SimulateOptions())
    assert file.read_text() == "mine"
    if file.parent.name == "checkpoint":
        prepare(tmp_path / "run", SimulateOptions(overwrite=True))
        assert file.read_text() == "mine", "not a part of any run"


def test_empty_run_dir_is_refused() -> None:
    """As by ``--run-dir "$UNSET"``; it would be the current folder."""
    line = refusal(simulate(None, "--run-dir", "", "--samples", 64, check=False))
    check_names(line, "--run-dir", "''")


def test_simulation_reports_failure_that_leaves_too_few_ranks(tmp_path: Path) -> None:
    completed = simulate(
        tmp_path / "run", "--workers", 1, "--samples", 64, "--failures", "0=1.001", check=False
    )
    check_names(refusal(completed), "rank 0", "too few")


def test_resume_refuses_options_that_cannot_change(simulated: Path) -> None:
    line = refusal(simulate(None, "--resume", simulated, "--lr", 1, check=False))
    check_names(line, "--lr ", "--resume", "--epochs")


def test_training_refuses_to_resume_a_simulation(simulated: Path) -> None:
    """config.toml of a simulation has options that do not exist for training."""
    line = refusal(train(2, None, "--resume", simulated, check=False))
    assert str(simulated) in line
