"""Container recipes: built and run if the tools are available, otherwise checked as text."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.launch import ROOT

SCRIPTS = sorted(path for path in (ROOT / "slurm").rglob("*.s[bh]*") if path.is_file())
FOLDER = ROOT / "tools" / "container"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "3"]
TRAINING = ["aladdin-train", "--epochs", "1", "--run-dir", "/tmp/run"]


def copied(recipe: str) -> set[str]:
    """Return the files that a recipe copies from the project."""
    text = (FOLDER / recipe).read_text()
    if recipe == "Dockerfile":
        lines = re.findall(r"^COPY (.*) \S+$", text, re.M)
        return {name for line in lines for name in line.split()}
    (files,) = re.findall(r"%files\n(.*?)\n\n", text, re.S)
    return {line.split()[0] for line in files.splitlines()}


@pytest.mark.sample(1)
@pytest.mark.parametrize("recipe", ["Dockerfile", "aladdin_mpi.def"])
def test_container_recipe_copies_all_that_install_needs(recipe: str, tmp_path: Path) -> None:
    for name in copied(recipe):
        source = ROOT / name
        if source.is_dir():
            # Docker copies the link slurm_scripts, Apptainer the link's target.
            shutil.copytree(source, tmp_path / name, symlinks=recipe == "Dockerfile")
        else:
            shutil.copy(source, tmp_path / name)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    completed = subprocess.run(
        [*build, "--wheel-dir", "wheel", "."],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert completed.returncode == 0, completed.stderr
    (wheel,) = (tmp_path / "wheel").glob("aladdin_mpi-*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    sources = [*(ROOT / "aladdin_mpi").rglob("*.py"), ROOT / "aladdin_mpi" / "data" / "digits.npz"]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= packed
    scripts = {path.relative_to(ROOT / "slurm").as_posix() for path in SCRIPTS}
    assert {f"aladdin_mpi/slurm_scripts/{name}" for name in scripts} <= packed


def test_container_recipes_copy_and_install_the_same() -> None:
    assert copied("Dockerfile") == copied("aladdin_mpi.def")
    installs = {
        re.findall(r"pip install .*", (FOLDER / name).read_text())[0]
        for name in ("Dockerfile", "aladdin_mpi.def")
    }
    assert len(installs) == 1


def test_dockerignore_allows_exactly_copied_files() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied("Dockerfile")


def test_container_installs_existing_extra_with_constraints() -> None:
    (line,) = re.findall(r"pip install .*", (FOLDER / "Dockerfile").read_text())
    (extra,) = re.findall(r"'\.\[(.*)\]'", line)
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
    assert "--constraint constraints.txt" in line and "constraints.txt" in copied("Dockerfile")


def has_docker() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        return subprocess.run(["docker", "info"], capture_output=True, timeout=20).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run(*command: str) -> str:
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.long
@pytest.mark.skipif(not has_docker(), reason="there is no docker, or its daemon does not run")
def test_docker_trains_on_three_ranks() -> None:
    run("docker", "build", "-t", "aladdin_mpi-test", "-f", str(FOLDER / "Dockerfile"), ".")
    printed = run("docker", "run", "--rm", "aladdin_mpi-test", *MPIRUN, *TRAINING)
    assert "test accuracy" in printed


@pytest.mark.long
@pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed")
def test_apptainer_trains_on_three_ranks(tmp_path: Path) -> None:
    image = str(tmp_path / "aladdin_mpi.sif")
    run("apptainer", "build", image, str(FOLDER / "aladdin_mpi.def"))
    # Excludes the host's /tmp and this folder, which contains the package as well.
    printed = run("apptainer", "exec", "--containall", image, *MPIRUN, *TRAINING)
    assert "test accuracy" in printed
