"""Run tests/mpi under real launchers, and check that a failure there is detected."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from tests.launch import needs, run_ranks

LONG = {"openmpi": [], "mpich": [pytest.mark.long], "impi": [pytest.mark.long]}
MPIS = [pytest.param(mpi, marks=[needs(mpi), *LONG[mpi]]) for mpi in ("openmpi", "mpich")]
ONCE = ("test_compression.py", "test_gossip.py", "test_refused.py", "test_unidentified_failure.py")
"""Files whose tests do not depend on the number of ranks: they run on three."""
PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]


def ignored(names: Iterable[str]) -> list[str]:
    """Return the arguments that make pytest ignore files."""
    return [f"--ignore=tests/mpi/{name}" for name in names]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mpi", "ranks", "tests"),
    [
        pytest.param(
            mpi,
            ranks,
            tests,
            marks=[needs(mpi), *([] if (mpi, ranks) == ("openmpi", 3) else [pytest.mark.long])],
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
def test_mpi_suite_passes_on_every_rank(mpi: str, ranks: int, tests: list[str]) -> None:
    completed = run_ranks(ranks, [*PYTEST, *tests], mpi=mpi, timeout=280, check=False)
    assert completed.returncode == 0, repr(completed)
    passed = re.findall(r"(\d+) passed", completed.stdout)
    assert len(passed) == 1, f"one rank reports: {completed}"
    assert int(passed[0]) >= 2


def run_file(name: str, mpi: str, seconds: str = "60") -> str:
    """Run a test file on three ranks, which must fail, and return its output."""
    file = f"tests/programs/{name}"
    args = [*PYTEST, "-p", "tests.mpi.conftest", "-c", "pyproject.toml", file]
    env = {"ALADDIN_MPI_TEST_SECONDS": seconds}
    completed = run_ranks(3, args, mpi=mpi, timeout=100, env=env, check=False)
    assert completed.returncode != 0, repr(completed)
    return completed.stdout + completed.stderr


@pytest.mark.long
@pytest.mark.parametrize("mpi", MPIS)
def test_mpi_suite_failure_on_one_rank_ends_all_ranks(mpi: str) -> None:
    printed = run_file("uneven_failure.py", mpi)
    assert re.search(r"rank 1: .*::test_uneven failed", printed), printed
    assert "only here" in printed


@pytest.mark.long
@pytest.mark.parametrize("mpi", MPIS)
def test_mpi_suite_hang_ends_with_stack_traces(mpi: str) -> None:
    printed = run_file("uneven_hang.py", mpi, seconds="3")
    assert "Timeout" in printed, printed
    assert "in test_uneven" in printed
