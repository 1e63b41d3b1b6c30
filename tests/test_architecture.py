"""docs/design/architecture.md: each layer of the package uses only those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.launch import ROOT

PACKAGE = "aladdin_mpi"
LAYERS = (
    "errors accelerator",
    "options",
    "process",
    "transport",
    "flat",
    "optimizers",
    "control",
    "codec",
    "allreduce",
    "worker",
    "exchange",
    "algorithms",
    "data",
    "session",
    "hooks",
    "run",
    "accelerate",
    "comparison probing",
    "advice",
    "servers slurm",
    "advise compare probe simulate train",
)
"""Folders of the package, the lowest first, and the files beside them."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, with the names that it takes from them."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def files() -> Iterator[tuple[str, Path]]:
    """Every file of the package but its front page, by its place in it."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        place = path.relative_to(ROOT / PACKAGE).as_posix()
        if place != "__init__.py":
            yield place, path


def top(place: str) -> str:
    """The file or folder of the package that a file is or belongs to."""
    return place.split("/")[0].removesuffix(".py")


def test_every_package_file_has_a_layer() -> None:
    assert {top(place) for place, _ in files()} == set(LEVEL)


def test_layers_import_only_layers_below() -> None:
    upwards = [
        f"{place} imports {module}"
        for place, path in files()
        for module in imports(path)
        if module.startswith(f"{PACKAGE}.")
        and LEVEL.get(module.split(".")[1], -1) > LEVEL[top(place)]
    ]
    assert upwards == []


def uses() -> dict[str, set[str]]:
    """The files of the package that each file imports, by their places."""
    places = {
        f"{PACKAGE}.{place.removesuffix('.py').replace('/', '.')}": place for place, _ in files()
    }
    return {
        place: {
            places[name]
            for module in imports(path)
            for name in (module, module.rpartition(".")[0])
            if name in places
        }
        for place, path in files()
    }


def test_package_has_no_import_cycle() -> None:
    """Not for type checking either."""
    order = TopologicalSorter(uses())
    order.prepare()  # raises CycleError, which names the files


def bases() -> dict[str, list[str]]:
    """The classes of the package that each class of it names as its bases."""
    result = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for _, path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    return {name: [base for base in named if base in result] for name, named in result.items()}


PROTOCOLS = {"PointToPoint", "Collectives", "Clock", "FailureDetector"}
"""The parts of the interface Transport: what each engine implements."""


def test_classes_have_at_most_two_package_ancestors() -> None:
    """A class has at most two ancestors of the package, but for errors and the four protocols."""
    known = bases()

    def ancestors(name: str) -> set[str]:
        own = set(known[name]) - PROTOCOLS
        return own.union(*(ancestors(base) for base in own))

    deep = {
        name: sorted(ancestors(name))
        for name in known
        if len(ancestors(name)) > 2 and not name.endswith("Error")
    }
    assert deep == {}


def test_algorithms_import_no_engine() -> None:
    """So one text of theirs runs over MPI and in virtual time."""
    engines = ("mpi4py", f"{PACKAGE}.transport.mpi", f"{PACKAGE}.transport.virtual")
    knowing = {
        top(place)
        for place, path in files()
        for module in imports(path)
        if f"{module}.".startswith(tuple(f"{engine}." for engine in engines))
    }
    assert knowing == {"advice", "probe", "process", "transport", "run", "train"}


def test_only_reports_query_engine_name() -> None:
    """Everybody else asks the transport what it can do."""
    asking = {
        place
        for place, path in files()
        if not place.startswith("transport/") and "transport.engine" in path.read_text()
    }
    assert asking == {"hooks/checkpoints.py", "run/summary.py"}


def test_layers_below_data_do_not_import_the_options_of_commands() -> None:
    """These are composed while algorithms of other packages, which stand on the layers, load."""
    composing = {
        place
        for place, used in uses().items()
        if "options/run.py" in used and LEVEL[top(place)] < LEVEL["data"]
    }
    assert composing <= {"options/run.py"}


def test_hooks_do_not_import_each_other() -> None:
    """A hook knows the session, and no other hook."""
    hooks = {
        f"hooks/{path.name}"
        for path in (ROOT / PACKAGE / "hooks").glob("*.py")
        if "(RunHook)" in path.read_text()
    }
    assert "hooks/checkpoints.py" in hooks
    assert {place: used & hooks for place, used in uses().items() if place in hooks} == {
        place: set() for place in hooks
    }
