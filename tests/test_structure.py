"""``tools/structure.py``: its figures match the package."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from aladdin_mpi import DataParallel
from aladdin_mpi.algorithms.aladdin import AladdinWorker
from aladdin_mpi.options.algorithms import AladdinOptions
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.launch import ROOT

PACKAGE = ROOT / "aladdin_mpi"
SECONDS = 240
"""The script traces three runs, one after the other."""


def measure(*options: str) -> str:
    """Run the script in a child process; return its output."""
    command = [sys.executable, str(ROOT / "tools" / "structure.py"), *options]
    child = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert child.returncode == 0, child.stderr
    return child.stdout


def place(kind: type) -> str:
    """Return the file that defines a class, relative to the package."""
    return str(Path(inspect.getfile(kind)).relative_to(PACKAGE))


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    path = tmp_path_factory.mktemp("structure") / "figures.json"
    table = measure("--json", str(path)).splitlines()
    measured = json.loads(path.read_text())
    for line, figure in zip(table[1:], measured, strict=False):
        target = "-" if figure["target"] is None else figure["target"]
        assert line.split() == [*figure["name"].split(), str(figure["value"]), str(target)]
    return {figure["name"]: figure for figure in measured}


@pytest.mark.long
def test_structure_sizes_equal_a_count_of_the_files(figures: dict[str, dict[str, Any]]) -> None:
    paths = list(PACKAGE.rglob("*.py"))
    values = {name: figure["value"] for name, figure in figures.items()}
    assert values["files"] == len(paths)
    assert values["lines"] == sum(len(path.read_text().splitlines()) for path in paths)
    methods = {
        name
        for kind in Transport.__mro__
        for name, value in vars(kind).items()
        if not name.startswith("_") and isinstance(value, FunctionType | property)
    }
    assert set(figures["public methods of Transport"]["names"]) == methods


@pytest.mark.long
def test_structure_import_figures_are_consistent(figures: dict[str, dict[str, Any]]) -> None:
    values = {name: figure["value"] for name, figure in figures.items()}
    assert 1 < values["imports per module, p90"] < values["imports per module, maximum"]
    assert values["imports per module, maximum"] < values["files"]
    assert 1 < values["longest import chain"] < values["files"]
    assert values["modules with exactly one importer"] < values["files"]
    assert values["import cycles"] == 0  # as in test_architecture.py
    for figure in figures.values():
        assert not figure["names"] or len(figure["names"]) == figure["value"]


@pytest.mark.long
def test_structure_traces_visit_files_used_by_a_gradient_and_an_option(
    figures: dict[str, dict[str, Any]],
) -> None:
    gradient = figures["files on a gradient's path"]["names"]
    option = figures["files on an option's path"]["names"]
    first_step = figures["files from DataParallel() to the first step"]["names"]
    for names in (gradient, option, first_step):
        assert 3 < len(names) < figures["files"]["value"]
        assert all((PACKAGE / name).is_file() for name in names)
        assert place(DataParallel) in names
        assert place(VirtualTransport) not in names
    assert place(AladdinWorker) in gradient
    assert place(AladdinOptions) in option
    assert "simulate.py" in option
    hooked = [name for name in gradient if "accumulate_grad_hook" in (PACKAGE / name).read_text()]
    assert hooked  # of a worker's parameters, in backward


@pytest.mark.long
def test_structure_diagram_is_transitively_reduced() -> None:
    first, *lines = measure("--layers").splitlines()
    assert first == "graph TD"
    edges = {tuple(line.split(" --> ")) for line in map(str.strip, lines) if "-->" in line}
    nodes = {line.strip().split("[")[0] for line in lines if "-->" not in line}
    assert nodes == {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert edges and {node for edge in edges for node in edge} <= nodes
    assert not [
        (low, high)
        for low, middle in edges
        for other, high in edges
        if middle == other and (low, high) in edges
    ]
