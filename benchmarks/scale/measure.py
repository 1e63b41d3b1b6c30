"""Simulate one point of a curve, and measure its settled part."""

from __future__ import annotations

import gc
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from benchmarks.scale.cases import LOCAL_GBIT, Case, Phase

_BYTES_PER_GBIT = 1e9 / 8
_MEMORY = Path("/dev/shm")


@dataclass
class Diary:
    """Start of each worker's steps, with the bytes sent and seconds waited by then."""

    moments: dict[int, list[tuple[float, int, float]]] = field(default_factory=dict)
    carried: list[tuple[float, dict[str, list[int]]]] = field(default_factory=list)
    """Bytes on every link at the start of the first worker's steps."""


def run(case: Case) -> dict[str, Any]:
    """Simulate and return the figures of the settled part."""
    diary = Diary()
    # Every run ends with a checkpoint, one file per rank: in memory, if there is such a folder.
    place = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="large-", dir=place) as folder:
        options = case.options(Path(folder) / "run")
        module = nn.Linear(round(case.model.megabytes * 250_000), 1, bias=False, device="meta")

        def main(transport: VirtualTransport) -> None:
            parallel = DataParallel(module, options, transport=transport)
            for _ in parallel.batches(options.samples):
                _note(diary, transport, case.servers)
                parallel.step()

        size = case.servers + case.workers
        VirtualCluster(size, options.cluster, case.seed).run(main)
    return figures(case, diary)


def _note(diary: Diary, transport: VirtualTransport, first: int) -> None:
    now, traffic = transport.now(), transport.traffic
    moments = diary.moments.setdefault(transport.rank, [])
    moments.append((now, traffic.bytes_sent, traffic.waiting))
    if transport.rank == first:
        diary.carried.append((now, transport.carried()))


def figures(case: Case, diary: Diary) -> dict[str, Any]:
    """Return the figures of the steps within the window."""
    phase, workers = case.phase, list(diary.moments.values())
    rates, sent, waits = [], [], []
    for moments in workers:
        (t0, sent0, wait0), (t1, sent1, wait1), steps = ends(moments, phase)
        rates.append(steps / (t1 - t0))
        sent.append((sent1 - sent0) / steps)
        waits.append((wait1 - wait0) / (t1 - t0))
    steps_per_second = sum(rates)
    return {
        "speed_up": steps_per_second * case.model.seconds,
        "samples_per_second": steps_per_second * case.model.batch,
        "wait_fraction": sum(waits) / len(waits),
        "sent_mb": sum(sent) / len(sent) / 1e6,
        "slowest": min(rates) * case.model.seconds,
        **busiest(case, *ends(diary.carried, phase)[:2]),
    }


def ends(moments: Sequence[Any], phase: Phase) -> tuple[Any, Any, int]:
    """Return the start and the end of the window, and the steps between.

    A worker with fewer steps than others, as slower ones have, ends earlier.
    """
    last = min(phase.warm_up + phase.window, len(moments) - 1)
    first = min(phase.warm_up, last - 1)
    return moments[first], moments[last], last - first


def busiest(case: Case, start: Any, end: Any) -> dict[str, Any]:
    """Return the link that was busy for the largest share of the window."""
    seconds = end[0] - start[0]
    found: list[tuple[float, str]] = []
    for kind, before in start[1].items():
        rate = (LOCAL_GBIT if kind == "local" else case.gbit) * _BYTES_PER_GBIT
        for host, (b, a) in enumerate(zip(before, end[1][kind], strict=True)):
            whose = "a server's host" if host < case.servers else "a host"
            place = f"inside {whose}" if kind == "local" else f"{kind} of {whose}"
            found.append(((a - b) / rate / seconds, place.replace("in of", "into")))
    share, link = max(found)
    return {"busiest_link": link, "busy": share}


Timed = tuple[Case, dict[str, Any], float, float]
"""A case, its figures, its duration in seconds and its peak memory in MB."""


def run_apart(cases: Sequence[Case], jobs: int) -> Iterator[Timed]:
    """Run each case as :func:`run` in a separate process, ``jobs`` at a time.

    So the memory of a thousand ranks is released, and a case cannot affect the next one.
    """
    if not cases:
        return
    # Not "fork": the caller may have threads, and handlers by which a child ignores terminate().
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_timed, cases)


def _timed(case: Case) -> Timed:
    torch.set_num_threads(1)
    # Ranks leave hardly any cycles: looking for them takes a tenth of the time, more with
    # many ranks, and saves no memory.
    gc.disable()
    start = time.perf_counter()
    found = run(case)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return case, found, time.perf_counter() - start, memory
