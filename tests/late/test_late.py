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
from tests.commands import EPOCH, summary
from tests.late import build
from tests.launch import ROOT, needs, run_ranks, start_ranks
from tests.run.jobs import ULFM, kill_ranks, samples_so_far, wait_until

OBSTACLE = build.obstacle()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBSTACLE is not None, reason=f"no stand-in device: {OBSTACLE}"),
]


def run(folder: Path, check: str) -> str:
    """Run a check of program.py on three ranks."""
    build.library()
    return run_ranks(3, ["-m", "tests.late.program", str(folder), check], timeout=250).stdout


@pytest.mark.long
def test_delayed_copy_device_reveals_mistakes() -> None:
    build.library()
    checks = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    checks.append("tests/late/checks_device.py")
    completed = subprocess.run(checks, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert completed.returncode == 0, completed.stdout
    assert " passed" in completed.stdout


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed", "options"),
    [
        pytest.param("asp", 4, 0, [], id="a worker becomes the server", marks=pytest.mark.long),
        pytest.param("ar-sgd", 3, 0, [], id="rank 0 is replaced", marks=pytest.mark.long),
        pytest.param(
            "aladdin-ahead", 5, 2, ["--spares", "1"], id="a spare worker", marks=pytest.mark.long
        ),
    ],
)
def test_survivors_form_a_new_group_on_delayed_copy_device(
    tmp_path: Path, algorithm: str, ranks: int, killed: int, options: list[str]
) -> None:
    build.library()
    run_dir = tmp_path / "run"
    words = ["--algorithm", algorithm, "--device", "gpu", "--epochs", "12"]
    words += ["--run-dir", str(run_dir), "--log-every", "320", "--bn-batches", "8", *options]
    with start_ranks(ranks, ["-m", "tests.late.trained", *words], mpirun=ULFM) as job:
        wait_until(job, lambda: samples_so_far(run_dir) >= EPOCH, seconds=100)
        kill_ranks(job, [killed])
        completed = job.wait(120)
    assert completed.returncode == 0, repr(completed)
    figures = summary(run_dir)
    assert [failure["rank"] for failure in figures["failures"]] == [killed]
    assert figures["samples"] == 12 * EPOCH
    assert figures["test_accuracy"] > 0.9


@pytest.mark.sample(1)
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


@pytest.mark.long
@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        ("aladdin-ahead", 3),
        pytest.param("bsp", 3, marks=pytest.mark.long),
        pytest.param("aladdin-ahead", 4, marks=pytest.mark.long),
    ],
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
