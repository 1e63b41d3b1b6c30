"""One timed virtual run: how fast, how much waiting, which links are full."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import linear_regression
from threading import RLock
from typing import Any

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.process import files


class Processes:
    """A queue of calls before so many processes.

    The executor itself is given no more calls than it has processes: those that are cancelled
    while it holds them raise an error in its own thread when the processes are ended.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, initializer=_begin)
        self._free = count
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = RLock()
        self._is_closed = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Have ``function(*arguments)`` called in one of them; see :class:`Future`."""
        future: Future[Any] = Future()
        with self._lock:
            self._queue.append((future, partial(function, *arguments)))
            self._start()
        return future

    def _start(self) -> None:
        while self._free and self._queue and not self._is_closed:
            future, call = self._queue.popleft()
            if future.set_running_or_notify_cancel():
                self._free -= 1
                self._pool.submit(call).add_done_callback(partial(self._end, future))

    def _end(self, future: Future[Any], done: Future[Any]) -> None:
        with self._lock:
            self._free += 1
            if self._is_closed:
                return
            if (error := done.exception()) is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
            self._start()

    def close(self) -> None:
        """End them, whatever they do."""
        with self._lock:
            self._is_closed = True
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False)
        for process in processes:
            process.terminate()


def _begin() -> None:
    import torch

    torch.set_num_threads(1)


SETTLED = 0.4
"""Share of a run's samples after which it is taken to be settled, at the latest by its middle."""

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LinkUse:
    """A host's link one way, "out" or "in", and the share of its time that it is used."""

    host: int
    way: str
    used: float


@dataclass(frozen=True)
class TimedRun:
    """The figures of a timed run.

    Attributes:
        rate: samples per second of all workers.
        waiting: share of the workers' time.
        links: of all hosts, the busiest first.
        busiest_bytes: that its busiest link carries for a step of all workers.
        cost: seconds of a processor that the run took.
    """

    rate: float
    waiting: float
    links: tuple[LinkUse, ...]
    busiest_bytes: float
    cost: float = 0.0


def run(options: dict[str, Any]) -> TimedRun | str:
    """Carry out a simulation with these options in this process.

    Returns:
        Its figures, or why it cannot run, as with options that cannot be combined.
    """
    try:
        return _run(options)
    except UserError as error:
        return str(error)


def _run(options: dict[str, Any]) -> TimedRun:
    # Here, so that the parent of a pool needs none of it.
    from aladdin_mpi.run.trainer import train
    from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport

    began = time.process_time()
    # A checkpoint ends every run, a file for each rank: in memory, where there is such a folder.
    place = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aladdin-advice-", dir=place) as folder:
        asked = SimulateOptions.model_validate({**options, "run_dir": Path(folder) / "run"})
        servers = asked.servers if find_algorithm(asked.algorithm).has_servers else 0
        size = asked.workers + servers
        cluster = VirtualCluster(size, asked.cluster.placed(servers), asked.seed)
        carried: dict[str, list[int]] = {}

        def main(transport: VirtualTransport) -> dict[str, Any]:
            summary = train(asked, transport)
            if transport.rank == 0:
                carried.update(transport.carried())
            return summary

        summary = cluster.run(main)[0] or {}
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = summary["samples"] / (asked.workers * asked.batch_size)
    most = max((max(each) for way, each in carried.items() if way != "local"), default=0)
    return TimedRun(
        rate_of([files.read(line) for line in lines], summary),
        summary["wait_fraction"],
        _links(carried, asked, summary["seconds"]),
        most / steps,
        time.process_time() - began,
    )


def _links(
    carried: dict[str, list[int]], options: SimulateOptions, seconds: float
) -> tuple[LinkUse, ...]:
    return busiest_first(
        LinkUse(host, way, nbytes / (options.cluster.link_gbit(host) / 8 * 1e9 * seconds))
        for way in ("out", "in")
        for host, nbytes in enumerate(carried[way])
        if seconds
    )


def busiest_first(links: Iterable[LinkUse]) -> tuple[LinkUse, ...]:
    """Links in the order in which a :class:`TimedRun` has them."""
    return tuple(sorted(links, key=lambda link: -link.used))


def rate_of(lines: Sequence[dict[str, Any]], summary: dict[str, Any]) -> float:
    """Samples per second while all workers were at it: the end, and the start, are left out."""
    shown = [line for line in lines if line["kind"] == "train"]
    most = summary["samples"]
    end = next((i + 1 for i, line in enumerate(shown) if line["samples"] >= most), len(shown))
    settled = [line for line in shown[:end] if line["samples"] >= SETTLED * most]
    seconds = [float(line["seconds"]) for line in settled]
    if len(settled) < 3 or seconds[0] == seconds[-1]:
        return float(summary["samples_per_second"])
    return linear_regression(seconds, [float(line["samples"]) for line in settled]).slope
