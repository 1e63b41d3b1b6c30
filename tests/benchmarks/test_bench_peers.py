"""Benchmarks of a gradient's path and of peer libraries: tiny runs, and table calculations."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.allreduce import horovod
from benchmarks import gradient, heap, kernels, peers, step
from benchmarks.programs.contenders import mean_step
from tests.benchmarks.test_benchmarks import run_script
from tests.launch import needs

pytestmark = pytest.mark.timeout(280)


@pytest.mark.long
@pytest.mark.slow
@needs("openmpi")
def test_peers_benchmark_runs_every_contender(tmp_path: Path) -> None:
    rows = run_script("peers", tmp_path, "--quick")["rows"]
    (one, two) = rows
    assert (one["what"], one["size"], two["what"], two["size"]) == ("step", "digits", "sum", "1 MB")
    there = horovod.library() is not None
    for name in ("alone", "mpi", "torch", "DDP", "DDP PowerSGD", "dgc"):
        assert one[f"{name}, ms"] > 0
    for name in ("mpi", "torch", "Allreduce", "all_reduce"):
        assert two[f"{name}, ms"] > 0
    assert ("horovod, ms" in one) == ("hvd optimizer, ms" in one) == there
    assert one["ratio"] > 0 and two["ratio"] > 0 and one["compressed ratio"] > 0


def test_mean_step_excludes_end_of_run() -> None:
    """The last step() also saves the model."""
    warm_up, measured, last = [1.0, 2.0], [2.5, 3.0, 3.5], [103.5]
    assert mean_step([*warm_up, *measured, *last], len(warm_up)) == 0.5


@pytest.mark.long
@pytest.mark.slow
@needs("openmpi")
def test_step_benchmark_runs(tmp_path: Path) -> None:
    rows = run_script("step", tmp_path, "--quick")["rows"]
    assert [(row["model"], row["case"]) for row in rows] == [
        ("digits", "aladdin"),
        ("digits", "aladdin-ahead"),
        ("digits", "aladdin timed"),
    ]
    shortest = min(rows[0][f"{case}, ms"] for case in ("alone", "flat", "busy"))
    assert rows[0]["without communication, ms"] == shortest
    assert rows[1]["over aladdin"] == rows[1]["step, ms"] / rows[0]["step, ms"]
    assert rows[2]["sleep, ms"] >= 10 and rows[2]["step, ms"] >= 10


@pytest.mark.slow
@needs("openmpi")
def test_gradient_benchmark_keeps_memory_pass_budget(tmp_path: Path) -> None:
    saved = run_script("gradient", tmp_path, "--quick", "--check")
    rows = {(row["at"], row["what"]): row for row in saved["rows"]}
    assert gradient.BUDGET.keys() <= rows.keys()
    # Three buckets of at most 40 kB, preceded by a header.
    assert rows["worker", "sent GRADIENT"]["times"] == pytest.approx(1 + 3, abs=0.2)
    assert rows["worker", "backward"]["read, gradients"] == pytest.approx(1, abs=0.05)
    # A model in response to every fourth gradient of a worker, in three buckets with headers.
    assert rows["server", "sent MODEL"]["times"] == pytest.approx(6 / 4, abs=0.3)
    assert rows["server", "polls by the rank"]["times"] > 0


@pytest.mark.long
def test_kernels_benchmark_runs(tmp_path: Path) -> None:
    rows = run_script("kernels", tmp_path, "--quick")["rows"]
    assert [row["what"] for row in rows] == list(kernels.KERNELS)
    assert all(row["here, ms"] > 0 and row["plain, ms"] > 0 for row in rows)


def test_heap_benchmark_compares_retained_and_freed_memory(tmp_path: Path) -> None:
    (row,) = run_script("heap", tmp_path, "--quick")["rows"]
    assert row["model"] == "digits"
    assert row["ratio"] == row["memory kept, ms"] / row["step by itself, ms"]
    assert len(heap.missed([{**row, "ratio": 1.01}])) == 1
    assert not heap.missed([{**row, "ratio": 1.0}])


@pytest.mark.long
@pytest.mark.sample(1)
@pytest.mark.parametrize("kernel", ["momentum", "update"])
def test_kernel_variants_compute_equal_results(kernel: str) -> None:
    """Both variants change the same memory bit-identically."""
    result = []
    for way in range(2):
        torch.manual_seed(1)
        ways = kernels.KERNELS[kernel](40.0)
        ways[way]()
        vectors = [
            cell.cell_contents
            for cell in (ways[way].__closure__ or ())
            if isinstance(cell.cell_contents, kernels.Vectors)
        ]
        result.append([vector._rows for vector in vectors])
    for one, other in zip(*result, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantise_kernel_variants_leave_the_same_error(bits: int) -> None:
    """Both variants leave the same residual."""
    left = []
    for way in range(2):
        torch.manual_seed(1)
        ways = kernels.KERNELS[f"quantise {bits}"](0.1)
        ways[way]()
        cells = [cell.cell_contents for cell in (ways[way].__closure__ or ())]
        (vector,) = (c for c in cells if isinstance(c, torch.Tensor) and c.shape == (25_000,))
        left.append(vector[: 25_000 // 256 * 256])
    torch.testing.assert_close(*left)
    assert left[0].abs().max() > 0


def records(what: str, **seconds: list[float]) -> list[dict[str, Any]]:
    names = {"ddp": "DDP", "hvd": "hvd optimizer", "power": "DDP PowerSGD"}
    return [
        {"what": what, "size": "s", "who": names.get(who, who), "seconds": value}
        for who, values in seconds.items()
        for value in values
    ]


def test_best_backend_is_compared_with_best_peer() -> None:
    times = records(
        "step",
        mpi=[0.3, 0.2, 9.0],
        torch=[0.4, 0.4, 0.4],
        ddp=[0.26, 0.25, 0.1],
        hvd=[0.5],
        dgc=[0.2],
        power=[0.1],
    )
    (row,) = peers.rows(times, ranks=4)
    assert (row["best of ours"], row["best peer"]) == ("mpi", "DDP")
    assert row["ratio"] == pytest.approx(0.3 / 0.25)
    assert row["compressed ratio"] == pytest.approx(2.0)
    exact, compressed = peers.missed([row])
    assert re.search(r"\bmpi\b.*\b1\.20\b.*\bDDP\b", exact)
    assert re.search(r"\bdgc\b.*\b2\.00\b.*\bDDP PowerSGD\b", compressed)
    assert not peers.missed([{**row, "ratio": 1.05, "compressed ratio": 0.9}])


def test_peers_row_has_no_ratio_without_peers() -> None:
    (row,) = peers.rows(records("sum", mpi=[0.3]), ranks=2)
    assert "ratio" not in row
    assert not peers.missed([row])


def test_step_is_compared_with_shortest_step_without_communication() -> None:
    seconds = {"alone": 0.2, "flat": 0.1, "busy": 0.22, "aladdin": 0.11}
    seconds |= {"sleep": 0.1, "aladdin timed": 0.101, "aladdin-ahead": 0.112}
    table = step.rows(
        [{"model": "m", "case": case, "seconds": value} for case, value in seconds.items()], 1
    )
    assert [row["ratio"] for row in table] == pytest.approx([1.1, 1.12, 1.01])
    assert [row["busy ratio"] for row in table][0::2] == [pytest.approx(0.5), None]
    assert [row["over aladdin"] for row in table] == [None, pytest.approx(0.112 / 0.11), None]
    assert len(step.missed(table)) == 1


def test_gradient_benchmark_reports_exceeded_budget() -> None:
    row = {"at": "worker", "what": "look", "read, gradients": 2.0, "written, gradients": 0.0}
    (line,) = gradient.missed([row])
    assert re.search(r"^worker, look: .*\b2\.00\b.*\b1\b", line)
    assert not gradient.missed([{**row, "read, gradients": 1.0}, {"at": "x", "what": "y"}])
