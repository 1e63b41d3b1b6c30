"""The device paths, on a stand-in whose streams are threads and whose copies come late.

Torch knows one such device in a process, and would give it to every other test: so all runs in
processes of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.late import build
from tests.launch import ROOT, needs, run_ranks

OBSTACLE = build.obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no stand-in device: {OBSTACLE}"),
]


def run(folder: Path, what: str) -> str:
    """Three ranks of program.py."""
    build.library()
    return run_ranks(3, ["-m", "tests.late.program", str(folder), what], timeout=250).stdout


def test_the_device_shows_mistakes() -> None:
    build.library()
    checks = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    checks.append("tests/late/checks_device.py")
    done = subprocess.run(checks, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@needs("openmpi")
def test_what_is_the_same_every_time_is_the_same_as_on_the_cpu(tmp_path: Path) -> None:
    assert run(tmp_path, "equal").endswith("done\n")


@needs("openmpi")
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path) -> None:
    assert run(tmp_path, "resume").endswith("done\n")


@needs("openmpi")
def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    assert run(tmp_path, "refused").endswith("done\n")


@needs("openmpi")
def test_nothing_in_a_step_waits_for_the_device(tmp_path: Path) -> None:
    assert run(tmp_path, "budget").endswith("done\n")


@needs("openmpi")
def test_the_host_runs_ahead_of_slow_kernels(tmp_path: Path) -> None:
    assert run(tmp_path, "ahead").endswith("done\n")


@needs("openmpi")
def test_every_algorithm_keeps_its_books(tmp_path: Path) -> None:
    assert run(tmp_path, "all").endswith("done\n")


@needs("openmpi")
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    printed = run(tmp_path, "defects")
    assert printed.endswith("done\n") and printed.count("found: ") == 8
