"""What cannot be done as asked: said once, with the remedy, and no rank is left waiting."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.commands import TRAIN, metrics, refusal, simulate, summary, train
from tests.launch import ROOT, Completed, needs, run_ranks

pytestmark = needs("openmpi")

PROJECT = {"PYTHONPATH": str(ROOT)}
"""For runs outside the project's folder."""

MPIRUN = [
    pytest.param(2, ["--learning-rate", 1], ["--learning-rate: no such option"], id="option"),
    pytest.param(
        2,
        ["--model", "resnet21"],
        ["'resnet21'", "did you mean"],
        id="model",
        marks=pytest.mark.long,
    ),
    pytest.param(
        3, ["--servers", 3], ["--servers", "4"], id="only servers", marks=pytest.mark.long
    ),
    pytest.param(2, ["--resume", "/nowhere"], ["--resume", "'/nowhere'"], id="no run"),
]


@pytest.mark.parametrize(("ranks", "options", "words"), MPIRUN)
def test_refused_under_mpirun(
    tmp_path: Path, ranks: int, options: list[object], words: list[str]
) -> None:
    run_dir = None if "--resume" in options else tmp_path / "run"
    done = train(ranks, run_dir, *options, check=False, timeout=60, cwd=tmp_path, env=PROJECT)
    line = refusal(done)
    assert all(word in line for word in words), line
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()
    assert done.stdout == ""


ALONE = [
    (["--algorithm", "aladin"], "--algorithm: expected one of "),
    (["--lr", "fast"], "--lr: expected a number of more than 0, got 'fast'"),
    (["--momentum", "1"], "--momentum: expected"),
    (["--epochs", "1", "--samples", "5"], "give one of them"),
    (["--batch-size", "0"], "--batch-size: expected a whole number of 1 or more, got '0'"),
    (["--checkpoint-every", "5parsecs"], "write for example 50000"),
    (["--aladdin-pi", "0"], "--aladdin-pi: expected a whole number of 1 or more"),
    (["--config", "/nowhere/run.toml"], "--config: expected a TOML file"),
    (["--slowdown", "8=2"], "--slowdown: expected workers from 0 to 7, got worker 8"),
    (["--hosts", "2", "--ranks-per-host", "2"], "--ranks-per-host: expected room for 9 ranks"),
    (["--dataset", "cifar1"], "did you mean cifar10"),
    (["--dataset", "cifar10", "--data-dir", "/nowhere/at/all"], "--download"),
    (["--model", "no_such_module:build"], "PYTHONPATH"),
    (["--model", "size:4"], "--compute timed"),
]


@pytest.mark.parametrize(("options", "words"), ALONE, ids=lambda value: str(value)[:30])
def test_refused_alone(tmp_path: Path, options: list[str], words: str) -> None:
    done = simulate(tmp_path / "run", *options, check=False)
    assert words in refusal(done)
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_several_faults_are_told_at_once(tmp_path: Path) -> None:
    done = simulate(tmp_path / "run", "--lr", -1, "--batch-size", "many", check=False)
    refusal(done)
    assert "--lr: expected" in done.stderr
    assert "--batch-size: expected" in done.stderr


def test_one_rank_is_too_few(tmp_path: Path) -> None:
    done = train(1, tmp_path / "run", check=False, timeout=60)
    assert "mpirun" in refusal(done)
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_used_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    short = ["--samples", 64, "--batch-size", 16]
    simulate(run_dir, *short)
    before = (run_dir / "metrics.jsonl").read_bytes()
    line = refusal(simulate(run_dir, *short, check=False))
    assert all(word in line for word in (str(run_dir), "--overwrite", f"--resume {run_dir}"))
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    simulate(run_dir, "--samples", 32, "--overwrite")
    assert summary(run_dir)["samples"] == 32
    assert max(line["samples"] for line in metrics(run_dir)) == 32


def mixed(first: list[str], rest: list[str], tmp_path: Path) -> Completed:
    """Start rank 0 with one command line and ranks 1 and 2 with another."""
    common = [*TRAIN, "--samples", "64", "--run-dir", str(tmp_path / "run")]
    second = ["-n", "2", sys.executable, *common, *rest]
    return run_ranks(1, [*common, *first, ":", *second], check=False, timeout=60)


@pytest.mark.parametrize(
    ("first", "rest", "words"),
    [
        pytest.param(
            ["--lr", "0.1"],
            ["--lr", "0.2"],
            ["rank 1, 2: ", "lr: 0.1 and 0.2", "same options"],
            id="values",
        ),
        pytest.param(
            ["--seed", "1"],
            ["--sed", "1"],
            ["rank 1, 2: --sed: no such option", "--seed"],
            id="a bad option",
            marks=pytest.mark.long,
        ),
    ],
)
def test_ranks_that_disagree(
    tmp_path: Path, first: list[str], rest: list[str], words: list[str]
) -> None:
    done = mixed(first, rest, tmp_path)
    line = refusal(done)
    assert all(word in line for word in words), line
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


USERS_MODEL = """
import os
from torch import nn

def build(num_classes):
    width = 8 if os.environ["OMPI_COMM_WORLD_RANK"] == "2" else 16
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))
"""


def test_a_model_that_differs(tmp_path: Path) -> None:
    (tmp_path / "uneven.py").write_text(USERS_MODEL)
    options = ["--model", "uneven:build"]
    line = refusal(train(3, tmp_path / "run", *options, modules=tmp_path, check=False))
    assert re.search(r"rank 2: differs from rank 0 .*parameter\.", line), line


CHANNELS_LAST = """
import os
import torch
from torch import nn

def build(num_classes):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(144, num_classes))
    is_server = os.environ["OMPI_COMM_WORLD_RANK"] == "0"
    return model if is_server else model.to(memory_format=torch.channels_last)
"""


def test_a_model_that_lies_otherwise_in_memory(tmp_path: Path) -> None:
    """The server would take its values for others."""
    (tmp_path / "turned.py").write_text(CHANNELS_LAST)
    (tmp_path / "data.py").write_text(TWO_CHANNELS)
    options = ["--model", "turned:build", "--dataset", "data:data"]
    line = refusal(train(3, tmp_path / "run", *options, modules=tmp_path, check=False))
    assert "parameter.3: [4, 2, 3, 3] and [4, 2, 3, 3] channels last" in line, line


TWO_CHANNELS = """
import torch
from torch.utils.data import TensorDataset

def data():
    both = TensorDataset(torch.zeros(60, 2, 8, 8), torch.arange(60) % 6)
    return both, both
"""


USERS_DATA = """
import os
import torch
from torch.utils.data import TensorDataset

def data():
    odd = os.environ["OMPI_COMM_WORLD_RANK"] == "2"
    labels = torch.arange(60) % (5 if odd else 6)
    images = torch.zeros(60, 64 if odd else 8, 1 if odd else 8)
    return TensorDataset(images, labels), TensorDataset(images, labels)
"""


def test_data_that_differ(tmp_path: Path) -> None:
    (tmp_path / "uneven_data.py").write_text(USERS_DATA)
    options = ["--dataset", "uneven_data:data", "--model", "mlp"]
    line = refusal(train(3, tmp_path / "run", *options, modules=tmp_path, check=False))
    assert "rank 2: the training data differ from worker 0's" in line
    assert "classes: 6 and 5; input: float32 [8, 8] and float32 [64, 1]" in line


def test_help_needs_no_mpi(tmp_path: Path) -> None:
    done = train(2, None, "--help")
    assert done.stdout.count("--checkpoint-every") == 1
    assert done.stderr == ""
