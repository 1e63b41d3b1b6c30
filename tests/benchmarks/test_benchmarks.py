"""Benchmark scripts: tiny runs, and the calculations of their tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allreduce, intake, progress, throughput
from benchmarks.busy import BusyCores
from benchmarks.lab import Lab
from tests.launch import ROOT, needs

REASON = Lab.available()
needs_lab = pytest.mark.skipif(REASON is not None, reason=REASON or "")
pytestmark = pytest.mark.timeout(280)


def run_script(name: str, folder: Path, *args: str) -> dict[str, Any]:
    """Run a script with --save and return the saved result; speeds are not judged."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--save", str(folder), *args]
    completed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=270)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    saved: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    assert saved["command"].startswith(f"python -m benchmarks.{name} ")
    assert saved["machine"]["cpu"] in completed.stdout
    assert saved["title"] in completed.stdout
    return saved


@pytest.mark.long
@pytest.mark.slow
@needs_lab
def test_progress_benchmark_runs(tmp_path: Path) -> None:
    sizes = ["--megabytes", "2", "--message-mb", "1", "--compute", "0.05", "--repeats", "1"]
    rows = run_script("progress", tmp_path, *sizes)["rows"]
    assert len(rows) == 3 * 2 * 2 * 2
    assert {row["computing"] for row in rows} == {"sleep", "torch", "python"}
    # 2 MB at 1 Gbit/s: the lab's limit holds, except for what token buckets and sockets absorb.
    assert all(row["wire, s"] > 0.002 for row in rows)
    assert all(row["wait, s"] >= 0 for row in rows)


@pytest.mark.long
@pytest.mark.slow
@needs("openmpi")
def test_intake_benchmark_runs(tmp_path: Path) -> None:
    sizes = ["--megabytes", "4", "--bucket-mb", "1", "2", "--gradients", "5", "--repeats", "1"]
    rows = run_script("intake", tmp_path, "--workers", "2", *sizes)["rows"]
    assert [(row["bucket, MB"], row["server"]) for row in rows] == [
        (1.0, "accumulate"),
        (1.0, "pi 4"),
        (2.0, "accumulate"),
        (2.0, "pi 4"),
    ]
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.long
@pytest.mark.slow
@needs("openmpi")
def test_allreduce_benchmark_runs(tmp_path: Path) -> None:
    sizes = ["--megabytes", "0.04", "1", "--bucket-mb", "0.5", "--rounds", "2"]
    backends = ["--backend", "mpi", "mpi-bf16", "torch"]
    turns = ["--steps", "1", "--repeats", "1"]
    rows = run_script("allreduce", tmp_path, *sizes, *backends, *turns)["rows"]
    assert [(row["MB"], row["computing"]) for row in rows] == [
        (size, computing) for size in (0.04, 1.0) for computing in ("none", "sleep", "torch")
    ]
    assert all(row["alone, ms"] >= 4 for row in rows if row["computing"] == "sleep")
    assert {"mpi, ms", "mpi-bf16, ms", "torch, ms"} <= set(rows[0])


def test_allreduce_benchmark_counts_added_time() -> None:
    def record(backend: str, seconds: float) -> dict[str, Any]:
        return {"backend": backend, "megabytes": 4.0, "computing": "sleep", "seconds": seconds}

    records = [record("none", 0.1), record("mpi", 0.3), record("mpi", 0.12), record("mpi", 0.11)]
    (row,) = allreduce.rows(records, ranks=3)
    assert (row["ranks"], row["MB"]) == (3, 4.0)
    assert row["alone, ms"] == pytest.approx(100)
    assert row["mpi, ms"] == pytest.approx(20)


@pytest.mark.long
@pytest.mark.slow
@needs_lab
def test_throughput_benchmark_runs(tmp_path: Path) -> None:
    sizes = ["--hosts", "2", "--workers", "2", "--iterations", "4", "--workload", "resnet50"]
    rows = run_script("throughput", tmp_path, *sizes, "--", "--wire", "bf16")["rows"]
    assert len(rows) == 1
    assert 0 < rows[0]["speed-up"] <= 2
    assert 0 <= rows[0]["wait fraction"] < 1
    # The option after "--" was passed on: half the bytes of 9.4 MB.
    assert rows[0]["sent by a step, MB"] == pytest.approx(4.7, rel=0.01)


def times(waited: float, rounds: int = 0) -> dict[str, float]:
    return {"computed": 0.5, "waited": waited, "rounds": rounds}


def overlap_records(wait: float, both: bool) -> list[dict[str, Any]]:
    """Return records of a sender that waits ``wait`` of 0.4 s on the wire, its receiver 0.3 s."""
    case = {"both": both, "progress": True}
    alone, sent = {"message_mb": 0.0, "progress": False}, {"message_mb": 4.0}
    return [
        {**case, **alone, "computing": "torch", "ranks": [times(0.0, 100), times(0.0)]},
        {**case, **sent, "computing": "none", "ranks": [times(0.4), times(0.4)]},
        {**case, **sent, "computing": "torch", "ranks": [times(wait, 90), times(0.3)]},
    ]


def test_progress_is_judged_by_sender_unless_both_compute() -> None:
    rows = progress.rows(overlap_records(0.004, both=False))
    assert len(rows) == 1
    assert rows[0]["wait / wire"] == pytest.approx(0.01)
    assert rows[0]["computing speed"] == pytest.approx(0.9)
    assert not progress.missed(rows)
    rows = progress.rows(overlap_records(0.004, both=True))
    assert rows[0]["wait / wire"] == pytest.approx(0.75)
    assert "75.0%" in progress.missed(rows)[0]


def test_progress_rejects_too_little_computing(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.harness import run_main

    status = run_main(lambda: progress.main(["--megabytes", "50", "--compute", "0.4"]))
    assert status == 2
    assert "--compute: " in capsys.readouterr().err


def test_intake_compares_medians() -> None:
    seconds = {
        "bare": [1.0, 9.0, 2.0],
        "accumulate": [4.0, 1.0, 9.0],
        "pi 4": [5.0, 5.0, 5.0],
        "torch rpc": [3.0, 2.0, 4.0],
    }
    records = [
        {"bucket_mb": 4.0, "receiver": receiver, "seconds": value}
        for receiver, values in seconds.items()
        for value in values
    ]
    rows = intake.rows(records, workers=2, gigabytes=8.0)
    assert [row["ratio"] for row in rows] == [0.5, 0.4]
    assert rows[0]["ratio to rpc"] == 0.75
    assert rows[0]["intake, GB/s"] == 2.0
    bare, rpc = intake.missed(rows)  # the thresholds apply to accumulation only
    assert "0.50 " in bare and "0.75 of RPC" in rpc


def line(**figures: float) -> dict[str, Any]:
    return {"model": "half", "slow-down of one": 1.0, **figures}


def test_throughput_thresholds_apply_without_straggler() -> None:
    slow = line(**{"whole run": 4.0, "wait fraction": 0.03})
    assert len(throughput.missed([slow], workers=8)) == 2
    assert not throughput.missed([{**slow, "whole run": 7.9, "wait fraction": 0.01}], workers=8)
    assert not throughput.missed([{**slow, "slow-down of one": 10.0}], workers=8)


def test_busy_cores_are_counted() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(1.2)"]
    with BusyCores() as busy:
        subprocess.run(command, check=True, timeout=60)
    assert busy.cores is None or busy.cores >= 0
