"""The reference pages have every option and every figure of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.simulate import main
from tests.launch import ROOT
from tools.reference import PAGE, page

DOCUMENTED = set(re.findall(r"`([a-z_]+)`", (ROOT / "docs/reference/run-folder.md").read_text()))


def test_options_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tools/reference.py"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_figure_of_a_run_is_documented(algorithm: str, tmp_path: Path) -> None:
    words = ["--algorithm", algorithm, "--workers", "2", "--samples", "128", "--quiet"]
    main([*words, "--bn-batches", "1", "--run-dir", str(tmp_path / "run")])
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    figures = set(json.loads((tmp_path / "run" / "summary.json").read_text()))
    assert lines
    for line in lines:
        figures |= set(json.loads(line))
    assert figures - DOCUMENTED == set()
