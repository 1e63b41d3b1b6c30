"""Measure the package's structure, so that the figures can be compared over time.

``python tools/structure.py`` prints a table of figures with their targets.
``tools/structure_traces.py`` defines and measures the last three; the others are read from the
syntax trees of the package:

- The imports of a module are the modules of the package that it imports anywhere, including inside
  functions and for type checking. ``from package import name`` counts as the module ``name`` if
  there is one. The front page, ``__init__.py`` of the package, is left out: it re-exports names.
  A chain counts its modules, and a cycle in it as one.
- The public methods of Transport are those that the class and its bases in the package, the four
  protocols, define, including properties. Those of the objects that only one engine has,
  ``Simulation`` and ``PollHooks``, are counted apart.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeAlias

PACKAGE = "aladdin_mpi"
ROOT = Path(__file__).resolve().parent.parent
REPEATED = "class names defined more than once"
OPTIONAL = ("Simulation", "PollHooks")
"""The protocols of objects that a transport may have."""
TRACES = {
    "gradient": ("files on a gradient's path", 14),
    "option": ("files on an option's path", 8),
    "first-step": ("files from DataParallel() to the first step", 20),
}
TRACE_SECONDS = 110
Graph: TypeAlias = dict[str, set[str]]


@dataclass
class Figure:
    """A figure, its target if it has one, and the names of what it counts."""

    name: str
    value: int
    target: int | None = None
    names: list[str] = field(default_factory=list)


# -- graphs -----------------------------------------------------------------------------------
def reachable(graph: Graph) -> Graph:
    """Return the nodes that can be reached from each node along one edge or more."""
    result: Graph = {}
    for start in graph:
        seen: set[str] = set()
        pending = list(graph[start])
        while pending:
            node = pending.pop()
            if node not in seen:
                seen.add(node)
                pending += graph[node]
        result[start] = seen
    return result


def condense(graph: Graph) -> Graph:
    """Merge each cycle into one node, whose name lists its members."""
    below = reachable(graph)
    merged_name = {
        node: ", ".join(sorted({node} | {each for each in below[node] if node in below[each]}))
        for node in graph
    }
    merged: Graph = {name: set() for name in merged_name.values()}
    for node, targets in graph.items():
        name = merged_name[node]
        merged[name] |= {merged_name[target] for target in targets} - {name}
    return merged


def split(node: str) -> list[str]:
    """Return the members of a node of a condensed graph."""
    return node.split(", ")


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest path of a graph without cycles."""

    @cache
    def chain(node: str) -> list[str]:
        return [node, *max((chain(each) for each in sorted(graph[node])), key=len, default=[])]

    return max((chain(node) for node in sorted(graph)), key=len)


# -- the package ------------------------------------------------------------------------------
def parse() -> dict[str, ast.Module]:
    """Return the syntax trees of all modules by their dotted names."""
    trees = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        trees[name.removesuffix(".__init__")] = ast.parse(path.read_text(), str(path))
    return trees


def imports(trees: Mapping[str, ast.Module]) -> Graph:
    """Return the modules of the package that each module imports."""
    graph: Graph = {}
    for name, tree in trees.items():
        if name == PACKAGE:
            continue
        imported: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif (
                isinstance(node, ast.ImportFrom) and node.module
            ):  # the package has no relative ones
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                imported |= {each if each in trees else node.module for each in inner.values()}
        graph[name] = imported & trees.keys() - {name, PACKAGE}
    return graph


def public_methods(classes: Mapping[str, ast.ClassDef], name: str) -> set[str]:
    """Return the public methods and properties of a class and its bases in the package."""
    functions = [node for node in classes[name].body if isinstance(node, ast.FunctionDef)]
    bases = {ast.unparse(base).split("[")[0] for base in classes[name].bases}
    own = {node.name for node in functions if not node.name.startswith("_")}
    return own.union(*(public_methods(classes, base) for base in bases & classes.keys()))


def static_figures() -> list[Figure]:
    """Measure what the syntax trees show."""
    trees = parse()
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    repeated = sorted(name for name, n in Counter(node.name for node in classes).items() if n > 1)
    by_name = {node.name: node for node in classes}
    methods = sorted(public_methods(by_name, "Transport"))
    optional = sorted(
        f"{kind}.{name}" for kind in OPTIONAL for name in public_methods(by_name, kind)
    )
    conditions = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If)]
    texts = [path.read_text() for path in (ROOT / PACKAGE).rglob("*.py")]
    graph = imports(trees)
    counts = sorted(map(len, graph.values()))
    importers = Counter(module for imported in graph.values() for module in imported)
    single = sorted(module for module, count in importers.items() if count == 1)
    acyclic = condense(graph)
    chain = longest_chain(acyclic)
    cycles = [node for node in acyclic if len(split(node)) > 1]
    return [
        Figure("files", len(texts), 200),
        Figure("lines", sum(len(text.splitlines()) for text in texts), 38_000),
        Figure("if TYPE_CHECKING blocks", conditions.count("TYPE_CHECKING"), 10),
        Figure("public methods of Transport", len(methods), 25, methods),
        Figure("methods that only one engine has", len(optional), None, optional),
        Figure("imports per module, p90", counts[len(counts) * 9 // 10], 8),
        Figure("imports per module, maximum", counts[-1], 20),
        Figure("modules with exactly one importer", len(single), None, single),
        Figure("longest import chain", len(chain), None, chain),
        Figure("import cycles", len(cycles), 0, cycles),
        Figure(REPEATED, len(repeated), 0, repeated),
    ]


def traced_figures() -> list[Figure]:
    """Measure what a traced run shows, each figure in a separate process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    figures = []
    for trace, (name, target) in TRACES.items():
        command = [sys.executable, str(Path(__file__).with_name("structure_traces.py")), trace]
        with tempfile.TemporaryDirectory() as folder:  # in which the run creates its run folder
            child = subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=TRACE_SECONDS
            )
        if child.returncode:
            raise SystemExit(f"{name}: the traced run failed.\n{child.stderr}")
        files = json.loads(child.stdout.splitlines()[-1])
        figures.append(Figure(name, len(files), target, files))
    return figures


def layers() -> str:
    """Return a Mermaid diagram of folders and top-level modules, transitively reduced."""
    graph: Graph = {}
    for module, imported in imports(parse()).items():
        top = module.split(".")[1]
        graph.setdefault(top, set()).update({each.split(".")[1] for each in imported} - {top})
    graph = condense(graph)
    below = reachable(graph)
    lines = ["graph TD"]
    for node in sorted(graph):
        names = [f"{each}/" if (ROOT / PACKAGE / each).is_dir() else each for each in split(node)]
        lines.append(f'    {"_".join(split(node))}["{", ".join(names)}"]')
    for node in sorted(graph):
        indirect = {far for near in graph[node] for far in below[near]}
        for target in sorted(graph[node] - indirect):
            lines.append(f"    {'_'.join(split(node))} --> {'_'.join(split(target))}")
    return "\n".join(lines)


# -- the command ------------------------------------------------------------------------------
def table(figures: list[Figure], lists_all: bool) -> str:
    """Return the figures as a table, followed by lists of what they count."""
    lines = [f"{'figure':<44}{'value':>8}{'target':>8}"]
    for figure in figures:
        target = "-" if figure.target is None else figure.target
        lines.append(f"{figure.name:<44}{figure.value:>8}{target:>8}")
    for figure in figures:
        if figure.names and (lists_all or figure.name == REPEATED):
            lines += ["", f"{figure.name}:", *(f"  {name}" for name in figure.names)]
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="also list what each figure counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all of it as JSON")
    parser.add_argument("--layers", action="store_true", help="only print a diagram of the layers")
    options = parser.parse_args()
    if options.layers:
        print(layers())
        return
    figures = [*static_figures(), *traced_figures()]
    print(table(figures, options.list))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
