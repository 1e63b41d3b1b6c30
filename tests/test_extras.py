"""Behaviour without the libraries of the extras, and the errors about them."""

from __future__ import annotations

import re
import sys
from importlib import import_module
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
    """Make imports of all extras fail."""
    for library in extras.EXTRAS:
        monkeypatch.setitem(sys.modules, library, None)


def test_installed_extras_are_not_reported_missing() -> None:
    assert extras.missing(*extras.EXTRAS) == []
    assert report.not_written() == ""


@pytest.mark.usefixtures("bare")
def test_missing_extra_error_names_install_command(tmp_path: Path) -> None:
    install = re.escape('pip install "aladdin_mpi[vision]"')
    with pytest.raises(UserError, match=f"--dataset cifar10 .*torchvision.*{install}"):
        load_dataset("cifar10", tmp_path)
    with pytest.raises(UserError, match=f"--model: .*digits, mlp, .*'resnet18'.*{install}"):
        build_model("resnet18", 10)
    assert list_models() == list(SMALL_MODELS)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("lightning", "lightning"),
        ("pytorch_lightning", "lightning"),
        ("transformers", "transformers"),
    ],
)
def test_integration_without_its_library_names_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    module = f"aladdin_mpi.integrations.{name}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    install = re.escape(f'pip install "aladdin_mpi[{extra}]"')
    with pytest.raises(UserError, match=f"^{re.escape(module)} requires {name}.*{install}"):
        import_module(module)


@pytest.mark.usefixtures("bare")
def test_comparison_without_matplotlib_names_plots_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run(tmp_path / "run", 0.5, 3), tmp_path / "out"
    assert compare(["--read", str(run), "--out", str(out)]) == 0
    hint = re.compile(r'\bplots\b.*\bmatplotlib\b.*pip install "aladdin_mpi\[plots\]"')
    assert hint.search(capsys.readouterr().out)
    assert hint.search((out / "report.md").read_text())
    assert len(result(out)["rows"]) == 1
    assert list(out.glob("*.png")) == []
