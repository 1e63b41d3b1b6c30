"""Build the delayed-copy test device (source/) once for each version of torch and of its source."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

NAME = "late_device"
SOURCE = Path(__file__).with_name("source")
BUILT = Path(sys.prefix) / "late"
COMPILER = "g++"
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w")


class BuildError(RuntimeError):
    """The compiler failed."""


def obstacle() -> str | None:
    """Return the reason why it cannot be built here, or None."""
    if shutil.which(COMPILER) is None:
        return f"no C++ compiler: there is no {COMPILER}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "no headers of Python (Debian: python3-dev)"
    return None


def library() -> Path:
    """Return the compiled device, and build it if it is missing.

    Raises:
        BuildError: the compiler failed.
    """
    BUILT.mkdir(exist_ok=True)
    path = BUILT / _signature() / f"{NAME}.so"
    with open(BUILT / "lock", "w") as lock:  # several test processes may want to build it
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _build(path)
    return path


def _signature() -> str:
    parts = [torch.__version__.encode(), sys.version.encode(), " ".join(OPTIONS).encode()]
    parts += [file.read_bytes() for file in sorted(SOURCE.iterdir())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(path: Path) -> None:
    folder = path.with_name(f"{path.parent.name}-objects")
    folder.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    includes = [root / "include", root / "include/torch/csrc/api/include"]
    includes.append(Path(sysconfig.get_paths()["include"]))
    flags = [*OPTIONS, *(f"-I{each}" for each in includes), f"-DTORCH_EXTENSION_NAME={NAME}"]
    flags.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")
    sources = sorted(SOURCE.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(2) as pool:
        commands = [
            [COMPILER, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        list(pool.map(_run, commands))
    libraries = [f"-L{root / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
    linked = folder / path.name
    _run([COMPILER, "-shared", *map(str, objects), *libraries, "-o", str(linked)])
    path.parent.mkdir(exist_ok=True)
    linked.replace(path)
    shutil.rmtree(folder)


def _run(command: list[str]) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if completed.returncode:
        raise BuildError(f"{' '.join(command)}\n{completed.stderr[-8000:]}")
