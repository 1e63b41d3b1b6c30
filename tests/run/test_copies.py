"""Copies of a model by copy, pickle and torch.save, during and after training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import needs
from tests.run.program_runs import run_alone

pytestmark = needs("openmpi")


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        pytest.param("multistep", "module", marks=pytest.mark.long),
        ("ar-sgd", "fx"),
        pytest.param("ar-sgd", "module", marks=pytest.mark.long),
    ],
)
def test_copies_of_a_training_model_are_plain_models(
    tmp_path: Path, algorithm: str, kind: str
) -> None:
    """They have no hooks, do not affect the run, and do not need this package."""
    completed = run_alone(tmp_path, "model_copies", algorithm, kind)
    assert completed.stdout == "all equal\n", completed.stdout + completed.stderr
