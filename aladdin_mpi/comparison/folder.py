"""The folder of a comparison, and facts about the machine."""

from __future__ import annotations

import fcntl
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from aladdin_mpi.comparison.options import PROG, CompareOptions, ComparisonRequest
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.settings import build
from aladdin_mpi.options.toml_file import read_toml, to_toml
from aladdin_mpi.process import console
from aladdin_mpi.process.files import open_own, write_whole

_PACKAGE = Path(__file__).resolve().parent.parent
_ROOT = _PACKAGE.parent
# In a separate process, because the setting would affect this process's MPI too.
_ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)

Machine = Mapping[str, str | int | float | None]
"""Facts by name; None for unknown ones."""


def machine() -> Machine:
    """Return facts about hardware and versions.

    ``cores`` are those that this process may use, ``memory_gib`` is the main memory in GiB,
    ``date`` is in UTC. ``commit`` is that of the package's checkout, if it runs from one, and ends
    in "+changes" if that was modified.
    """
    gpus = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    mpi = _output([sys.executable, "-c", _ASK_MPI])
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": ", ".join(gpus.splitlines()) if gpus else None,
        "os": _operating_system(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "mpi4py": _version("mpi4py"),
        # Name and version, without build details.
        "mpi": mpi.splitlines()[0].partition(",")[0].strip("\0 ") if mpi else None,
        "commit": _commit(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


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
    # An installed package may be inside another project's checkout.
    if _output([*git, "ls-files", "--", str(_PACKAGE / "__init__.py")]) is None:
        return None
    commit = _output([*git, "rev-parse", "--short=12", "HEAD"])
    # New results are no change of the program.
    changed = _output([*git, "status", "--porcelain", "--", ".", ":!benchmarks/results"])
    return f"{commit}+changes" if commit and changed else commit


def _output(command: list[str]) -> str | None:
    """Return the output of a command; None if it is missing, fails or prints nothing."""
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (completed.stdout.strip() or None) if completed.returncode == 0 else None


MANIFEST = "comparison.toml"
LOCK = ".lock"
LOCK_SECONDS = 15.0
"""Time in which the runs of a killed comparison end by themselves."""
FIXED = ("engine", "workers", "script", "script_arguments")
"""Options that must not change when a comparison is resumed, in addition to each run's."""


def command_line(request: ComparisonRequest) -> str:
    """Return the command line of the comparison."""
    return console.command_line(["python", "-m", PROG, *request.words])


def check_out(out: Path, options: CompareOptions) -> None:
    """Refuse a folder with other contents.

    Raises:
        UserError: it holds other files, or another comparison.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out: expected a folder, got the file {str(out)!r}; choose another")
    if not (out / MANIFEST).is_file():
        others = sorted(path.name for path in out.iterdir() if path.name != LOCK)
        if others:
            raise UserError(
                "--out: expected a new or empty folder or that of a comparison, got "
                f"{str(out)!r}, which holds {', '.join(others[:5])} and no {MANIFEST}; choose "
                "another"
            )
        return
    stored = build(CompareOptions, read_toml(CompareOptions, out / MANIFEST, "--out"))
    wrong = [
        f"{name}: {getattr(stored, name)} and {getattr(options, name)}"
        for name in FIXED
        if getattr(stored, name) != getattr(options, name)
    ]
    if bool(stored.read) != bool(options.read):
        wrong.append("with and without --read")
    if wrong:
        raise UserError(
            f"--out: {str(out)!r} holds another comparison (its value first): "
            f"{'; '.join(wrong)}. Choose another --out."
        )


@contextmanager
def claimed(out: Path, request: ComparisonRequest) -> Iterator[int]:
    """Create and lock the folder, and yield the lock's descriptor.

    Children inherit the descriptor: the folder stays locked until the last of them has ended, even
    if the comparison itself is killed.

    Raises:
        UserError: the folder cannot be written, another comparison is using it, or the lock file is
            a symbolic link.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = open_own(out / LOCK, os.O_RDWR)
    except OSError as error:
        raise UserError(
            f"--out: cannot write into {str(out)!r}: {error.strerror}. Choose another folder."
        ) from error
    try:
        end = time.monotonic() + LOCK_SECONDS
        while not _try_lock(descriptor):
            if time.monotonic() > end:
                raise UserError(
                    f"--out: another comparison is running in {str(out)!r}. Wait until it ends, "
                    "or choose another --out."
                )
            time.sleep(0.1)
        write_whole(out / MANIFEST, f"# {command_line(request)}\n{to_toml(request.options)}")
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True
