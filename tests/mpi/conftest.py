"""Run pytest under mpirun: ``mpirun -np 3 python -m pytest tests/mpi -q``.

Every rank runs the same tests in the same order. Only rank 0 reports, but a failure on any
rank is shown with its rank, and ends the job, because the others may be waiting for that rank.
Outside mpirun nothing here is collected; tests/test_under_mpirun.py starts it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

if TYPE_CHECKING:
    from aladdin_mpi.transport.mpi.engine import MpiTransport

LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK")
UNDER_MPIRUN = any(name in os.environ for name in LAUNCHERS)
TEST_SECONDS = float(os.environ.get("ALADDIN_MPI_TEST_SECONDS", "60"))

if UNDER_MPIRUN:
    from mpi4py import MPI  # before torch: some MPIs cannot be loaded after it

    RANK = MPI.COMM_WORLD.rank


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if UNDER_MPIRUN else True


@pytest.hookimpl(tryfirst=True)  # before pytest reads --basetemp
def pytest_configure(config: pytest.Config) -> None:
    if not UNDER_MPIRUN:
        return
    # With a common folder, ranks that end together fail: they remove the same old folders.
    with contextlib.ExitStack() as stack:
        config.option.basetemp = stack.enter_context(tempfile.TemporaryDirectory())
        config.add_cleanup(stack.pop_all().close)
    global _screen
    _screen = os.fdopen(os.dup(2), "w")  # the real stderr, before pytest captures it
    if RANK != 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - pytest's report goes here


_screen: TextIO = sys.stderr


@pytest.fixture
def transport() -> Iterator[MpiTransport]:
    """Yield a transport for this test alone, which must leave no operation pending."""
    from aladdin_mpi.transport.mpi.engine import MpiTransport

    transport = MpiTransport(timeout=30)
    yield transport
    transport.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    if not UNDER_MPIRUN:
        return (yield)
    # Only this ends a wait inside the MPI library; mpirun then ends the other ranks.
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=_screen)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _abort_if_failed(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _abort_if_failed(report)


def _abort_if_failed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not UNDER_MPIRUN or not report.failed:
        return
    _screen.write(f"\nrank {RANK}: {report.nodeid} failed\n{report.longreprtext}\n")
    _screen.flush()
    time.sleep(1)  # gives other ranks that fail time to report it
    MPI.COMM_WORLD.Abort(1)
