"""Settings for the whole suite: one thread per process, because many processes share few cores."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import warm
from tests.launch import NEEDS_MPI

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMPI_MCA_btl", "^ofi")  # the omitted one sleeps for a second in MPI_Init


def _keep_temporary_files_in_memory() -> None:
    """Unless TMPDIR is set, keep temporary files in shared memory if it has space for them.

    Checkpoints are forced to disk. A disk that is busy for minutes exceeds every test's limits.
    """
    memory = Path("/dev/shm")
    if "TMPDIR" in os.environ or not memory.is_dir():
        return
    status = os.statvfs(memory)
    can_execute = not status.f_flag & os.ST_NOEXEC  # tests install commands there
    if can_execute and status.f_bavail * status.f_frsize >= 4 << 30:
        folder = memory / f"aladdin_mpi-tests-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


_keep_temporary_files_in_memory()

# A shell starts background commands with SIGINT ignored, which the programs under test inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on speed: on a busy machine, drawing inputs or a test may take any time.
settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-speed")

SHARED = (
    "tests/comparison/test_compare.py",
    "tests/comparison/test_compare_scripts.py",
    "tests/integrations/test_transformers.py",
    "tests/algorithms/test_multistep.py",
    "tests/exactness/test_exactness.py",
    "tests/run/test_resume.py",
    "tests/run/test_suspend.py",
    "tests/test_distributions.py",
    "tests/test_structure.py",
    "tests/test_train.py",
)
"""Files whose tests share slow fixtures, and therefore run in one process."""
HOSTS = (
    "tests/slurm/",
    "tests/benchmarks/test_benchmarks.py",
    "tests/transport/test_cut_links.py",
    "tests/benchmarks/test_lab.py",
)
"""Files that build a network of hosts, one at a time."""
LENGTHY = ("tests/late/", "tests/test_under_mpirun.py")
"""Files with tests of a minute, which would be the last to end."""
DRAWN = ("seed", "group", "block")
"""Parameters that number the cases which a test draws."""
FEW = 4
"""Drawn cases of each test in ``make test``; the others are ``long``."""


def pytest_configure(config: pytest.Config) -> None:
    """If several processes share the tests, they share one server of warm processes."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        os.environ[warm.SHARED] = warm.python()


@pytest.fixture(autouse=True)
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip plots, which take longer than small runs, as warm processes do."""
    monkeypatch.setattr("aladdin_mpi.run.summary.draw_curves", lambda *_: None)


@pytest.fixture
def warm_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start warm processes (warm.py) in place of ``sys.executable`` in this process."""
    monkeypatch.setattr(sys, "executable", warm.python())


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases that only ``make test-long`` runs, and sort the tests as they start."""
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {})
        numbers = [values[name] for name in DRAWN if isinstance(values.get(name), int)]
        if any(number >= FEW for number in numbers):
            item.add_marker(pytest.mark.long)
    _sample(items)
    _sort(items)


def _sample(items: list[pytest.Item]) -> None:
    """Of a test marked ``sample(n)``, mark all cases as long except n, the same in every run."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("long"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for name, each in cases.items():
        marker = each[0].get_closest_marker("sample")
        assert marker is not None
        count = min(*marker.args, len(each))
        for item in set(each).difference(random.Random(name).sample(each, count)):
            item.add_marker(pytest.mark.long)


def _sort(items: list[pytest.Item]) -> None:
    """Start what takes long first; spread jobs, few of which run at a time, among the tests."""
    chains: list[pytest.Item] = []
    jobs: list[pytest.Item] = []
    alone: list[pytest.Item] = []
    for item in items:
        is_chain = item.nodeid.startswith((*LENGTHY, *HOSTS, *SHARED))
        (chains if is_chain else jobs if _starts_a_job(item) else alone).append(item)
    # Sorted by the share of tests of the same kind before each.
    shares = [place / len(kind) for kind in (jobs, alone) for place in range(len(kind))]
    mixed = sorted(zip(shares, range(len(shares)), (*jobs, *alone), strict=True))
    chains.sort(key=lambda item: not item.nodeid.startswith(LENGTHY))
    items[:] = [*chains, *(item for _, _, item in mixed)]


def _starts_a_job(item: pytest.Item) -> bool:
    """Return whether the test needs an MPI (``launch.needs``)."""
    reasons = (str(mark.kwargs.get("reason")) for mark in item.iter_markers("skipif"))
    return any(reason.startswith(NEEDS_MPI) for reason in reasons)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute tests one by one among several processes, except those that belong together."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith(HOSTS):
                return "hosts"
            return file if file in SHARED else nodeid

    return Scheduling(config, log)
