"""Layers of docs/design/architecture.md: each uses only the layers below it."""

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
    "integrations",
    "comparison probing",
    "advice",
    "servers slurm",
    "advise compare probe simulate train",
)
"""Top-level folders and files of the package, the lowest layer first."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def imports(path: Path) -> Iterator[str]:
    """Return the modules that a file imports, with the imported names."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        nodes += ast.iter_child_nodes(node)


def files() -> Iterator[tuple[str, Path]]:
    """Return every file of the package except the top-level ``__init__``, by its relative path."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        place = path.relative_to(ROOT / PACKAGE).as_posix()
        if place != "__init__.py":
            yield place, path


def top(place: str) -> str:
    """Return the top-level file or folder of the package to which a file belongs."""
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
    """Return the files of the package that each file imports, by their relative paths."""
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
    """Imports for type checking are included."""
    order = TopologicalSorter(uses())
    order.prepare()  # raises CycleError, which names the files


def bases() -> dict[str, list[str]]:
    """Return the base classes within the package of each class."""
    result = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for _, path in files()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    return {name: [base for base in named if base in result] for name, named in result.items()}


PROTOCOLS = {"PointToPoint", "Collectives", "Clock", "FailureDetector"}
"""The protocols of Transport, which each engine implements."""


def test_classes_have_at_most_two_package_ancestors() -> None:
    """Error classes and the four protocols do not count."""
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
    """The same code therefore runs over MPI and in simulation."""
    engines = ("mpi4py", f"{PACKAGE}.transport.mpi", f"{PACKAGE}.transport.virtual")
    knowing = {
        top(place)
        for place, path in files()
        for module in imports(path)
        if f"{module}.".startswith(tuple(f"{engine}." for engine in engines))
    }
    assert knowing == {"advice", "probe", "process", "transport", "run", "train"}


def test_only_reports_query_engine_name() -> None:
    """All other code queries the transport's capabilities."""
    asking = {
        place
        for place, path in files()
        if not place.startswith("transport/") and "transport.engine" in path.read_text()
    }
    assert asking == {"hooks/checkpoints.py", "run/summary.py"}


def test_layers_below_data_do_not_import_the_options_of_commands() -> None:
    """Command options are built while external algorithms, which use these layers, load."""
    composing = {
        place
        for place, used in uses().items()
        if "options/run.py" in used and LEVEL[top(place)] < LEVEL["data"]
    }
    assert composing <= {"options/run.py"}


def test_run_hooks_do_not_import_each_other() -> None:
    """A hook uses the session and no other hook."""
    hooks = {
        f"hooks/{path.name}"
        for path in (ROOT / PACKAGE / "hooks").glob("*.py")
        if "(RunHook)" in path.read_text()
    }
    assert "hooks/checkpoints.py" in hooks
    assert {place: used & hooks for place, used in uses().items() if place in hooks} == {
        place: set() for place in hooks
    }
