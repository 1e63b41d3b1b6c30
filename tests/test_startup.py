"""Modules that a command imports before its first output."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.launch import ROOT

SLOW = {"matplotlib", "mpi4py.MPI", "numpy", "tensorboard", "torch", "torchvision"}
ASKING = [
    ["aladdin_mpi.train", "--help"],
    ["aladdin_mpi.simulate", "--help"],
    ["aladdin_mpi.simulate", "own_loop.py", "--help"],
    ["aladdin_mpi.compare", "--help"],
    ["aladdin_mpi.advise", "--help"],
    ["aladdin_mpi.probe", "--help"],
    ["aladdin_mpi.compare", "--", "--help"],
    ["aladdin_mpi.servers", "--help"],
    ["aladdin_mpi.slurm", "init", "--help"],
    ["aladdin_mpi.comparison.scaling", "--help"],
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", ASKING, ids=" ".join)
def test_help_imports_no_slow_module(words: list[str]) -> None:
    completed = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.startswith("usage: aladdin_mpi.")
    loaded = {line.rpartition("|")[2].strip() for line in completed.stderr.splitlines()}
    assert "aladdin_mpi" in loaded
    assert loaded & SLOW == set()
