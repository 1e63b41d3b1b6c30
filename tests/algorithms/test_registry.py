"""Registration of algorithms, each of which is one file inside or outside the package."""

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


@pytest.mark.long
def test_external_algorithm_trains_in_simulation(tmp_path: Path) -> None:
    completed = simulate(tmp_path / "run", *PLAN, "--workers", 2, env=TOY, is_warm=False)
    assert completed.returncode == 0, completed
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9
    assert "divisor = 2.0" in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.long
def test_external_algorithm_trains_over_mpi(tmp_path: Path) -> None:
    train(3, tmp_path / "run", *PLAN, env=TOY, is_warm=False)
    assert summary(tmp_path / "run")["test_accuracy"] > 0.9


def test_missing_algorithm_module_is_named(tmp_path: Path) -> None:
    env = {VARIABLE: "no_such_module"}
    completed = simulate(tmp_path / "run", env=env, check=False, is_warm=False)
    assert completed.returncode == 2
    assert re.search(rf"{VARIABLE}: .*'no_such_module'", completed.stderr)


def test_generic_code_names_no_algorithm() -> None:
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


def test_document_tables_list_every_algorithm() -> None:
    for page in ("README.md", "docs/reference/algorithms.md"):
        rows = re.findall(r"(?m)^\| (`[^|]*)", (ROOT / page).read_text())
        named = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
        assert set(ALGORITHMS) <= named, page


def test_three_algorithms_average_all_gradients() -> None:
    averaging = {name for name, each in ALGORITHMS.items() if each.averages_gradients}
    assert averaging == {"ar-sgd", "bsp", "multistep"}
