"""DiLoCo compared with torchft's: the task, the counters and the table; one run in the lab."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.errors import UserError
from benchmarks import torchft_diloco
from benchmarks.programs import diloco_task as task
from tests.benchmarks.test_benchmarks import needs_lab, run_script

pytestmark = pytest.mark.timeout(280)
PLAN = task.Plan(8, 4, 1e-3, steps=4, rounds=2, fragments=2, overlap=1, blend=0.5)
COUNTERS = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:  10       1    0    0    0     0          0         0    20       1    0
  eth0: 111       2    0    0    0     0          0         0    222       3    0
"""


def record(seconds: float, sent: float = 8e6, loss: float = 1.0) -> dict[str, float]:
    return {"seconds": seconds, "cpu": seconds / 4, "sent": sent, "loss": loss}


def run(library: str, *workers: dict[str, float]) -> dict[str, Any]:
    return {"setting": "whole model", "library": library, "workers": list(workers)}


def test_plan_survives_the_command_line() -> None:
    assert task.Plan.from_json(PLAN.to_json()) == PLAN
    assert PLAN.total == 4 * (1 + 2 + 1)


def test_workers_begin_with_equal_models_and_draw_different_samples() -> None:
    models = [task.make_model(PLAN).state_dict() for _ in range(2)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    samples = torch.cat([inputs for rank in range(2) for inputs, _ in task.batches(rank, PLAN)])
    assert len(samples) == len(samples.unique(dim=0)) == 2 * PLAN.total * PLAN.batch


def test_task_can_be_learned() -> None:
    plan = replace(PLAN, width=64, batch=256, rounds=10)
    model = task.make_model(plan)
    optimizer, before = task.make_inner(model, plan), task.held_out_loss(model)
    for batch in task.batches(0, plan):
        optimizer.zero_grad()
        task.loss_of(model, batch).backward()
        optimizer.step()
    assert task.held_out_loss(model) < before - 0.1


def test_counter_of_sent_bytes_is_read() -> None:
    assert task.bytes_sent(COUNTERS, "eth0") == 222
    assert task.bytes_sent(COUNTERS, "lo") == 20
    with pytest.raises(ValueError, match="eth1"):
        task.bytes_sent(COUNTERS, "eth1")


def test_record_excludes_first_and_last_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("time.process_time", lambda: 7.0)
    monkeypatch.setattr(task, "bytes_sent", lambda counters: 5)
    saved = task.Record(PLAN)
    for _ in range(PLAN.total):
        saved.step_done()
    for rank in range(torchft_diloco.HOSTS):
        saved.save(tmp_path, rank, 0.5)
    (first, *_) = torchft_diloco.read_records(tmp_path)
    assert first == {"seconds": 1.0, "cpu": 0.0, "sent": 0, "loss": 0.5}  # the clock was read twice


def test_row_is_the_median_of_the_slowest_worker() -> None:
    runs = [run("torchft", record(each), record(each / 2, 4e6)) for each in (2.0, 4.0, 8.0)]
    (row,) = torchft_diloco.rows(runs, measured=16)
    assert (row["steps/s"], row["smallest"], row["largest"]) == (4.0, 2.0, 8.0)
    assert row["MB per step"] == pytest.approx(6 / 16)
    assert row["CPU ms per step"] == pytest.approx(1000 * 0.75 / 16)


def test_missed_bars_name_setting_and_ratio() -> None:
    peer = run("torchft", record(1.0))
    for ours, expected in (
        (record(1.0, loss=1.01), []),
        (record(1.2), [r"whole model.*\b1\.20\b.*\b1\.05\b"]),
        (record(1.0, loss=1.5), [r"whole model.*\b0\.500\b.*\b0\.02\b"]),
        (record(1.0, loss=float("nan")), [r"whole model.*\bnan\b"]),
    ):
        table = torchft_diloco.rows([run("aladdin_mpi", ours), peer], 16)
        lines = torchft_diloco.missed(table)
        assert len(lines) == len(expected)
        assert all(re.search(*pair) for pair in zip(expected, lines, strict=True))
    assert not torchft_diloco.missed(torchft_diloco.rows([run("aladdin_mpi", record(1.0))], 16))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fragments", "3"], "--fragments 3"),
        (["--steps", "30"], "--steps 30"),
        (["--overlap", "8"], "--overlap 8"),
    ],
)
def test_setting_that_does_not_fit_is_rejected(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        torchft_diloco.main(words)


@pytest.mark.long
def test_python_without_torchft_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--python .*missing.*pip install"):
        torchft_diloco.find_peer(tmp_path / "missing")
    (tmp_path / "torchft.py").write_text("raise ImportError('broken')")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    fake.chmod(0o755)
    with pytest.raises(UserError, match="broken"):
        torchft_diloco.find_peer(fake)


def test_fragments_hold_all_parameters() -> None:
    model = task.make_model(PLAN)
    parts = task.fragments_of(model, PLAN)
    assert len(parts) == PLAN.fragments
    found = [id(values) for part in parts for values in part.parameters()]
    assert sorted(found) == sorted(map(id, model.parameters()))


@pytest.mark.long
@pytest.mark.slow
@needs_lab
def test_torchft_benchmark_runs(tmp_path: Path) -> None:
    rows = run_script("torchft_diloco", tmp_path, "--quick")["rows"]
    ours = [row for row in rows if row["library"] == "aladdin_mpi"]
    assert [row["setting"] for row in ours] == ["whole model", "4 fragments"]
    # A ring of four workers sends 2 * 3/4 of the model in the steps between two outer steps.
    model = task.make_model(replace(PLAN, width=64))
    ring = 1.5 * 4 * sum(values.numel() for values in model.parameters()) / 8 / 1e6
    assert all(ring <= row["MB per step"] < 1.5 * ring for row in ours)
    assert all(row["steps/s"] > 0 for row in ours)
