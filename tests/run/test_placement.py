"""The placement of ranks is printed, with warnings, and summarised for many ranks."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.run import placement
from aladdin_mpi.run.job import Job
from aladdin_mpi.run.placement import (
    bind_to_near,
    by_host,
    by_rank,
    far_cores,
    idle_gpus,
    place,
    print_placement,
    shared_gpus,
)
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.commands import train
from tests.virtual_lab import lab, run


def fact(
    rank: int, host: str, gpu: str | None, index: int = 0, cores: int = 4, nearness: str = ""
) -> dict[str, Any]:
    return {
        "rank": rank,
        "host": host,
        "role": "server" if gpu is None else "worker",
        "device": "cpu" if gpu is None else f"cuda:{index}",
        "gpu": gpu,
        "idle_gpus": 0,
        "cores": [*range(cores), 40],
        "nearness": nearness,
    }


def test_placement_has_a_line_for_each_rank() -> None:
    lines = by_rank([fact(0, "n1", None), fact(1, "n12", "GPU-a", 3)])
    assert lines == [
        "rank 0  n1   server  cpu     cores 0-3,40",
        "rank 1  n12  worker  cuda:3  cores 0-3,40",
    ]


def test_placement_reports_near_cores_and_warns_of_far_ones() -> None:
    ways = ["near", "far", ""]
    facts = [fact(i, "n1", f"GPU-{i}", i, nearness=way) for i, way in enumerate(ways)]
    assert by_rank(facts) == [
        "rank 0  n1  worker  cuda:0  cores 0-3,40  near its GPU",
        "rank 1  n1  worker  cuda:1  cores 0-3,40  far from its GPU",
        "rank 2  n1  worker  cuda:2  cores 0-3,40",
    ]
    (warning,) = far_cores(facts)
    assert warning.startswith("workers on n1 (1 in all) are bound to cores far from their GPUs: ")
    assert far_cores([facts[0], facts[2]]) == []
    assert by_host([facts[0]])[1] == "  n1: 1 worker on cuda:0, 5 cores each, near their GPUs"
    assert by_host(facts)[1].endswith("5 cores each")


def test_placement_of_many_ranks_is_summarised_by_host() -> None:
    facts = [fact(0, "n0", None)]
    facts += [fact(1 + i, f"n{i // 8}", f"GPU-{i}", i % 8, cores=6) for i in range(800)]
    gpus = ", ".join(f"cuda:{i}" for i in range(8))
    assert by_host(facts) == [
        "801 ranks on 100 hosts:",
        f"  n0: 1 server on cpu, 5 cores each; 8 workers on {gpus}, 7 cores each",
        f"  99 hosts, n1 to n99: 8 workers on {gpus}, 7 cores each",
    ]


def test_placement_warns_of_a_gpu_shared_on_one_host_only() -> None:
    facts = [fact(0, "n1", None), fact(1, "n1", "GPU-a"), fact(2, "n1", "GPU-b")]
    facts += [fact(3, "n2", "GPU-c"), fact(4, "n2", "GPU-c")]
    (warning,) = shared_gpus(facts)
    assert warning.startswith("ranks 3, 4 share cuda:0 of n2: ")
    facts[-1]["role"] = "spare"
    assert shared_gpus(facts) == []
    assert by_rank(facts)[-1].startswith("rank 4  n2  spare   cuda:0")
    assert "; 1 spare on cuda:0, 5 cores each" in by_host(facts)[-1]


def test_placement_warns_of_idle_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the driver had failed, or torch were built without GPU support."""
    monkeypatch.setattr(placement, "on_the_bus", lambda: 4)
    cpu = torch.device("cpu")
    facts = [place(rank, cpu, servers=1, was_chosen=False) for rank in (0, 1, 2)]
    (warning,) = idle_gpus(facts)
    expected = f"workers compute on the CPU of {platform.node()} with 4 GPUs, which torch cannot"
    assert warning.startswith(expected)
    assert idle_gpus([place(1, cpu, servers=1)]) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert idle_gpus([place(1, cpu, servers=1, was_chosen=False)]) == []


def test_simulation_warns_of_idle_gpus_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(placement, "on_the_bus", lambda: 4)
    cpu = torch.device("cpu")
    run(3, lambda transport: print_placement(transport, cpu, servers=1), lab(1))
    assert capfd.readouterr().err == ""
    run(3, lambda transport: print_placement(transport, cpu, servers=1, was_chosen=False), lab(1))
    printed = capfd.readouterr()
    assert printed.err.count("workers compute on the CPU of ") == 1
    assert printed.out == ""


def test_training_prints_the_placement(tmp_path: Path) -> None:
    timed = ["--compute", "timed", "--compute-time", "0.001", "--model", "size:1"]
    printed = train(2, tmp_path / "run", "--samples", 64, "--device", "cpu", *timed).stdout
    host = platform.node()
    assert [line.split()[:5] for line in printed.splitlines() if line.startswith("rank ")] == [
        ["rank", "0", host, "server", "cpu"],
        ["rank", "1", host, "worker", "cpu"],
    ]


def test_servers_are_numbered_after_the_workers() -> None:
    """Two hosts, with two servers on the first."""
    jobs = [
        Job(rank, [0, 0, 0, 1, 1], 2, shares_process=False, wait=lambda: None) for rank in range(5)
    ]
    assert [job.index for job in jobs] == [3, 4, 0, 1, 2]
    assert [job.index_on_host for job in jobs] == [1, 2, 0, 0, 1]
    assert [job.is_first for job in jobs] == [False, False, True, False, False]
    assert Job(0, [0, 1], 1, shares_process=False, wait=int).index_on_host == 1


def test_ranks_that_have_failed_have_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    """The others start, or end with an error about the failure."""
    cpu = torch.device("cpu")

    def main(transport: VirtualTransport) -> None:
        transport.shares_process = False
        transport.sleep(1.0)
        bind_to_near(transport, cpu)
        print_placement(transport, cpu, servers=0)

    run(3, main, lab(3, failures={1: 0.5}))
    assert [line[:6] for line in capsys.readouterr().out.splitlines()] == ["rank 0", "rank 2"]
