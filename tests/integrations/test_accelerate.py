"""A script for Hugging Face's accelerate and transformers, unchanged and with any algorithm."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from aladdin_mpi.integrations.accelerate import Accelerator

from aladdin_mpi.errors import UserError
from tests.commands import summary
from tests.launch import ROOT, Completed, needs
from tests.run_program import run_program

PROGRAMS = ROOT / "tests" / "programs"


def losses(completed: Completed) -> list[float]:
    return [float(each) for each in re.findall(r"^epoch \d: ([\d.]+)$", completed.stdout, re.M)]


@needs("openmpi")
def test_accelerate_script_trains_as_with_accelerate(tmp_path: Path) -> None:
    run = partial(run_program, PROGRAMS / "accelerate_training.py", cwd=tmp_path)
    real = losses(run(1, "real"))
    assert len(real) == 4 and real[-1] < 0.9 * real[0]
    assert losses(run(1, "ar-sgd")) == pytest.approx(real, rel=1e-4)
    several = losses(run(3, "aladdin"))
    assert len(several) == 4 and several[-1] < several[0]
    run_summary = summary(tmp_path / "aladdin")
    assert (run_summary["samples"], run_summary["workers"]) == (4 * 96, 2)


@needs("openmpi")
@pytest.mark.long
def test_accelerate_loop_may_be_left_early(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerate_training.py"
    completed = run_program(program, 3, "bsp", "leave", cwd=tmp_path)
    assert len(losses(completed)) == 3
    assert summary(tmp_path / "bsp")["samples"] < 4 * 96


def test_accelerator_rejects_missing_length_and_mixed_precision() -> None:
    with pytest.raises(UserError, match=r"^Accelerator .*epochs="):
        Accelerator()
    with pytest.raises(UserError, match=r"^mixed_precision: .*'fp16'"):
        Accelerator(mixed_precision="fp16", epochs=1)


@needs("openmpi")
def test_accelerator_rejects_use_before_prepare(tmp_path: Path) -> None:
    program = PROGRAMS / "accelerator_before_prepare.py"
    lines = run_program(program, 1, cwd=tmp_path).stdout.splitlines()
    expected = (
        r"UserError accelerator\.save_state ",
        r"UserError accelerator: .*\bprepare\(",
        r"UserError accelerator\.prepare: .*\bmodel\b.*\b0\b",
    )
    assert all(map(re.match, expected, lines)), lines
    assert len(lines) == 3


@needs("openmpi")
def test_accelerator_properties_before_prepare_match_accelerate(tmp_path: Path) -> None:
    """In one process they equal those of accelerate; a server is not a main process."""
    run = partial(run_program, PROGRAMS / "accelerator_properties.py", cwd=tmp_path)
    real, alone = (run(1, each).stdout for each in ("real", "asp"))
    assert alone == real == "once before\nonce after\nplace True True cpu 1\n"
    printed = run(3, "asp").stdout
    places = sorted(re.findall(r"^place (.*)$", printed, re.M))
    assert places == ["False False cpu 2", "False False cpu 2", "True True cpu 2"]
    assert (printed.count("once before"), printed.count("once after")) == (1, 1)
