"""Damaged files and absurd input cause an error message instead of a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import MANIFEST
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.settings import build
from aladdin_mpi.options.toml_file import read_toml
from tests.commands import checkpoint, refusal, simulate
from tests.messages import check_names
from tests.run.program_runs import PROGRAMS

SHORT = ("--workers", 2, "--samples", 64, "--checkpoint-every", 32, "--eval-every", 0)


@pytest.mark.parametrize(
    "line", ["seed = 1" + "0" * 400, "seed = 1" + "0" * 5000, "samples = 100000000000000"]
)
def test_numbers_beyond_the_limit_in_toml_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(line)
    with pytest.raises(UserError, match=f"{path}.*(at most 1e|TOML)"):
        build(SimulateOptions, read_toml(SimulateOptions, path, "--config"))


@pytest.mark.parametrize("kind", ["train", "test"])
def test_empty_dataset_is_refused(tmp_path: Path, kind: str) -> None:
    options = ("--dataset", f"bad_sets:no_{kind}", "--samples", 64, "--workers", 2)
    completed = simulate(tmp_path / "run", *options, check=False, modules=PROGRAMS)
    check_names(refusal(completed), f"--dataset bad_sets:no_{kind}", f"the {kind}")


@pytest.mark.parametrize("content", ["", "[]", '{"samples": 64}', '{"samples": 64, "epochs": "x"}'])
def test_damaged_summary_is_refused_by_auto_resume(tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    simulate(run, *SHORT)
    (run / "summary.json").write_text(content)
    longer = (*SHORT[:3], 128, *SHORT[4:], "--resume", "auto")
    completed = simulate(run, *longer, check=False)
    check_names(refusal(completed), "--resume auto", str(run / "summary.json"))


def test_damaged_manifest_is_refused_by_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    simulate(run, *SHORT)
    path = checkpoint(run) / MANIFEST
    valid: dict[str, Any] = json.loads(path.read_text())
    damages: tuple[dict[str, Any], ...] = (
        {"parts": valid["parts"][:1]},
        {"parts": [{}] * 3},
        {"option": None},
    )
    for damage in damages:
        path.write_text(json.dumps({**valid, **damage}))
        completed = simulate(None, "--resume", run, "--samples", 128, check=False)
        check_names(refusal(completed), "--resume", str(path))


def test_metrics_path_that_is_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    completed = simulate(tmp_path, *SHORT, "--overwrite", check=False)
    check_names(refusal(completed), "Is a directory", "metrics.jsonl")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--epochs", 1e308), ["--epochs", "1e"]),
        (
            ("--model", "size:1e400", "--compute", "timed", "--samples", 64),
            ["--model size:1e400", "at most 1e"],
        ),
        (
            ("--dataset", "bad_sets:ragged", "--model", "bad_sets:model", "--samples", 64),
            ["one shape", "[4]", "[5]"],
        ),
    ],
)
def test_invalid_input_is_reported_once(
    tmp_path: Path, options: tuple[object, ...], names: list[str]
) -> None:
    completed = simulate(tmp_path / "run", *options, "--workers", 2, check=False, modules=PROGRAMS)
    check_names(refusal(completed), *names)
