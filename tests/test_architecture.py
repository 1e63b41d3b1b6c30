"""docs/architecture.md: each layer of the package uses only those below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.launch import ROOT

PACKAGE = "aladdin_mpi"
LAYERS = (
    "console errors extras guard stop_signal units",
    "transport",
    "tags vectors layout other_dtypes bound_gradients bucket_watch replica optimizers budget "
    "refusals barrier compression allreduce",
    "algorithms",
    "fields intervals settings agreement resume cli options unused",
    "training",
    "accelerate comparison machine batch_scripts",
    "compare greeting servers simulate slurm train",
)
"""Files and folders of the package, the lowest first; a layer's own may use each other."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names.split()}


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports when it runs, with the names that it takes from them."""
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
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


def test_every_file_has_a_layer() -> None:
    assert {top(place) for place, _ in files()} == set(LEVEL)


def test_layers_use_only_those_below() -> None:
    upwards = [
        f"{place} imports {module}"
        for place, path in files()
        for module in imports(path)
        if module.startswith(f"{PACKAGE}.")
        and LEVEL.get(module.split(".")[1], -1) > LEVEL[top(place)]
    ]
    assert upwards == []


def test_algorithms_know_neither_engine() -> None:
    """So one text of theirs runs over MPI and in virtual time."""
    engines = ("mpi4py", f"{PACKAGE}.transport.mpi", f"{PACKAGE}.transport.virtual")
    knowing = {
        top(place)
        for place, path in files()
        for module in imports(path)
        if f"{module}.".startswith(tuple(f"{engine}." for engine in engines))
    }
    assert knowing == {"guard", "transport", "training", "train"}
