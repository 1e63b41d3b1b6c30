"""Invalid options and mismatched ranks: one error with a remedy, and no rank waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.commands import TRAIN, metrics, refusal, simulate, summary, train
from tests.launch import ROOT, Completed, needs, run_ranks
from tests.messages import check_names

pytestmark = needs("openmpi")
PROGRAMS = Path(__file__).with_name("programs")

PROJECT = {"PYTHONPATH": str(ROOT)}
"""Environment for runs outside the project's folder."""

MPIRUN = [
    pytest.param(2, ["--learning-rate", 1], ["--learning-rate:", "--help"], id="option"),
    pytest.param(
        2,
        ["--model", "resnet21"],
        ["--model", "'resnet21'", "resnet20"],
        id="model",
        marks=pytest.mark.long,
    ),
    pytest.param(
        3, ["--servers", 3], ["--servers", "4"], id="only servers", marks=pytest.mark.long
    ),
    pytest.param(2, ["--resume", "/nowhere"], ["--resume", "'/nowhere'"], id="no run"),
]


@pytest.mark.parametrize(("ranks", "options", "names"), MPIRUN)
def test_invalid_options_are_refused_once_under_mpirun(
    tmp_path: Path, ranks: int, options: list[object], names: list[str]
) -> None:
    run_dir = None if "--resume" in options else tmp_path / "run"
    completed = train(ranks, run_dir, *options, check=False, timeout=60, cwd=tmp_path, env=PROJECT)
    line = refusal(completed)
    check_names(line, *names)
    assert completed.returncode == 2
    assert not (tmp_path / "run").exists()
    assert completed.stdout == ""


SIMULATED: list[tuple[list[str], list[str]]] = [
    (["--algorithm", "aladin"], ["--algorithm:", "aladdin", "'aladin'"]),
    (["--lr", "fast"], ["--lr:", "more than 0", "'fast'"]),
    (["--momentum", "1"], ["--momentum:", "'1'"]),
    (["--epochs", "1", "--samples", "5"], ["--epochs", "--samples"]),
    (["--batch-size", "0"], ["--batch-size:", "1 or more", "'0'"]),
    (["--checkpoint-every", "5parsecs"], ["--checkpoint-every", "'5parsecs'", "50000"]),
    (["--aladdin-pi", "0"], ["--aladdin-pi:", "1 or more", "'0'"]),
    (["--config", "/nowhere/run.toml"], ["--config:", "/nowhere/run.toml"]),
    (["--slowdown", "8=2"], ["--slowdown:", "0 to 7", "worker 8"]),
    (["--hosts", "2", "--ranks-per-host", "2"], ["--ranks-per-host:", "9 ranks"]),
    (["--dataset", "cifar1"], ["--dataset", "cifar10"]),
    (["--dataset", "cifar10", "--data-dir", "/nowhere/at/all"], ["/nowhere/at/all", "--download"]),
    (["--model", "no_such_module:build"], ["no_such_module", "PYTHONPATH"]),
    (["--model", "size:4"], ["--model", "size:4", "--compute timed"]),
]


@pytest.mark.parametrize(("options", "names"), SIMULATED, ids=lambda value: str(value)[:30])
def test_invalid_options_are_refused_in_simulation(
    tmp_path: Path, options: list[str], names: list[str]
) -> None:
    completed = simulate(tmp_path / "run", *options, check=False)
    check_names(refusal(completed), *names)
    assert completed.returncode == 2
    assert not (tmp_path / "run").exists()


def test_several_invalid_options_are_reported_at_once(tmp_path: Path) -> None:
    completed = simulate(tmp_path / "run", "--lr", -1, "--batch-size", "many", check=False)
    refusal(completed)
    check_names(completed.stderr, "--lr:", "'-1'", "--batch-size:", "'many'")


def test_training_on_one_rank_is_refused(tmp_path: Path) -> None:
    completed = train(1, tmp_path / "run", check=False, timeout=60)
    assert "mpirun" in refusal(completed)
    assert completed.returncode == 2
    assert not (tmp_path / "run").exists()


def test_existing_run_folder_is_refused_without_overwrite(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    short = ["--samples", 64, "--batch-size", 16]
    simulate(run_dir, *short)
    before = (run_dir / "metrics.jsonl").read_bytes()
    line = refusal(simulate(run_dir, *short, check=False))
    check_names(line, str(run_dir), "--overwrite", f"--resume {run_dir}")
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    simulate(run_dir, "--samples", 32, "--overwrite")
    assert summary(run_dir)["samples"] == 32
    assert max(line["samples"] for line in metrics(run_dir)) == 32


def mixed(first: list[str], rest: list[str], tmp_path: Path) -> Completed:
    """Start rank 0 with one command line and ranks 1 and 2 with another."""
    common = [*TRAIN, "--samples", "64", "--run-dir", str(tmp_path / "run")]
    second = ["-n", "2", sys.executable, *common, *rest]
    return run_ranks(1, [*common, *first, ":", *second], check=False, timeout=60)


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "rest", "names"),
    [
        pytest.param(
            ["--lr", "0.1"],
            ["--lr", "0.2"],
            ["rank 1, 2: ", "lr: 0.1 and 0.2"],
            id="values",
        ),
        pytest.param(
            ["--seed", "1"],
            ["--sed", "1"],
            ["rank 1, 2: --sed:", "--seed"],
            id="a bad option",
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_with_different_options_are_refused(
    tmp_path: Path, first: list[str], rest: list[str], names: list[str]
) -> None:
    completed = mixed(first, rest, tmp_path)
    line = refusal(completed)
    check_names(line, *names)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_model_that_differs_between_ranks_is_refused(tmp_path: Path) -> None:
    options = ["--model", "uneven_model:build"]
    line = refusal(train(3, tmp_path / "run", *options, modules=PROGRAMS, check=False))
    check_names(line, "rank 2: ", "rank 0", "parameter.")


def test_model_with_different_memory_format_is_refused(tmp_path: Path) -> None:
    """The server would mix up its values."""
    module = "channels_last_model"
    options = ["--model", f"{module}:build", "--dataset", f"{module}:two_channels"]
    line = refusal(train(3, tmp_path / "run", *options, modules=PROGRAMS, check=False))
    check_names(line, "parameter.3: [4, 2, 3, 3] and [4, 2, 3, 3] channels last")


def test_training_data_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    options = ["--dataset", "uneven_data:data", "--model", "mlp"]
    line = refusal(train(3, tmp_path / "run", *options, modules=PROGRAMS, check=False))
    check_names(line, "rank 2: ", "training data")
    check_names(line, "classes: 6 and 5", "input: float32 [8, 8] and float32 [64, 1]")


def test_help_needs_no_mpi(tmp_path: Path) -> None:
    completed = train(2, None, "--help")
    assert completed.stdout.count("--checkpoint-every") == 1
    assert completed.stderr == ""
