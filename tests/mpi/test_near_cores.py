"""Ranks bind themselves, by real system calls, to the cores of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aladdin_mpi.run import placement
from aladdin_mpi.run.placement import as_cpulist, bind_to_near, split
from aladdin_mpi.transport.mpi.engine import MpiTransport

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    placement.bind(CORES)
    torch.set_num_threads(threads)


@pytest.mark.skipif(len(CORES) < 2, reason="a single core cannot be divided")
@pytest.mark.parametrize("gpu", ["cuda", "cpu"])
def test_workers_divide_the_cores_near_their_gpus(
    gpu: str, tmp_path: Path, transport: MpiTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is a server; the GPUs of all others are near this machine's first two cores."""
    device = torch.device(gpu if transport.rank else "cpu")
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "local_cpulist").write_text(as_cpulist(CORES[:2]))
    monkeypatch.setattr(
        placement, "bus_address", lambda device: None if device.type == "cpu" else "gpu"
    )
    bind_to_near(transport, device, tmp_path, tmp_path)
    now = sorted(os.sched_getaffinity(0))
    parts = split(CORES[:2], max(transport.size - 1, 1), tmp_path)
    if device.type == "cuda" and transport.size > 2:
        assert now == list(parts[transport.rank - 1] or CORES)
    else:
        assert now == CORES, "a server, a worker alone, a worker without a GPU"
