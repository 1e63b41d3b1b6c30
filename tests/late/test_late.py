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
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("few-equal", id="the result is the CPU's"),
        pytest.param(
            "equal",
            id="the result is the CPU's, where it is the same every time",
            marks=pytest.mark.long,
        ),
        pytest.param("resume", id="a resumed run is the uninterrupted one", marks=pytest.mark.long),
        pytest.param("refused", id="what is not finite is refused", marks=pytest.mark.long),
        pytest.param("budget", id="nothing in a step waits for the device", marks=pytest.mark.long),
        pytest.param("ahead", id="the host runs ahead of slow kernels", marks=pytest.mark.long),
        pytest.param("sums", id="sums begin during the backward pass", marks=pytest.mark.long),
        pytest.param("evaluation", id="workers measure in parts what rank 0 measures alone"),
        pytest.param("all", id="every algorithm keeps its books", marks=pytest.mark.long),
    ],
)
def test_over_mpi(tmp_path: Path, what: str) -> None:
    assert run(tmp_path, what).endswith("done\n")


@pytest.mark.long
@needs("openmpi")
def test_planted_mistakes_are_found(tmp_path: Path) -> None:
    printed = run(tmp_path, "defects")
    assert printed.endswith("done\n") and printed.count("found: ") == 8
