"""The MPI engine: real bytes, real time.

Two facts about MPI shape this file. A non-blocking send moves nothing while the
program computes, unless somebody enters the library: so a progress thread polls.
And a rank that waits by spinning takes the core from its neighbours: so waits
back off into short sleeps.

One thread at a time posts receives and tests for completions, which is when MPI
copies what has come; meanwhile another works on what it has and, with
``MPI_THREAD_MULTIPLE``, sends. With ``MPI_THREAD_SERIALIZED`` one lock covers every call.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from mpi4py import MPI  # before torch: Cray MPICH breaks the other way round

# isort: split
import torch
from torch import Tensor

from aladdin_mpi.transport.base import (
    ANY_SOURCE,
    Event,
    Handler,
    Request,
    Traffic,
    Transport,
    TransportError,
    WaitTimeoutError,
)
from aladdin_mpi.transport.volume import (
    allgather_bytes,
    allreduce_bytes,
    alltoall_bytes,
    broadcast_bytes,
)

FAST_POLL = 0.0005
"""Seconds between two polls of the progress thread while messages move."""
SLOW_POLL = 0.001
"""The same when nothing has moved lately."""
LIVELY = 0.02
"""Seconds after the last completion for which messages are taken to be moving."""
HANDLER_DEPTH = 4
"""Receives posted ahead for every handler."""
SHORT_NAP = 0.0002
"""Longest sleep, in seconds, between two looks of a waiting rank while messages move, ..."""
LONG_NAP = 0.0005
"""... and when nothing has moved lately."""

REDUCIBLE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
}


class _MpiRequest(Request):
    __slots__ = ("handle", "receives", "tag")

    def __init__(self, what: str, buffer: Tensor | None, receives: bool) -> None:
        super().__init__(what, buffer)
        self.receives = receives
        self.tag = -1
        self.handle: MPI.Request = MPI.REQUEST_NULL


class _Inbox:
    """The receives posted ahead for one handler, in the order of posting."""

    def __init__(self, tag: int, nbytes: int, handler: Handler) -> None:
        self.tag = tag
        self.nbytes = nbytes
        self.handler = handler
        self.posted: deque[_MpiRequest] = deque()


class MpiTransport(Transport):
    """The ranks of ``MPI_COMM_WORLD``, on communicators of their own.

    Args:
        timeout: longest wait in seconds for another rank; None waits for ever.
        progress: run the progress thread. Without it nothing moves while a rank
            computes; the benchmarks show the difference.
    """

    engine = "mpi"

    def __init__(self, timeout: float | None = None, progress: bool = True) -> None:
        self._messages = MPI.COMM_WORLD.Dup()
        self._collectives = MPI.COMM_WORLD.Dup()
        self.rank = self._messages.Get_rank()
        self.size = self._messages.Get_size()
        self.traffic = Traffic()
        self.timeout = timeout
        names = self._messages.allgather(MPI.Get_processor_name())
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.hosts = [numbers[name] for name in names]
        self.host_names = list(numbers)
        self._start = time.perf_counter()
        self._polling = threading.Lock()
        threads = MPI.Query_thread()
        free = threads >= MPI.THREAD_MULTIPLE
        self._posting: AbstractContextManager[Any] = nullcontext() if free else self._polling
        self._fresh: deque[_MpiRequest] = deque()
        self._active: list[_MpiRequest] = []
        self._statuses: list[MPI.Status] = []
        self._completions = 0
        self._lively_until = 0.0
        self._exempt: frozenset[int] = frozenset()
        self._held_back: dict[tuple[int, int], deque[tuple[_MpiRequest, Event | None]]] = {}
        self._handling = threading.RLock()
        self._inboxes: list[_Inbox] = []
        self._look: Callable[[], None] | None = None
        self._waiters = 0
        self._progress_thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self._spins = 50 if self.hosts.count(self.host) <= (os.cpu_count() or 1) else 0
        if progress and threads >= MPI.THREAD_SERIALIZED:
            self._start_progress()

    def _start_progress(self) -> None:
        # A compute thread that stays in Python must not keep the progress thread
        # from the interpreter lock for the default 5 ms.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self._progress_thread = threading.Thread(
            target=self._progress, name="mpi-progress", daemon=True
        )
        self._progress_thread.start()

    # -- time ---------------------------------------------------------------
    def now(self) -> float:
        return time.perf_counter() - self._start

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    # -- point to point -----------------------------------------------------
    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        request = _MpiRequest(f"send to rank {dest}, tag {tag}", buffer, receives=False)
        if tag not in self._exempt:
            self.traffic.bytes_sent += buffer.nbytes
            self.traffic.messages_sent += 1
        if after is None and not self._held_back:
            with self._posting:
                self._send(request, dest, tag)
            return request
        with self._polling:
            queue = self._held_back.get((dest, tag))
            if queue or (after is not None and not after.query()):
                self._held_back.setdefault((dest, tag), deque()).append((request, after))
            else:
                self._send(request, dest, tag)
        return request

    def _send(self, request: _MpiRequest, dest: int, tag: int) -> None:
        assert request.buffer is not None
        request.handle = self._messages.Isend(_bytes(request.buffer), dest, tag)
        self._fresh.append(request)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        _check_buffer(buffer)
        name = "any rank" if source == ANY_SOURCE else f"rank {source}"
        request = _MpiRequest(f"receive from {name}, tag {tag}", buffer, receives=True)
        request.source, request.tag = source, tag
        # Posted by the next poll: MPI copies a message that has been announced already
        # inside Irecv, which must not keep this thread from its work.
        self._fresh.append(request)
        return request

    def _post_receive(self, request: _MpiRequest) -> None:
        assert request.buffer is not None
        source = MPI.ANY_SOURCE if request.source == ANY_SOURCE else request.source
        request.handle = self._messages.Irecv(_bytes(request.buffer), source, request.tag)

    def test(self, request: Request) -> bool:
        if not request.done:
            self._poll()
        return request.done

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        first = _first_done(requests)
        if first < 0:
            start = time.perf_counter()
            first = self._wait_until(lambda: _first_done(requests), requests, start, timeout)
            self.traffic.waiting += time.perf_counter() - start
        return first

    def _wait_until(
        self,
        look: Callable[[], int],
        requests: Sequence[Request],
        start: float,
        timeout: float | None,
    ) -> int:
        limit = self.timeout if timeout is None else timeout
        self._waiters += 1
        try:
            for turn in _turns():
                self._poll()
                found = look()
                if found >= 0:
                    return found
                if limit is not None and time.perf_counter() - start > limit:
                    break
                if turn >= self._spins:
                    longest = SHORT_NAP if self._lively else LONG_NAP
                    time.sleep(min(longest, 0.00002 * (turn - self._spins)))
        finally:
            self._waiters -= 1
        if timeout is not None:
            return -1
        raise WaitTimeoutError(
            f"rank {self.rank} waited {limit:g} s for {_summary(requests)}: that rank hangs, has "
            f"died, or is slower than --timeout allows"
        )

    def cancel(self, request: Request) -> None:
        assert isinstance(request, _MpiRequest)
        with self._polling:
            if request.done:
                return
            self._take_fresh()
            request.handle.Cancel()
            status = MPI.Status()
            request.handle.Wait(status)
            self._active.remove(request)
            if not status.Is_cancelled():
                self._complete(request, status)
            request.done = True

    def exempt(self, *tags: int) -> None:
        self._exempt |= set(tags)

    # -- progress -------------------------------------------------------------
    def _progress(self) -> None:
        """Enter MPI now and then, so that messages move while the rank computes."""
        while not self._stopping:
            before = self._completions
            if self._waiters == 0:
                self._poll()
            if self._completions != before:
                continue  # messages stream in: the next may be there already
            time.sleep(FAST_POLL if self._lively else SLOW_POLL)

    @property
    def _lively(self) -> bool:
        return time.perf_counter() < self._lively_until

    def _poll(self) -> None:
        """Complete what can be completed, then run the handlers of what has come."""
        before = self._completions
        with self._polling:
            if self._closed:
                return
            # If another thread has completed something meanwhile, that is looked at first.
            if self._completions == before:
                if self._held_back:
                    self._release_held_back()
                self._take_fresh()
                self._complete_some()
        for inbox in self._inboxes:
            if inbox.posted and inbox.posted[0].done:
                self._dispatch(inbox)
        look = self._look
        if look is not None:
            look()

    def _take_fresh(self) -> None:
        while self._fresh:
            request = self._fresh.popleft()
            if request.receives:
                self._post_receive(request)
            self._active.append(request)

    def _complete_some(self) -> None:
        active = self._active
        while len(self._statuses) < len(active):
            self._statuses.append(MPI.Status())
        indices = MPI.Request.Testsome([r.handle for r in active], self._statuses)
        if not indices:
            return
        for index, status in sorted(zip(indices, self._statuses, strict=False), key=_first):
            self._complete(active[index], status)
        self._active = [request for request in active if not request.done]
        self._lively_until = time.perf_counter() + LIVELY

    def _complete(self, request: _MpiRequest, status: MPI.Status) -> None:
        if request.receives:
            request.source = status.Get_source()
            request.nbytes = status.Get_count(MPI.BYTE)
            if request.tag not in self._exempt:
                self.traffic.bytes_received += request.nbytes
                self.traffic.messages_received += 1
        request.order = self._completions
        self._completions += 1
        request.done = True

    def _release_held_back(self) -> None:
        for (dest, tag), queue in list(self._held_back.items()):
            while queue and (queue[0][1] is None or queue[0][1].query()):
                self._send(queue.popleft()[0], dest, tag)
            if not queue:
                del self._held_back[dest, tag]

    # -- messages that interrupt --------------------------------------------
    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        inbox = _Inbox(tag, nbytes, handler)
        for _ in range(HANDLER_DEPTH):
            self._post(inbox, torch.empty(nbytes, dtype=torch.uint8))
        self._inboxes.append(inbox)

    def _post(self, inbox: _Inbox, buffer: Tensor) -> None:
        request = self.irecv(buffer, ANY_SOURCE, inbox.tag)
        assert isinstance(request, _MpiRequest)
        inbox.posted.append(request)

    def _dispatch(self, inbox: _Inbox) -> None:
        with self._handling:
            while inbox.posted and inbox.posted[0].done:
                request = inbox.posted.popleft()
                assert request.buffer is not None
                try:
                    inbox.handler(request.source, request.buffer[: request.nbytes])
                finally:
                    self._post(inbox, request.buffer)

    def watch(self, look: Callable[[], None] | None) -> None:
        self._look = look

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with self._handling:
            yield

    # -- collectives ----------------------------------------------------------
    def _collective(self, name: str, volume: int, *arguments: object) -> Request:
        """Start a collective; ``volume`` is what it is taken to send."""
        self.traffic.bytes_sent += volume
        request = _MpiRequest(name, None, receives=False)
        with self._posting:
            request.handle = getattr(self._collectives, name)(*arguments)
        self._fresh.append(request)
        return request

    def ibarrier(self) -> Request:
        return self._collective("Ibarrier", 0)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        volume = broadcast_bytes(buffer.nbytes, self.size)
        return self._collective("Ibcast", volume, _bytes(buffer), root)

    def iallreduce(self, buffer: Tensor) -> Request:
        if buffer.dtype not in REDUCIBLE:
            raise TypeError(
                f"iallreduce adds {', '.join(map(str, REDUCIBLE))}, not {buffer.dtype}, "
                "which MPI does not add rightly: convert it first"
            )
        place = [buffer.detach().numpy(), REDUCIBLE[buffer.dtype]]
        volume = allreduce_bytes(buffer.nbytes, self.size)
        return self._collective("Iallreduce", volume, MPI.IN_PLACE, place)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        volume = allgather_bytes(buffer.nbytes, self.size)
        return self._collective("Iallgather", volume, _bytes(buffer), _bytes(gathered))

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        volume = alltoall_bytes(buffer.nbytes, self.size)
        return self._collective("Ialltoall", volume, _bytes(buffer), _bytes(received))

    # -- failure and end ------------------------------------------------------
    @property
    def failed(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        if self._closed:
            return
        self._stopping = True
        if self._progress_thread is not None:
            self._progress_thread.join()
        self._take_fresh()
        pending: list[Request] = [request for request in self._active if not request.receives]
        self.wait_all(pending)
        for request in list(self._active):
            self.cancel(request)
        self._closed = True
        if self._held_back:
            raise TransportError("closed while sends waited for their event")


def _check_buffer(buffer: Tensor) -> None:
    if not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise TransportError(
            f"MPI sends contiguous CPU tensors; got shape {tuple(buffer.shape)} with strides "
            f"{buffer.stride()} on {buffer.device}"
        )


def _bytes(buffer: Tensor) -> list[object]:
    """``buffer`` as MPI takes it: its own memory, counted in bytes."""
    _check_buffer(buffer)
    return [buffer.detach().reshape(-1).view(torch.uint8).numpy(), MPI.BYTE]


def _first(pair: tuple[int, MPI.Status]) -> int:
    return pair[0]


def _first_done(requests: Sequence[Request]) -> int:
    """Index of the request that was done first, or -1."""
    best = -1
    for index, request in enumerate(requests):
        if request.done and (best < 0 or request.order < requests[best].order):
            best = index
    return best


def _summary(requests: Sequence[Request]) -> str:
    shown = "; ".join(request.what for request in requests[:4])
    return shown + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")


def _turns() -> Iterator[int]:
    turn = 0
    while True:
        yield turn
        turn += 1
