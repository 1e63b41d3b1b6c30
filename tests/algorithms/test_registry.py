"""An algorithm is one file, inside the package or outside."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS, VARIABLE
from tests.commands import simulate, summary, train
from tests.launch import ROOT

TOY = {VARIABLE: "tests.algorithms.toy", "PYTHONPATH": str(ROOT)}
PLAN = ["--algorithm", "toy", "--toy-divisor", 2, "--epochs", 3]


def test_an_algorithm_from_outside_trains_in_virtual_time(tmp_path: Path) -> None:
    done = simulate(tmp_path / "run", *PLAN, "--workers", 2, env=TOY, is_warm=False)
    assert done.returncode == 0, done
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9
    assert "divisor = 2.0" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.long
def test_an_algorithm_from_outside_trains_over_mpi(tmp_path: Path) -> None:
    train(3, tmp_path / "run", *PLAN, env=TOY, is_warm=False)
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    env = {VARIABLE: "no_such_module"}
    done = simulate(tmp_path / "run", env=env, check=False, is_warm=False)
    assert done.returncode == 2
    assert f"{VARIABLE}: expected modules that register algorithms, got 'no_such_module'" in (
        done.stderr
    )


def test_generic_code_asks_for_no_algorithm_by_name() -> None:
    asked = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "aladdin_mpi").rglob("*.py")
        if path.parent.name != "algorithms"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare)
        for side in ast.walk(node)
        if isinstance(side, ast.Constant) and side.value in ALGORITHMS
    ]
    assert asked == []


def test_the_tables_have_every_algorithm() -> None:
    for page in ("README.md", "docs/algorithms.md"):
        rows = re.findall(r"(?m)^\| (`[^|]*)", (ROOT / page).read_text())
        named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
        assert set(ALGORITHMS) <= named, page
