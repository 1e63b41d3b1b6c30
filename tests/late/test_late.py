"""Device code paths on the delayed-copy test device, whose streams are threads.

Torch supports one such device per process, and all other tests would use it, so everything runs in
separate processes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import TEST, VARIABLE
from benchmarks.gpu_check.rows import PASS
from tests.late import build
from tests.launch import ROOT, needs, run_ranks

OBSTACLE = build.obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no stand-in device: {OBSTACLE}"),
]


def run(folder: Path, check: str) -> str:
    """Run a check of program.py on three ranks."""
    build.library()
    return run_ranks(3, ["-m", "tests.late.program", str(folder), check], timeout=250).stdout


def test_delayed_copy_device_reveals_mistakes() -> None:
    build.library()
    checks = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    checks.append("tests/late/checks_device.py")
    completed = subprocess.run(checks, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert completed.returncode == 0, completed.stdout
    assert " passed" in completed.stdout


@needs("openmpi")
@pytest.mark.parametrize(
    "check",
    [
        pytest.param("few-equal", id="equals the CPU"),
        pytest.param(
            "equal",
            id="deterministic variants equal the CPU",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "resume", id="resumed run equals the uninterrupted one", marks=pytest.mark.long
        ),
        pytest.param("refused", id="non-finite gradients are refused", marks=pytest.mark.long),
        pytest.param("budget", id="steps do not wait for the device", marks=pytest.mark.long),
        pytest.param("ahead", id="host runs ahead of slow kernels", marks=pytest.mark.long),
        pytest.param("sums", id="sums begin during backward", marks=pytest.mark.long),
        pytest.param("evaluation", id="evaluation in parts equals that of rank 0"),
        pytest.param("all", id="accounting of every algorithm holds", marks=pytest.mark.long),
    ],
)
def test_training_on_delayed_copy_device_over_mpi(tmp_path: Path, check: str) -> None:
    assert run(tmp_path, check).endswith("done\n")


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks"), [("aladdin-ahead", 3), ("bsp", 3), ("aladdin-ahead", 4)]
)
def test_worker_needs_device_memory_of_the_guide(
    tmp_path: Path, algorithm: str, ranks: int
) -> None:
    """With four ranks, in an island of two."""
    build.library()
    program = ["-m", "benchmarks.gpu_check.program", "benchmarks.gpu_check.memory"]
    completed = run_ranks(
        ranks, [*program, str(tmp_path), algorithm], env={VARIABLE: TEST}, timeout=250
    )
    found = [row for row in map(rows.parse, completed.stdout.splitlines()) if row is not None]
    assert algorithm in {row.name.split()[0] for row in found}
    assert [row for row in found if row.status != PASS] == []


@pytest.mark.long
@needs("openmpi")
def test_planted_mistakes_are_found_on_delayed_copy_device(tmp_path: Path) -> None:
    printed = run(tmp_path, "defects")
    assert printed.endswith("done\n") and printed.count("found: ") == 8
