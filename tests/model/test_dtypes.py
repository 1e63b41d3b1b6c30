"""Models with dtypes other than float32, and with several dtypes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.commands import simulate, summary
from tests.launch import needs
from tests.run_program import run_program

PROGRAM = Path(__file__).parent / "programs" / "mixed_dtypes.py"


def check(folder: Path, printed: str, kinds: list[str], most: float = 0.1) -> None:
    assert float(printed.split("loss")[1]) < most
    run_summary = summary(folder)
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
    saved = torch.load(folder / "model.pt")
    expected = {getattr(torch, kind) for kind in kinds}
    assert {value.dtype for value in saved.values()} == expected


@pytest.mark.parametrize(
    ("algorithm", "kinds"),
    [
        ("aladdin-ahead", ["float64"]),
        ("aladdin-ahead", ["bfloat16", "float32"]),
        pytest.param("bsp", ["float32", "float64"], marks=pytest.mark.long),
        pytest.param("sgp", ["bfloat16", "float32"], marks=pytest.mark.long),
    ],
)
def test_models_of_other_dtypes_train_in_simulation(
    tmp_path: Path, algorithm: str, kinds: list[str]
) -> None:
    words = ("--workers", "3", "--", tmp_path / "run", algorithm, *kinds)
    process = simulate(None, PROGRAM, *words)
    # A fixed wire format restricts aladdin-ahead.
    check(tmp_path / "run", process.stdout, kinds, most=0.2 if "float64" in kinds else 0.1)


@pytest.mark.long
@needs("openmpi")
def test_model_of_mixed_dtypes_trains_over_mpi(tmp_path: Path) -> None:
    kinds = ["bfloat16", "float32"]
    run = partial(run_program, PROGRAM, cwd=tmp_path)
    completed = run(3, "run", "bsp", *kinds)
    check(tmp_path / "run", completed.stdout, kinds)
    completed = run(2, "other", "multistep", *kinds, check=False)
    errors = [line for line in completed.stderr.splitlines() if "multistep" in line]
    assert sum("model: " in line and "dtype" in line for line in errors) == 1
