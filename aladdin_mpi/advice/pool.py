"""Processes for virtual runs."""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any


class Processes:
    """A queue of calls in front of so many processes.

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


@contextmanager
def workers_of(count: int) -> Iterator[Processes]:
    """So many processes, which are ended with the block whatever they do."""
    pool = Processes(count)
    try:
        yield pool
    finally:
        pool.close()


def _begin() -> None:
    import torch

    torch.set_num_threads(1)
