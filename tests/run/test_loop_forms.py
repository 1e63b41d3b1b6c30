"""Forms of a training loop: epochs, break, continue, accumulation, state and logged figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.commands import metrics, summary
from tests.launch import Completed, needs
from tests.messages import check_names
from tests.run.program_runs import run_alone, run_program

pytestmark = needs("openmpi")
LONG = pytest.mark.long


def loop(
    tmp_path: Path, form: str, algorithm: str, *, check: bool = True, **settings: Any
) -> Completed:
    """Run a form of ``programs/loop_forms.py`` on three ranks."""
    words = (form, algorithm, json.dumps(settings))
    return run_program(tmp_path, "loop_forms", *words, check=check)


def check_one_model(completed: Completed) -> None:
    """Check that every rank ends with the same model."""
    weights = re.findall(r"^weight (.*)$", completed.stdout, re.M)
    assert len(weights) == 3
    assert len(set(weights)) == 1, completed.stdout


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("asp", {"samples": 104}),
        pytest.param("aladdin", {"samples": 200, "checkpoint_every": "100samples"}, marks=LONG),
        pytest.param("gosgd", {"samples": 104}, marks=LONG),
    ],
)
def test_worker_without_a_batch_reaches_the_end_of_the_epoch(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    """A run or a segment ends within an epoch of which only one worker has a batch."""
    completed = loop(tmp_path, "epochs", algorithm, timeout=20, **settings)
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", completed.stdout, re.M)
    workers = 3 if algorithm == "gosgd" else 2
    epochs = 2 if settings["samples"] == 104 else 3
    assert sorted(number for number, _, _ in ends) == sorted("012"[:epochs] * workers)
    assert {int(whole) for number, _, whole in ends if number == "0"} == {96}
    check_one_model(completed)


@pytest.mark.parametrize("algorithm", ["aladdin", pytest.param("ar-sgd", marks=LONG)])
def test_every_worker_reaches_every_epoch_end(tmp_path: Path, algorithm: str) -> None:
    """Together, the workers use all samples in each epoch."""
    completed = loop(tmp_path, "epochs", algorithm, epochs=3)
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", completed.stdout, re.M)
    workers = 2 if algorithm == "aladdin" else 3
    assert sorted(number for number, _, _ in ends) == sorted("012" * workers)
    assert all(int(whole) == 96 for _, _, whole in ends)
    assert summary(tmp_path / "run")["samples"] == 3 * 96
    check_one_model(completed)


@pytest.mark.parametrize("algorithm", [pytest.param("aladdin", marks=LONG), "ar-sgd"])
def test_break_out_of_an_epoch_ends_it_for_all_workers(tmp_path: Path, algorithm: str) -> None:
    completed = loop(tmp_path, "left_epochs", algorithm, epochs=3)
    ends = re.findall(r"^epoch (\d) (\d+) of (\d+)$", completed.stdout, re.M)
    workers = 2 if algorithm == "aladdin" else 3
    assert len(ends) == 3 * workers
    figures = summary(tmp_path / "run")
    assert figures["gradients_applied"] == figures["gradients_computed"]
    if algorithm == "ar-sgd":  # all workers leave it after the same batch
        assert {int(count) for _, count, _ in ends} == {16}
        assert figures["samples"] == 3 * workers * 16
    check_one_model(completed)


@pytest.mark.parametrize(
    "form",
    [
        "left_before_state_dict",
        pytest.param("left_before_summary", marks=LONG),
        pytest.param("left_before_forward", marks=LONG),
    ],
)
def test_break_out_of_the_loop_ends_the_run_for_all_workers(tmp_path: Path, form: str) -> None:
    """At the next use of the model or the run."""
    completed = loop(tmp_path, form, "aladdin", epochs=1000, quiet=True)
    figures = summary(tmp_path / "run")
    assert 16 <= figures["samples"] < 96_000
    assert figures["gradients_applied"] == figures["gradients_computed"]
    check_one_model(completed)


@LONG
def test_break_as_the_last_statement_of_a_program_ends_the_run(tmp_path: Path) -> None:
    loop(tmp_path, "left_at_the_end", "aladdin", epochs=1000, quiet=True)
    assert summary(tmp_path / "run")["samples"] < 96_000


def test_error_in_the_loop_does_not_complete_the_run(tmp_path: Path) -> None:
    options = {"epochs": 1000, "quiet": True}
    completed = loop(tmp_path, "left_by_an_error", "aladdin", check=False, **options)
    assert completed.returncode != 0
    assert "KeyError: 'mine'" in completed.stderr
    assert not (tmp_path / "run" / "summary.json").exists()


def test_skipped_batches_compute_no_gradient(tmp_path: Path) -> None:
    completed = loop(tmp_path, "skipped", "bsp", samples=192, momentum=0, weight_decay=0)
    figures = summary(tmp_path / "run")
    assert figures["gradients_applied"] == figures["gradients_computed"] == 24
    check_one_model(completed)


def test_accumulated_batches_make_one_step(tmp_path: Path) -> None:
    """Two batches of 4, whose mean gradient each worker sends, equal one of 8."""
    alike: dict[str, Any] = {"samples": 96, "momentum": 0, "warmup_epochs": 0}
    alike |= {"lr_scaling": "none", "lr_schedule": "constant"}
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = loop(tmp_path / "one", "whole_batches", "bsp", **alike)
    two = loop(tmp_path / "two", "half_batches", "bsp", accumulate=2, **alike)
    for folder in ("one", "two"):
        assert summary(tmp_path / folder / "run")["gradients_computed"] == 12
    printed = [re.findall(r"^weight \[(.*)\]$", each.stdout, re.M)[0] for each in (one, two)]
    weights = [[float(w) for w in each.split(", ")] for each in printed]
    assert weights[0] == pytest.approx(weights[1], abs=1e-4)


def test_run_state_is_resumed_and_figures_are_logged(tmp_path: Path) -> None:
    first = loop(tmp_path, "state_and_figures", "bsp", samples=96, log_every=48)
    again = loop(tmp_path, "state_and_figures", "bsp", samples=192, log_every=48, resume="run")
    counts = [sorted(re.findall(r"^state (\d+)$", each.stdout, re.M)) for each in (first, again)]
    assert counts == [["6", "6"], ["12", "12"]]
    lines = metrics(tmp_path / "run", "train")
    assert all(1 <= line["rank"] <= 2 for line in lines)
    assert any(1 < line["rank"] < 2 for line in lines)  # a mean over both workers
    assert 6 < summary(tmp_path / "run")["own"]["batches"] <= 12
    assert "batches" in again.stdout


@LONG
def test_unsavable_run_state_is_refused_by_name(tmp_path: Path) -> None:
    completed = loop(tmp_path, "unsavable_state", "ar-sgd", check=False, samples=96)
    check_names(completed.stderr, "run.state['model']")


@pytest.mark.parametrize("algorithm", ["aladdin", pytest.param("osgp", marks=LONG)])
def test_single_process_trains_without_mpirun(tmp_path: Path, algorithm: str) -> None:
    settings = json.dumps({"epochs": 2, "servers": 1})
    completed = run_alone(tmp_path, "loop_forms", "epochs", algorithm, settings)
    assert completed.returncode == 0, completed
    assert "epoch 1 96 of 96" in completed.stdout
    check_names(completed.stderr, "one process", "ar-sgd", f"to use {algorithm}", "mpirun")
    assert summary(tmp_path / "run")["algorithm"] == "ar-sgd"
