"""Options that the batch scripts add, read by a shell without a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch import ROOT

COMPLETE = """
set -euo pipefail
. "$ALADDIN_SLURM/job.sh" "$@"
complete_options "${OPTIONS[@]}"
printf '%s\\n' "${OPTIONS[@]}"
"""


def complete(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return bash(["-c", COMPLETE, "bash", *words], variables)


def run_script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    return bash([ROOT / "slurm" / name, *words], {})


def bash(words: list[object], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": os.environ["PATH"],
        "USER": "me",
        "SLURM_JOB_ID": "7",
        "ALADDIN_SCRIPT": "train.sbatch",
        "ALADDIN_SLURM": str(ROOT / "slurm"),
        **variables,
    }
    command = ["bash", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_job_has_a_run_folder_and_checkpoints() -> None:
    added = "--spares 0 --run-dir runs/aladdin-7 --resume auto --checkpoint-every 15min"
    assert complete("--epochs", 3).stdout.split() == ["--epochs", "3", *added.split()]


def test_interval_of_a_configuration_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('epochs = 3\ncheckpoint_every = "1min"\n')
    assert "--checkpoint-every" not in complete(f"--config={file}").stdout.split()


@pytest.mark.parametrize("name", ["run-dir", "run_dir", "resume", "join", "spares"])
def test_configuration_files_may_not_set_what_the_script_sets(tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'{name} = "mine"\n')
    completed = complete("--config", file)
    assert completed.returncode == 2
    assert f"--config: {name.replace('_', '-')} in a file has no effect" in completed.stderr


@pytest.mark.parametrize("name", ["SPARES", "SPARE_NODES", "RESTARTS"])
def test_numbers_in_variables_are_checked(name: str) -> None:
    completed = complete(**{name: "one"})
    assert (completed.returncode, completed.stdout) == (2, "")
    assert f"{name}: expected a number, got 'one'" in completed.stderr


def test_lengths_of_scaling_runs_are_refused() -> None:
    for option in ("--samples", "--epochs", "--steps"):
        completed = run_script("scaling.sbatch", option, 100)
        assert (completed.returncode, completed.stdout) == (2, "")
        assert f"{option}: this script sets it for each run" in completed.stderr
