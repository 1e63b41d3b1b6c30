"""Contents of the sdist and the wheel, and training with the wheel and its requirements only."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from email import message_from_string
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from aladdin_mpi.process.extras import EXTRAS
from tests.commands import summary
from tests.launch import ROOT, needs, run_ranks
from tests.test_packaging import needed

CACHES = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info"
)
AT_ROOT = {"build", "cifar10", "comparisons", "data", "dist", "runs"}
BUILD = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
REQUIRED_ONLY = Path(__file__).parent / "programs" / "required_packages_only"


@dataclass(frozen=True)
class Built:
    """Both distributions, unpacked; the wheel was built from the sdist."""

    sdist: Path
    wheel: Path

    def info(self, name: str) -> str:
        """Return a file of the wheel's metadata."""
        (file,) = self.wheel.glob(f"aladdin_mpi-*.dist-info/{name}")
        return file.read_text()

    @property
    def requirements(self) -> list[Requirement]:
        """Requirements of the wheel."""
        lines = message_from_string(self.info("METADATA")).get_all("Requires-Dist") or []
        return [Requirement(line) for line in lines]


def build(kind: str, source: Path, out: Path) -> Path:
    """Build ``sdist`` or ``wheel``; return the path of the file."""
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(out)]
    completed = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    (file,) = out.iterdir()
    return file


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("distributions")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=_not_source)
    shutil.unpack_archive(build("sdist", source, folder / "sdist-file"), folder / "sdist")
    (sdist,) = (folder / "sdist").iterdir()
    # Use a copy, because setuptools builds in its source folder.
    shutil.copytree(sdist, folder / "again")
    wheel = build("wheel", folder / "again", folder / "wheel-file")
    shutil.unpack_archive(wheel, folder / "wheel", "zip")
    return Built(sdist, folder / "wheel")


def _not_source(folder: str, names: list[str]) -> set[str]:
    """Return the names that ``shutil.copytree`` ignores: caches, and files of runs at the root."""
    left = AT_ROOT if Path(folder) == ROOT else set()
    return CACHES(folder, names) | left.intersection(names)


def files(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.long
def test_sdist_has_all_tracked_files(built: Built) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git checkout, so nothing to compare with")
    completed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    tracked = {name for name in completed.stdout.split("\0") if (ROOT / name).is_file()}
    assert {"tests/launch.py", "Makefile", "slurm/train.sbatch", "CITATION.cff"} <= tracked
    assert tracked - files(built.sdist) == set(), "name them in MANIFEST.in"


def test_wheel_has_only_package_with_its_data(built: Built) -> None:
    package = built.wheel / "aladdin_mpi"
    shipped = files(package)
    assert {"py.typed", "data/digits.npz"} <= shipped
    assert {path.name for path in built.wheel.iterdir()} - {"aladdin_mpi"} == {
        path.name for path in built.wheel.glob("*.dist-info")
    }
    scripts = {name: (ROOT / "slurm" / name).read_bytes() for name in files(ROOT / "slurm")}
    result = package / "slurm_scripts"
    assert {name: (result / name).read_bytes() for name in files(result)} == scripts
    assert "MIT License" in built.info("licenses/LICENSE")


def test_wheel_extras_match_libraries_named_in_errors(built: Built) -> None:
    extras = {
        each.name.replace("-", "_"): str(each.marker).split("'")[0].split('"')[1]
        for each in built.requirements
        if each.name.replace("-", "_") in EXTRAS
    }
    assert extras == EXTRAS
    (every,) = [
        each for each in built.requirements if each.extras and 'extra == "all"' in str(each.marker)
    ]
    of_scripts = {"lightning", "transformers"}  # who uses these libraries has installed them
    assert every.extras == set(EXTRAS.values()) - of_scripts


def test_console_commands_are_documented(built: Built) -> None:
    scripts = configparser.ConfigParser()
    scripts.read_string(built.info("entry_points.txt"))
    commands = dict(scripts["console_scripts"])
    assert "aladdin-slurm" in commands
    for command, target in commands.items():
        row = f"| `{command}` | `python -m {target.removesuffix(':main')}` |"
        assert row in (ROOT / "docs" / "install.md").read_text()


def test_citation_has_package_version(built: Built) -> None:
    version = message_from_string(built.info("METADATA"))["Version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def modules_of_others(requirements: Iterable[Requirement]) -> list[str]:
    """Return installed modules that neither these requirements nor their dependencies include."""
    seen: set[tuple[str, str]] = set()
    for each in requirements:
        if each.marker is None or each.marker.evaluate({"extra": ""}):
            needed(canonicalize_name(each.name), "", seen)
    ours = {name for name, _ in seen} | {"aladdin-mpi"}
    return [
        module
        for module, owners in metadata.packages_distributions().items()
        if not ours.intersection(map(canonicalize_name, owners))
    ]


@pytest.mark.long
@needs("openmpi")
def test_wheel_trains_with_required_packages_only(built: Built, tmp_path: Path) -> None:
    blocked = modules_of_others(built.requirements)
    assert {*EXTRAS, "pytest"} <= set(blocked)
    assert not {"torch", "mpi4py", "pydantic"} & set(blocked)
    path = {
        "PYTHONPATH": os.pathsep.join([str(REQUIRED_ONLY), str(built.wheel)]),
        "BLOCKED_MODULES": " ".join(blocked),
    }
    options = ["--epochs", "1", "--run-dir", "run"]
    completed = run_ranks(
        2, ["-m", "aladdin_mpi.train", *options], env=path, cwd=tmp_path, is_warm=False
    )
    hint = r'tensorboard/, curves\.png.*pip install "aladdin_mpi\[tensorboard,plots\]"'
    assert len(re.findall(hint, completed.stdout)) == 1, completed
    assert summary(tmp_path / "run")["test_accuracy"] > 0.5
    assert not {"tensorboard", "curves.png"} & {p.name for p in (tmp_path / "run").iterdir()}

    def start(*words: str) -> subprocess.CompletedProcess[str]:
        command, env = [sys.executable, "-m", *words], os.environ | path
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

    # Torch is imported to query the defaults of this optimizer, but still after MPI.
    words = ("--algorithm", "ar-sgd", "--optimizer", "adamw", "--lr", "x")
    wrong = start("aladdin_mpi.train", *words)
    assert (wrong.returncode, wrong.stderr.count("--lr: ")) == (2, 1), wrong
    assert start("aladdin_mpi.slurm", "init").returncode == 0
    assert files(tmp_path / "slurm") == files(ROOT / "slurm")
