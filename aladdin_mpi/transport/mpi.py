"""The MPI engine: real bytes, real time.

Two facts about MPI shape this file. A non-blocking send moves nothing while the
program computes, unless somebody enters the library: so a progress thread polls.
And a rank that waits by spinning takes the core from its neighbours: so waits
back off into short sleeps.

One thread at a time posts receives and tests for completions, which is when MPI
copies what has come; meanwhile another works on what it has and, with
``MPI_THREAD_MULTIPLE``, sends. With ``MPI_THREAD_SERIALIZED`` one lock covers every call.
A rank that waits for a message does not wait for that lock: who finds another thread at it
is told by that thread of what it completes, at once and not when it comes out.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from aladdin_mpi.process import guard
from aladdin_mpi.transport import deaths  # before MPI: it decides how that begins and ends

# isort: split
from mpi4py import MPI  # before torch: Cray MPICH breaks the other way round

# isort: split
import torch
from torch import Tensor

from aladdin_mpi.errors import RefusedError, UserError
from aladdin_mpi.transport.base import Handler, Traffic, Transport
from aladdin_mpi.transport.pace import PARKED, SHORT_NAP, Pace, cores_of_host
from aladdin_mpi.transport.pending import MpiRequest, Pending
from aladdin_mpi.transport.request import (
    ANY_SOURCE,
    Event,
    PeerFailedError,
    Request,
    TransportError,
    WaitTimeoutError,
)
from aladdin_mpi.transport.volume import (
    allgather_bytes,
    allreduce_bytes,
    alltoall_bytes,
    broadcast_bytes,
)

HANDLER_DEPTH = 4
"""Receives posted ahead for every handler."""
LOOK_FOR_FAILURES = 0.02
"""Seconds between two looks for ranks that have died."""
NAMED_WITHIN = 10.0
"""Longest time in seconds from an operation's end by a death to the name of who has died."""

FAILURES = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED)

REDUCIBLE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
}


class _Inbox:
    """The receives posted ahead for one handler, in the order of posting.

    ``source`` is a rank, or ``ANY_SOURCE``.
    """

    def __init__(self, source: int, tag: int, handler: Handler) -> None:
        self.source = source
        self.tag = tag
        self.handler = handler
        self.posted: deque[MpiRequest] = deque()


class MpiTransport(Transport):
    """The ranks of ``MPI_COMM_WORLD``, on communicators of their own.

    Args:
        timeout: longest wait in seconds for another rank; None waits for ever.
        progress: run the progress thread. Without it nothing moves while a rank
            computes; the benchmarks show the difference.

    Raises:
        UserError: at rank 0, a host's number of cores is wrong; RefusedError at the others.
        PeerFailedError: a rank has died already.
    """

    engine = "mpi"
    models_time = shares_process = False
    needs_memory = True

    def __init__(self, timeout: float | None = None, progress: bool = True) -> None:
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.size = MPI.COMM_WORLD.Get_size()
        self.traffic = Traffic()
        self.timeout = timeout
        self._messages, self._collectives, names, cores = _set_up()
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.hosts = [numbers[name] for name in names]
        self.host_names = list(numbers)
        self._start = time.perf_counter()
        self._polling = threading.Lock()
        threads = MPI.Query_thread()
        free = threads >= MPI.THREAD_MULTIPLE
        self._posting: AbstractContextManager[Any] = nullcontext() if free else self._polling
        self._fresh: deque[MpiRequest] = deque()
        self._pending = Pending()
        self._statuses: list[MPI.Status] = []
        self._completions = 0
        self._last_news = 0.0
        self._exempt: frozenset[int] = frozenset()
        self.survives = deaths.SURVIVES
        self._failed: frozenset[int] = frozenset()
        self._left_out: frozenset[int] = frozenset()
        self._look_again = 0.0
        self._on_failure: list[Callable[[int], None]] = []
        self._untold: deque[int] = deque()
        self._abandoned: list[MpiRequest] = []
        self._held_back: dict[tuple[int, int], deque[tuple[MpiRequest, Event | None]]] = {}
        self._handling = threading.RLock()
        self._inboxes: list[_Inbox] = []
        self._when_done: list[tuple[Request, Callable[[], None]]] = []
        self._looks: list[Callable[[], None]] = []
        self._waiters = 0
        self._news = threading.Event()
        """Something has been completed: for a thread that waits while another one polls."""
        self._takes_over = threading.Event()
        """For the progress thread: one that polled for itself goes back to work, or has begun
        something."""
        self._is_idle = True
        """The pending requests awaited no data at the last look, under whose lock they change."""
        self._dozes = False
        """The progress thread looks seldom."""
        self._progress_thread: threading.Thread | None = None
        self._stopping = self._closed = False
        self.progresses = progress and threads >= MPI.THREAD_SERIALIZED
        self._pace = Pace(self.hosts.count(self.host), cores)
        if self.progresses:
            self._start_progress()

    def _start_progress(self) -> None:
        # A compute thread that stays in Python must not keep the progress thread
        # from the interpreter lock for the default 5 ms.
        sys.setswitchinterval(min(sys.getswitchinterval(), 0.0005))
        self._progress_thread = threading.Thread(
            target=self._progress, name="mpi-progress", daemon=True
        )
        self._progress_thread.start()

    def host_name(self, rank: int) -> str:
        return self.host_names[self.hosts[rank]]

    # -- time ---------------------------------------------------------------
    def now(self) -> float:
        return time.perf_counter() - self._start

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def charge_memory(self, nbytes: int) -> None:
        """Takes its time by itself."""

    # -- point to point -----------------------------------------------------
    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        name = f"send to rank {dest}, tag {tag}"
        request = MpiRequest(name, buffer, receives=False, peer=dest, tag=tag)
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
                self._wake()
            else:
                self._send(request, dest, tag)
        return request

    def _send(self, request: MpiRequest, dest: int, tag: int) -> None:
        assert request.buffer is not None
        if dest not in self._failed:
            try:
                request.handle = self._messages.Isend(_bytes(request.buffer), dest, tag)
            except MPI.Exception as error:
                self._meet_failure(request, error)
        self._add_fresh(request)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        _check_buffer(buffer)
        sender = "any rank" if source == ANY_SOURCE else f"rank {source}"
        name = f"receive from {sender}, tag {tag}"
        request = MpiRequest(name, buffer, receives=True, peer=source, tag=tag)
        request.source = source
        # Posted by the next poll: MPI copies a message that has been announced already
        # inside Irecv, which must not keep this thread from its work.
        self._add_fresh(request)
        return request

    def _add_fresh(self, request: MpiRequest) -> None:
        self._fresh.append(request)
        self._wake()

    def _wake(self) -> None:
        """There is something to look for more often."""
        if self._dozes:
            self._takes_over.set()

    def _post_receive(self, request: MpiRequest) -> None:
        assert request.buffer is not None
        source = MPI.ANY_SOURCE if request.source == ANY_SOURCE else request.source
        try:
            request.handle = self._messages.Irecv(_bytes(request.buffer), source, request.tag)
        except MPI.Exception as error:
            self._meet_failure(request, error)

    def test(self, request: Request) -> bool:
        if not request.done:
            # Not while another thread polls: what has ended by now is to be seen by now.
            self._poll(patient=True)
        if request.failed is not None:
            raise PeerFailedError(request.failed, self.host_name(request.failed))
        return request.done

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        first = _first_done(requests)
        if first < 0:
            start = time.perf_counter()
            first = self._wait_until(lambda: _first_done(requests), requests, start, timeout)
            self.traffic.waiting += time.perf_counter() - start
        if first >= 0 and requests[first].failed is not None:
            self.test(requests[first])
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
                self._news.clear()
                polled = self._poll()
                found = look()
                if found >= 0:
                    return found
                if limit is not None and time.perf_counter() - start > limit:
                    break
                if not polled:
                    self._news.wait(SHORT_NAP)
                elif nap := self._pace.nap(turn, self._quiet(since=start)):
                    time.sleep(nap)
        finally:
            self._waiters -= 1
            if self.progresses:
                self._takes_over.set()
        if timeout is not None:
            return -1
        raise WaitTimeoutError(
            f"rank {self.rank} waited {limit:g} s for {_summary(requests)}: that rank hangs, has "
            f"died, or is slower than --timeout allows"
        )

    def cancel(self, request: Request) -> None:
        assert isinstance(request, MpiRequest)
        with self._polling:
            if request.done:
                return
            self._take_fresh()
            if request.done:
                return
            self._pending.remove(request)
            status = MPI.Status()
            try:
                request.handle.Cancel()
                request.handle.Wait(status)
            except MPI.Exception as error:
                self._meet_failure(request, error)
                return
            if not status.Is_cancelled():
                self._complete(request, status)
            request.done = True

    def exclude_from_traffic(self, *tags: int) -> None:
        self._exempt |= set(tags)

    # -- progress -------------------------------------------------------------
    def _progress(self) -> None:
        """Enter MPI now and then, so that messages move while the rank computes."""
        streaming = False
        while not self._stopping:
            before = self._completions
            # A rank that waits polls for itself, but not while messages stream in: it is to
            # work on one while the next is copied.
            if streaming or self._waiters == 0:
                self._poll()
            streaming = self._completions != before
            if not streaming:
                self._takes_over.wait(self._pause())
                self._takes_over.clear()
                self._dozes = False

    def _pause(self) -> float:
        """Seconds until the next look of the progress thread."""
        if self._waiters:
            return PARKED
        # First, so that what is added from here on ends the pause.
        self._dozes = True
        self._dozes = self._is_idle and not (self._fresh or self._held_back)
        return self._pace.background(self._quiet(), self._dozes)

    def _quiet(self, since: float = 0.0) -> float:
        """Seconds in which nothing has been completed, of those ``since`` a moment."""
        return time.perf_counter() - max(self._last_news, since)

    def _poll(self, patient: bool = False) -> bool:
        """Complete what can be completed, then run the handlers of what has come.

        Returns False if another thread is at it, which is left to do so, unless ``patient``.
        """
        free = self._polling.acquire(blocking=patient)
        if free:
            try:
                self._complete_all()
            finally:
                self._polling.release()
        if self._untold:
            self._tell_failures()
        for inbox in self._inboxes:
            if inbox.posted and inbox.posted[0].done:
                self._dispatch(inbox)
        if any(request.done for request, _ in self._when_done):
            self._tell_ends()
        for look in self._looks:
            look()
        return free

    def _complete_all(self) -> None:
        if self._closed:
            return
        if self._held_back:
            self._release_held_back()
        self._take_fresh()
        if self.survives:
            self._complete_each()
            self._look_for_failures()
        else:
            self._complete_some()
        self._is_idle = self._pending.is_idle

    def _take_fresh(self) -> None:
        status = MPI.Status()
        # Others may be added meanwhile: they are the next poll's, or this one would not end.
        for _ in range(len(self._fresh)):
            request = self._fresh.popleft()
            if request.peer in self._failed and not request.done:
                self._fail(request, request.peer)
            elif request.receives:
                self._post_receive(request)
                self._complete_announced(request, status)
            if not request.done:
                self._pending.add(request)

    def _complete_some(self) -> None:
        pending, statuses = self._pending, self._statuses
        while firsts := pending.firsts():
            while len(statuses) < len(firsts):
                statuses.append(MPI.Status())
            indices = MPI.Request.Testsome(pending.handles(), statuses)
            if not indices:
                return
            for index, status in sorted(zip(indices, statuses, strict=False), key=_first):
                self._complete(firsts[index], status)
            pending.drop_ended()  # who stood behind them may have ended too

    def _complete_each(self) -> None:
        """The same one by one: of an error in several MPI does not say whose it is."""
        status, before = MPI.Status(), -1
        while before != self._completions:
            before = self._completions
            for request in self._pending.firsts():
                self._complete_if_done(request, status)
            self._pending.drop_ended()

    def _complete_announced(self, request: MpiRequest, status: MPI.Status) -> None:
        """A message that had been announced is there now: it need not wait for other receives.

        Except for those before it that the same sender fills: they may have ended unseen.
        """
        if not self._has_ended(request, status):
            return
        if earlier := self._pending.before(request):
            for each in earlier:
                self._complete_if_done(each, MPI.Status())
            self._pending.drop_ended()
        self._complete(request, status)

    def _complete_if_done(self, request: MpiRequest, status: MPI.Status) -> None:
        if self._has_ended(request, status):
            self._complete(request, status)

    def _has_ended(self, request: MpiRequest, status: MPI.Status) -> bool:
        """Whether MPI has just ended it; its end by a death is seen to here."""
        if request.done:
            return False
        if request.broken is not None:
            error, since = request.broken
            if time.perf_counter() - since > NAMED_WITHIN:
                raise error
            return False
        try:
            return bool(request.handle.Test(status))
        except MPI.Exception as error:
            self._meet_failure(request, error)
            return False

    def _complete(self, request: MpiRequest, status: MPI.Status) -> None:
        if request.receives:
            request.source = status.Get_source()
            request.nbytes = status.Get_count(MPI.BYTE)
            if request.tag not in self._exempt:
                self.traffic.bytes_received += request.nbytes
                self.traffic.messages_received += 1
        request.order = self._completions
        self._completions += 1
        request.done = True
        self._last_news = time.perf_counter()
        if self._waiters:
            self._news.set()

    def _release_held_back(self) -> None:
        for (dest, tag), queue in list(self._held_back.items()):
            while queue and (queue[0][1] is None or queue[0][1].query()):
                self._send(queue.popleft()[0], dest, tag)
            if not queue:
                del self._held_back[dest, tag]

    # -- ranks that die ---------------------------------------------------------
    def _look_for_failures(self) -> None:
        """Learn of deaths that no operation of this rank has met."""
        now = time.perf_counter()
        if now < self._look_again:
            return
        self._look_again = now + LOOK_FOR_FAILURES
        for rank in sorted(deaths.dead(self._messages) - self._failed):
            self._learn(rank)

    def _meet_failure(self, request: MpiRequest, error: MPI.Exception) -> None:
        """End ``request``, of which MPI says that a rank has died. Raises any other error."""
        if not self.survives or error.Get_error_class() not in FAILURES:
            raise error
        if request.peer != ANY_SOURCE:
            self._fail(request, request.peer)
            return
        self._look_again = 0.0
        self._look_for_failures()  # this ends every collective
        if not request.done:
            request.broken = error, time.perf_counter()  # a later look will end it

    def _learn(self, dead: int) -> None:
        """End what needs the rank ``dead``; collectives need every rank."""
        self._failed |= {dead}
        self._untold.append(dead)
        self._end_what_needs(dead)

    def _end_what_needs(self, dead: int) -> None:
        for request in self._pending:
            if not request.done and (request.peer == dead or request.is_collective):
                self._fail(request, dead)
        self._pending.drop_all_ended()
        for key in [key for key in self._held_back if key[0] == dead]:
            for request, _ in self._held_back.pop(key):
                self._fail(request, dead)

    def _fail(self, request: MpiRequest, dead: int) -> None:
        """End a request; MPI may hold on to its buffer, so it is kept."""
        if request.handle != MPI.REQUEST_NULL:
            self._abandoned.append(request)
        request.failed = dead
        request.order = self._completions
        self._completions += 1
        request.done = True
        self._news.set()

    def _tell_failures(self) -> None:
        with self._handling:
            while self._untold:
                dead = self._untold.popleft()
                self._inboxes = [inbox for inbox in self._inboxes if inbox.source != dead]
                for action in self._on_failure:
                    action(dead)

    def on_failure(self, action: Callable[[int], None]) -> None:
        self._on_failure.append(action)

    @property
    def failed(self) -> frozenset[int]:
        return self._failed

    @property
    def excluded(self) -> frozenset[int]:
        return self._left_out

    def exclude(self, rank: int) -> None:
        with self._polling:
            if rank in self._failed:
                return
            self._left_out |= {rank}
            self._failed |= {rank}
            self._untold.append(rank)
        # First, so that who cannot go on without the rank says so, and no request that ends.
        self._tell_failures()
        with self._polling:
            self._end_what_needs(rank)

    # -- messages that interrupt --------------------------------------------
    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        # A receive from any rank ends with an error at every death: so one for each rank.
        sources, depth = ([ANY_SOURCE], HANDLER_DEPTH)
        if self.survives:
            sources, depth = self.living, 1
        for source in sources:
            inbox = _Inbox(source, tag, handler)
            for _ in range(depth):
                self._post(inbox, torch.empty(nbytes, dtype=torch.uint8))
            self._inboxes.append(inbox)

    def _post(self, inbox: _Inbox, buffer: Tensor) -> None:
        request = self.irecv(buffer, inbox.source, inbox.tag)
        assert isinstance(request, MpiRequest)
        inbox.posted.append(request)

    def _dispatch(self, inbox: _Inbox) -> None:
        with self._handling:
            while inbox.posted and inbox.posted[0].done:
                request = inbox.posted.popleft()
                assert request.buffer is not None
                if request.failed is not None:
                    continue  # no more of these will come
                try:
                    inbox.handler(request.source, request.buffer[: request.nbytes])
                finally:
                    self._post(inbox, request.buffer)

    def watch(self, look: Callable[[], None]) -> None:
        self._looks = [*self._looks, look]  # anew: another thread may be going through it

    def unwatch(self, look: Callable[[], None]) -> None:
        self._looks = [each for each in self._looks if each != look]

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with self._handling:
            yield

    # -- collectives ----------------------------------------------------------
    def _collective(
        self, name: str, volume: int, *arguments: object, kept: Tensor | None = None
    ) -> Request:
        """Start a collective; ``volume`` is what it is taken to send.

        ``kept`` lives until it is done: mpi4py itself does not keep what is sent.
        """
        self.traffic.bytes_sent += volume
        request = MpiRequest(name, kept, receives=False)
        if self._failed:
            self._fail(request, min(self._failed))
            return request
        with self._posting:
            request.handle = getattr(self._collectives, name)(*arguments)
        self._add_fresh(request)
        return request

    def ibarrier(self) -> Request:
        return self._collective("Ibarrier", 0)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        volume = broadcast_bytes(buffer.nbytes, self.size)
        return self._collective("Ibcast", volume, _bytes(buffer), root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        if buffer.dtype not in REDUCIBLE:
            raise TypeError(
                f"iallreduce adds {', '.join(map(str, REDUCIBLE))}, not {buffer.dtype}, "
                "which MPI does not add rightly: convert it first"
            )
        if total is None:
            # Not in place: Open MPI then takes a tree, which moves whole buffers and took twice
            # as long with 8 ranks on 4 hosts. A copy costs a hundredth of that.
            buffer, total = buffer.detach().clone(), buffer
        kind = REDUCIBLE[buffer.dtype]
        volume = allreduce_bytes(buffer.nbytes, self.size)
        arguments = ([buffer.detach().numpy(), kind], [total.detach().numpy(), kind])
        return self._collective("Iallreduce", volume, *arguments, kept=buffer)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        volume = allgather_bytes(buffer.nbytes, self.size)
        arguments = (_bytes(buffer), _bytes(gathered))
        return self._collective("Iallgather", volume, *arguments, kept=buffer)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        volume = alltoall_bytes(buffer.nbytes, self.size)
        arguments = (_bytes(buffer), _bytes(received))
        return self._collective("Ialltoall", volume, *arguments, kept=buffer)

    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        with self._handling:
            # Anew: another thread may be going through it.
            self._when_done = [*self._when_done, (request, action)]

    def _tell_ends(self) -> None:
        with self._handling:
            ended = [each for each in self._when_done if each[0].done]
            self._when_done = [each for each in self._when_done if each not in ended]
            for _, action in ended:
                action()

    # -- end ------------------------------------------------------------------
    def close(self, status: int = 0) -> None:
        if self._closed:
            return
        self._stopping = True
        if self._progress_thread is not None:
            self._progress_thread.join()
        self._take_fresh()
        self.wait_ended([request for request in self._pending if not request.receives])
        for request in self._pending:
            self.cancel(request)
        self._closed = True
        self._take_leave(status)
        if self._held_back:
            raise TransportError("closed while sends waited for their event")

    def _take_leave(self, status: int) -> None:
        """Leave together, rank 0 last: nobody may go to whom another still sends."""
        if self.rank:
            deaths.take_leave(self._collectives, self.timeout)
            return
        others = self.living[1:]
        deaths.give_leave(self._collectives, others)
        if not self.survives:
            return
        deaths.wait_gone(self._collectives)
        hanging = {rank: self.host_name(rank) for rank in self._left_out}
        if hanging:
            end = partial(deaths.end_those_left, self._messages, hanging, others, status)
            guard.before_leaving(end)


def _set_up() -> tuple[MPI.Intracomm, MPI.Intracomm, list[str], int]:
    """Communicators for messages and for collectives, all ranks' hosts, this host's cores.

    Raises as the transport itself.
    """
    cores, problem = 0, None
    try:
        cores = cores_of_host()
    except UserError as error:
        problem = str(error)
    try:
        messages, collectives = MPI.COMM_WORLD.Dup(), MPI.COMM_WORLD.Dup()
        told = messages.allgather((MPI.Get_processor_name(), problem))
        wrong = next(((host, each) for host, each in told if each is not None), None)
        if wrong is not None:
            host, problem = wrong
            one_says = UserError(f"host {host}: {problem}", agreed=True)
            raise one_says if messages.rank == 0 else RefusedError
        return messages, collectives, [host for host, _ in told], cores
    except MPI.Exception as error:
        if error.Get_error_class() not in FAILURES:
            raise
        dead = min(deaths.dead(MPI.COMM_WORLD), default=-1)
        raise PeerFailedError(dead, "not known yet") from error


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
