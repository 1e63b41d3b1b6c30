"""Damaged files and absurd input: a sentence in place of a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.settings import build, read_toml
from aladdin_mpi.run.checkpoint import MANIFEST
from tests.commands import checkpoint, refusal, simulate

SHORT = ("--workers", 2, "--samples", 64, "--checkpoint-every", 32, "--eval-every", 0)
SETS = """
import torch
class Set(torch.utils.data.Dataset):
    classes = range(2)
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.ones(4), [0, 1][index]
def no_train():
    return Set(0), Set(2)
def no_test():
    return Set(2), Set(0)
class Ragged(Set):
    def __getitem__(self, index):
        return torch.ones(4 + index), index
def model():
    return torch.nn.Linear(4, 2)
def ragged():
    return Ragged(2), Ragged(2)
"""


@pytest.mark.parametrize(
    "line", ["seed = 1" + "0" * 400, "seed = 1" + "0" * 5000, "samples = 100000000000000"]
)
def test_numbers_without_end(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(line)
    with pytest.raises(UserError, match=f"{path}.*(at most 1e|not valid TOML)"):
        build(SimulateOptions, read_toml(SimulateOptions, path, "--config"))


@pytest.mark.parametrize("kind", ["train", "test"])
def test_an_empty_set(tmp_path: Path, kind: str) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    options = ("--dataset", f"sets:no_{kind}", "--samples", 64, "--workers", 2)
    done = simulate(tmp_path / "run", *options, check=False, modules=tmp_path)
    assert f"expected at least one sample in the {kind}" in refusal(done)


@pytest.mark.parametrize("content", ["", "[]", '{"samples": 64}', '{"samples": 64, "epochs": "x"}'])
def test_a_damaged_summary(tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    simulate(run, *SHORT)
    (run / "summary.json").write_text(content)
    longer = (*SHORT[:3], 128, *SHORT[4:], "--resume", "auto")
    done = simulate(run, *longer, check=False)
    assert "--resume auto: expected the summary of a run in" in refusal(done)


def test_a_damaged_manifest(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(run, *SHORT)
    path = checkpoint(run) / MANIFEST
    sound: dict[str, Any] = json.loads(path.read_text())
    damages: tuple[dict[str, Any], ...] = (
        {"parts": sound["parts"][:1]},
        {"parts": [{}] * 3},
        {"option": None},
    )
    for damage in damages:
        path.write_text(json.dumps({**sound, **damage}))
        done = simulate(None, "--resume", run, "--samples", 128, check=False)
        assert f"{path} is damaged: " in refusal(done)


def test_metrics_that_are_a_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    done = simulate(tmp_path, *SHORT, "--overwrite", check=False)
    assert "Is a directory (metrics.jsonl)" in refusal(done)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--epochs", 1e308), "--epochs: expected at most 1e"),
        (("--model", "size:1e400", "--compute", "timed", "--samples", 64), "at most 1e"),
        (
            ("--dataset", "sets:ragged", "--model", "sets:model", "--samples", 64),
            "inputs of one shape",
        ),
    ],
)
def test_it_is_told_once(tmp_path: Path, options: tuple[object, ...], told: str) -> None:
    (tmp_path / "sets.py").write_text(SETS)
    done = simulate(tmp_path / "run", *options, "--workers", 2, check=False, modules=tmp_path)
    assert told in refusal(done)
