"""Learning curves between hosts over MPI match those of the simulation."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, pstdev

import pytest

from benchmarks.lab import Lab
from tests.commands import metrics, simulate, summary, words

REASON = Lab.available()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
    pytest.mark.long,
    pytest.mark.usefixtures("warm_python"),
    pytest.mark.timeout(600),
]

WORKERS = 4
SEEDS = range(3)
PLAN = ["--epochs", 6, "--eval-every", 1, "--lr", 0.02, "--warmup-epochs", 1, "--quiet"]
SLEEP = ",".join(f"{worker}=30" for worker in range(WORKERS))
"""A step sleeps for 29 times its computing time, so that each worker seems to have a core."""
TOLERANCE = 0.015
"""Tolerance of accuracy between means of three seeds, in addition to their spread."""


def curve(run_dir: Path) -> list[float]:
    """Return the test accuracy after each epoch."""
    return [line["test_accuracy"] for line in metrics(run_dir, "eval")]


def over_mpi(lab: Lab, run_dir: Path, *options: object) -> float:
    """Train between the lab's hosts; return the duration of a step in seconds."""
    args = ["-m", "aladdin_mpi.train", *words(run_dir, [*options, "--slowdown", SLEEP])]
    completed = lab.run([0, *range(WORKERS)], args, timeout=120)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return WORKERS * 32 / float(summary(run_dir)["samples_per_second"])


@pytest.mark.parametrize("algorithm", ["aladdin", "aladdin-ahead"])
def test_learning_curve_over_mpi_matches_virtual_time(tmp_path: Path, algorithm: str) -> None:
    real, virtual = [], []
    with Lab(hosts=WORKERS) as lab:
        for seed in SEEDS:
            plan = [*PLAN, "--algorithm", algorithm, "--seed", seed]
            real.append(tmp_path / f"real-{seed}")
            step = over_mpi(lab, real[-1], *plan)
            virtual.append(tmp_path / f"virtual-{seed}")
            cluster = ["--workers", WORKERS, "--hosts", WORKERS, "--bandwidth-gbit", 1]
            simulate(virtual[-1], *plan, *cluster, "--compute-time", step)
    one, other = (list(zip(*map(curve, runs), strict=True)) for runs in (real, virtual))
    for name, points in (("MPI", one), ("virtual time", other)):
        print(name, *(f"{mean(point):.4f} +- {pstdev(point):.4f}" for point in points))
    for a, b in zip(one, other, strict=True):
        assert abs(mean(a) - mean(b)) < TOLERANCE + pstdev(a) + pstdev(b)
