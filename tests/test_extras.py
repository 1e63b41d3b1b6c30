"""What works without the libraries of the extras, and what is said where it does not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from aladdin_mpi.data.datasets import load_dataset
from aladdin_mpi.data.models import SMALL_MODELS, build_model, list_models
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import extras
from aladdin_mpi.run import report
from tests.commands import compare
from tests.comparison.test_compare_parts import make_run, result


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them can be imported."""
    for library in extras.EXTRAS:
        monkeypatch.setitem(sys.modules, library, None)


def test_what_is_installed_is_not_missed() -> None:
    assert extras.missing(*extras.EXTRAS) == []
    assert report.not_written() == ""


@pytest.mark.usefixtures("bare")
def test_what_is_needed_is_named_with_its_command(tmp_path: Path) -> None:
    install = re.escape('pip install "aladdin_mpi[vision]"')
    with pytest.raises(UserError, match=f"--dataset cifar10: expected torchvision, .*; {install}"):
        load_dataset("cifar10", tmp_path)
    with pytest.raises(UserError, match=f"--model: .*digits, mlp, .*'resnet18'; .*{install}"):
        build_model("resnet18", 10)
    assert list_models() == list(SMALL_MODELS)


@pytest.mark.usefixtures("bare")
def test_a_comparison_says_why_it_has_no_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run(tmp_path / "run", 0.5, 3), tmp_path / "out"
    assert compare(["--read", str(run), "--out", str(out)]) == 0
    said = 'No plots: matplotlib is not installed; pip install "aladdin_mpi[plots]"'
    assert said in capsys.readouterr().out
    assert said in (out / "report.md").read_text()
    assert len(result(out)["rows"]) == 1
    assert list(out.glob("*.png")) == []
