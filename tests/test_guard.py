"""The place of a process in its job, and output streams that cannot be written."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from aladdin_mpi.process import guard
from tests.launch import ROOT, needs, run_ranks


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, (0, 1)),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4"}, (2, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (0, 1)),
    ],
    ids=["no job", "Open MPI", "srun", "batch script"],
)
def test_launched_place_is_that_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], place: tuple[int, int]
) -> None:
    """Slurm sets variables of a rank in a batch script too, which is none."""
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)  # an earlier test's
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert guard.launched_place() == place


@needs("openmpi")
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("simulate --workers 2 --samples 64 --run-dir {out}", "--workers"),
        ("compare --algorithms bsp --out {out}", "--mpirun"),
        ("advise --describe '2 nodes x 1 GPU, 10 Gbit/s, step 0.1 s' --out {out}", "--jobs"),
    ],
    ids=["simulate", "compare", "advise"],
)
def test_command_of_one_process_refuses_several(tmp_path: Path, words: str, remedy: str) -> None:
    """In one error, before anything is written."""
    name, *options = shlex.split(words.format(out=tmp_path / "out"))
    completed = run_ranks(2, ["-m", f"aladdin_mpi.{name}", *options], check=False)
    assert completed.returncode == 2
    errors = [line for line in completed.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1, completed.stderr
    assert "mpirun" in errors[0] and remedy in errors[0]
    assert not (tmp_path / "out").exists()


def test_streams_that_cannot_be_written_do_not_change_the_status(tmp_path: Path) -> None:
    """Nor end a run: its results are in files."""
    command = f"{sys.executable} -m aladdin_mpi.simulate"
    words = f"--workers 2 --samples 64 --run-dir {tmp_path}/run"
    statuses = [
        subprocess.run(
            ["bash", "-c", f"{command} {options}"], cwd=ROOT, check=False, timeout=120
        ).returncode
        for options in ("--no-such-option >&-", f"{words} >/dev/full 2>&-")
    ]
    assert statuses == [2, 0]
    assert (tmp_path / "run" / "summary.json").is_file()
