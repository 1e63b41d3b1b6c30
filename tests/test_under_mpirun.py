"""Runs tests/mpi under real launchers, and shows that a failure there is noticed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.launch import needs, run_ranks

LONG = {"openmpi": [], "mpich": [pytest.mark.long], "impi": [pytest.mark.long]}
MPIS = [pytest.param(mpi, marks=[needs(mpi), *LONG[mpi]]) for mpi in ("openmpi", "mpich")]
ONCE = ("test_compression.py", "test_gossip.py", "test_refused.py", "test_unnamed_death.py")
"""Those in which the number of ranks decides nothing: they run on three."""
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


def ignored(names: Iterable[str]) -> list[str]:
    """The words by which pytest leaves files out."""
    return [f"--ignore=tests/mpi/{name}" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpi", "ranks", "tests"),
    [
        pytest.param(
            mpi,
            ranks,
            tests,
            marks=[needs(mpi), *([] if mpi == "openmpi" and ranks < 4 else [pytest.mark.long])],
        )
        for mpi, ranks, tests in [
            ("openmpi", 2, ["tests/mpi", *ignored(ONCE)]),
            ("openmpi", 3, ["tests/mpi"]),
            ("openmpi", 4, ["tests/mpi", *ignored(ONCE)]),
            # Only the transport knows which MPI it is.
            ("mpich", 3, ["tests/mpi/test_engine.py"]),
            ("impi", 3, ["tests/mpi/test_engine.py"]),
        ]
    ],
)
def test_suite_passes_on_every_rank(mpi: str, ranks: int, tests: list[str]) -> None:
    done = run_ranks(ranks, [*PYTEST, *tests], mpi=mpi, timeout=280, check=False)
    assert done.returncode == 0, repr(done)
    passed = re.findall(r"(\d+) passed", done.stdout)
    assert len(passed) == 1, f"one rank reports: {done}"
    assert int(passed[0]) >= 2


ONE_RANK_FAILS = """
from mpi4py import MPI

def test_uneven():
    world = MPI.COMM_WORLD
    assert world.rank != 1, "only here"
    world.Barrier()
"""

ONE_RANK_HANGS = """
import threading
from mpi4py import MPI

def test_uneven():
    if MPI.COMM_WORLD.rank == 1:
        threading.Event().wait()
    MPI.COMM_WORLD.Barrier()
"""


def run_file(tmp_path: Path, content: str, mpi: str, seconds: str = "60") -> str:
    """Run a test file on three ranks, which must fail, and return what it printed."""
    file = tmp_path / "test_uneven.py"
    file.write_text(content)
    args = [*PYTEST, "-p", "tests.mpi.conftest", "-c", "pyproject.toml", str(file)]
    env = {"ALADDIN_MPI_TEST_SECONDS": seconds}
    done = run_ranks(3, args, mpi=mpi, timeout=100, env=env, check=False)
    assert done.returncode != 0, repr(done)
    return done.stdout + done.stderr


@pytest.mark.parametrize("mpi", MPIS)
def test_failure_on_one_rank_ends_all(tmp_path: Path, mpi: str) -> None:
    printed = run_file(tmp_path, ONE_RANK_FAILS, mpi)
    assert re.search(r"rank 1: .*::test_uneven failed", printed), printed
    assert "only here" in printed


@pytest.mark.parametrize("mpi", MPIS)
def test_hang_ends_with_stacks(tmp_path: Path, mpi: str) -> None:
    printed = run_file(tmp_path, ONE_RANK_HANGS, mpi, seconds="3")
    assert "Timeout" in printed, printed
    assert "in test_uneven" in printed
