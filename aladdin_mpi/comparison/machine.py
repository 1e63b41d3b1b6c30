"""What something ran on: stored beside its results."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOT = _PACKAGE.parent
# In a process of its own, because the setting would hold for this one's MPI as well.
_ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)

Machine = Mapping[str, str | int | float | None]
"""Facts by name; None for what cannot be found out."""


def machine() -> Machine:
    """The hardware and the versions in use; None for what cannot be found out.

    ``cores`` are those this process may use, ``memory_gib`` is the machine's main memory in
    GiB, ``date`` is in UTC. ``commit`` is that of the package's checkout, if it runs from one,
    and ends in "+changes" where that was modified.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "os": _operating_system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "mpi4py": _version("mpi4py"),
        "mpi": _mpi_library(),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def describe_machine(facts: Machine | None = None) -> str:
    """:func:`machine`, or the facts it gave before, as lines of text."""
    facts = machine() if facts is None else facts
    return "\n".join(f"{key:<10} {'-' if value is None else value}" for key, value in facts.items())


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return round(size / 2**30, 1)


def _operating_system() -> str:
    kernel = f"{platform.system()} {platform.release().partition('-')[0]}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except OSError:
        return kernel


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    git = ["git", "-C", str(_ROOT)]
    # An installed package may lie inside the checkout of something else.
    if _output([*git, "ls-files", "--", str(_PACKAGE / "__init__.py")]) is None:
        return None
    commit = _output([*git, "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return None
    # New results do not make it another program.
    changed = _output([*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"])
    return f"{commit}+changes" if changed else commit


def _gpus() -> str | None:
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return ", ".join(names.splitlines()) if names else None


def _mpi_library() -> str | None:
    """Its name and version, without the details of how it was built."""
    text = _output([sys.executable, "-c", _ASK_MPI])
    return text.splitlines()[0].partition(",")[0].strip("\0 ") if text else None


def _output(command: list[str]) -> str | None:
    """What a command prints, or None where it is missing, fails or prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        return None
    return (done.stdout.strip() or None) if done.returncode == 0 else None
