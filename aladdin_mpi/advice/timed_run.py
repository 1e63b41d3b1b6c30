"""A timed simulation: throughput, time waiting and link load."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
    """A process pool with a queue of calls that can be cancelled.

    The executor itself never holds more calls than it has processes: calls that are cancelled while
    it holds them would raise an error in its thread when the processes are terminated.
    """

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(count, context, initializer=_begin)
        self._free = count
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._lock = RLock()
        self._is_closed = False

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Submit the call ``function(*arguments)`` and return its future."""
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

    def _end(self, future: Future[Any], completed: Future[Any]) -> None:
        with self._lock:
            self._free += 1
            if self._is_closed:
                return
            if isinstance(error := completed.exception(), BrokenProcessPool):
                self._is_closed = True  # the executor has ended the other processes
                error = UserError(
                    "a process was killed during a simulation, possibly because memory ran out. "
                    "Use fewer --jobs."
                )
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(completed.result())
            self._start()

    def close(self) -> None:
        """Terminate the processes, even while they run calls."""
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
"""Share of a run's samples after which it counts as settled."""

MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class LinkUse:
    """A host's link in one direction, "out" or "in", and its load: the share of time it is busy."""

    host: int
    way: str
    used: float


@dataclass(frozen=True)
class TimedRun:
    """The figures of a timed run.

    Attributes:
        rate: samples per second of all workers.
        waiting: share of the workers' time spent waiting.
        links: of all hosts, the busiest first.
        busiest_bytes: bytes on the busiest link per step of all workers.
        cost: CPU seconds of the simulation.
    """

    rate: float
    waiting: float
    links: tuple[LinkUse, ...]
    busiest_bytes: float
    cost: float = 0.0

    @property
    def load(self) -> float:
        """The load of the busiest link."""
        return self.links[0].used if self.links else 0.0


def run(options: dict[str, Any]) -> TimedRun | str:
    """Carry out a simulation with these options in this process.

    Returns:
        Its figures, or the reason why it cannot run, such as options that cannot be combined.
    """
    try:
        return _run(options)
    except UserError as error:
        return str(error)


def _run(options: dict[str, Any]) -> TimedRun:
    # Imported here because the parent of a pool does not need these modules.
    from aladdin_mpi.run.trainer import train
    from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport

    began = time.process_time()
    # Every run ends with a checkpoint, a file per rank, which is kept in memory if possible.
    place = MEMORY if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="aladdin-advice-", dir=place) as folder:
        requested = SimulateOptions.model_validate({**options, "run_dir": Path(folder) / "run"})
        servers = requested.servers if find_algorithm(requested.algorithm).has_servers else 0
        size = requested.workers + servers
        cluster = VirtualCluster(size, requested.cluster.placed(servers), requested.seed)
        carried: dict[str, list[int]] = {}

        def main(transport: VirtualTransport) -> dict[str, Any]:
            summary = train(requested, transport)
            if transport.rank == 0:
                carried.update(transport.carried())
            return summary

        summary = cluster.run(main)[0] or {}
        text = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [files.read(line) for line in text.splitlines()]
    steps = summary["samples"] / (requested.workers * requested.batch_size)
    most = max((max(each) for way, each in carried.items() if way != "local"), default=0)
    return TimedRun(
        rate_of(lines, summary),
        waiting_of(lines, summary),
        _links(carried, requested, summary["seconds"]),
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
    """Return links in the order of a :class:`TimedRun`."""
    return tuple(sorted(links, key=lambda link: -link.used))


def _settled(lines: Sequence[dict[str, Any]], samples: int) -> list[dict[str, Any]]:
    """Return the lines on training in the settled part of a run, without its start and end."""
    shown = [line for line in lines if line["kind"] == "train"]
    end = next((i + 1 for i, line in enumerate(shown) if line["samples"] >= samples), len(shown))
    settled = [line for line in shown[:end] if line["samples"] >= SETTLED * samples]
    is_enough = len(settled) >= 3 and settled[0]["seconds"] != settled[-1]["seconds"]
    return settled if is_enough else []


def rate_of(lines: Sequence[dict[str, Any]], summary: dict[str, Any]) -> float:
    """Return samples per second in the settled part of a run."""
    settled = _settled(lines, summary["samples"])
    if not settled:
        return float(summary["samples_per_second"])
    seconds = [float(line["seconds"]) for line in settled]
    return linear_regression(seconds, [float(line["samples"]) for line in settled]).slope


def waiting_of(lines: Sequence[dict[str, Any]], summary: dict[str, Any]) -> float:
    """Return the share of the workers' time spent waiting, in the settled part of a run.

    At the end, all wait for the last messages.
    """
    settled = _settled(lines, summary["samples"])
    if not settled:
        return float(summary["wait_fraction"])
    first, last = settled[0], settled[-1]
    waited = last["wait_fraction"] * last["seconds"] - first["wait_fraction"] * first["seconds"]
    return float(min(max(waited / (last["seconds"] - first["seconds"]), 0.0), 1.0))
