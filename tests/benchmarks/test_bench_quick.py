"""Reduced pass of all benchmarks, and the page that lists them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import quick_pass
from benchmarks.quick_pass import Pass

FOLDER = Path(quick_pass.__file__).parent
SCRIPTS = {path.stem for path in FOLDER.glob("*.py") if "def main(argv" in path.read_text()} - {
    "quick_pass",
    "lab",
}


def test_every_benchmark_has_a_reduced_pass() -> None:
    assert {one.name for one in quick_pass.PASSES} == SCRIPTS


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_benchmark_is_documented(name: str) -> None:
    page = (FOLDER / "README.md").read_text()
    assert f"`python -m benchmarks.{name} " in page


@pytest.mark.long
def test_quick_pass_reports_failed_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Pass("kernels", ("--quick", "--repeats", "1"))
    bad = Pass("intake", ("--workers", "none"))
    monkeypatch.setattr(quick_pass, "PASSES", (good, bad))
    assert quick_pass.main([]) == 1
    printed = capsys.readouterr().out
    assert "| kernels | ok |" in printed
    assert re.search(r"\| intake \| .*\b2 \|", printed)
    assert quick_pass.main(["--only", "kernels"]) == 0
