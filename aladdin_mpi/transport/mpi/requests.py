"""Requests of the MPI engine, from start to end."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from contextlib import suppress
from operator import itemgetter

from aladdin_mpi.transport.mpi import world  # before MPI, whose start and end it configures

# isort: split
from mpi4py import MPI  # before torch: Cray MPICH fails in the opposite order

# isort: split
from torch import Tensor

from aladdin_mpi.errors import TransportError
from aladdin_mpi.transport.base import ANY_SOURCE, Event, Request, Traffic, as_bytes
from aladdin_mpi.transport.mpi.world import MpiFailures

NAMED_WITHIN = 10.0
"""Longest time from an operation's end by a failure to MPI's naming of the failed rank."""


class Signals:
    """Synchronisation of the progress thread, waiting threads, and threads that post operations.

    Attributes:
        waiters: number of threads that wait for a request.
        news: an operation has ended; wakes a thread that waits while another one polls.
        takes_over: wakes the progress thread: a waiting thread has stopped polling, or an
            operation has been posted.
        polls_rarely: the progress thread polls rarely.
    """

    def __init__(self) -> None:
        self.waiters = 0
        self.news = threading.Event()
        self.takes_over = threading.Event()
        self.polls_rarely = False

    def notify_posted(self) -> None:
        """Wake the progress thread, as an operation has been posted."""
        if self.polls_rarely:
            self.takes_over.set()


def check_buffer(buffer: Tensor) -> None:
    """Raise a TransportError if a buffer is not contiguous or not in CPU memory."""
    if not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise TransportError(
            f"MPI sends contiguous CPU tensors; got shape {tuple(buffer.shape)} with strides "
            f"{buffer.stride()} on {buffer.device}"
        )


def in_bytes(buffer: Tensor) -> list[object]:
    """Return the memory of ``buffer`` in MPI's form, as bytes."""
    check_buffer(buffer)
    return [as_bytes(buffer).numpy(), MPI.BYTE]


CANCEL_SECONDS = 1.0
"""Longest wait for the end of a receive that is cancelled: its sender may hang in the middle of a
message, which MPI then does not cancel."""
SMALL = 1 << 16
"""Largest message that arrives within a poll or two, so that polls may be rare."""


class MpiRequest(Request):
    """A message or a collective in progress.

    Args:
        what: short description for messages to the user.
        buffer: kept as long as the request.
        receives: whether it is a receive.
        peer: the other rank; ``ANY_SOURCE``: unknown, or all of them.
        tag: below 0 for collectives.
    """

    __slots__ = ("handle", "is_collective", "line", "peer", "receives", "tag")

    def __init__(
        self,
        what: str,
        buffer: Tensor | None,
        receives: bool,
        peer: int = ANY_SOURCE,
        tag: int = -1,
    ) -> None:
        super().__init__(what, buffer)
        self.receives = receives
        self.peer = peer
        self.tag = tag
        self.handle: MPI.Request = MPI.REQUEST_NULL
        self.is_collective = tag < 0 and not receives
        self.line: Hashable = id(self) if self.is_collective else (receives, peer, tag)
        """Key of the requests that MPI matches in order."""


def _cancel(request: MpiRequest) -> None:
    """Cancel a receive, unless a message has matched it."""
    if request.receives:
        with suppress(MPI.Exception):
            request.handle.Cancel()


def _ends_within(seconds: float, handle: MPI.Request, status: MPI.Status) -> bool:
    end = time.perf_counter() + seconds
    while not handle.Test(status):
        if time.perf_counter() > end:
            return False
    return True


class PendingRequests:
    """Requests in lines, each in the order of posting."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, deque[MpiRequest]] = {}
        self._firsts: list[MpiRequest] = []
        self._handles: list[MPI.Request] = []
        self._stale = False
        self._is_idle = True

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[MpiRequest]:
        """Iterate over a copy of all requests, line by line."""
        return iter([request for line in self._lines.values() for request in line])

    def add(self, request: MpiRequest) -> None:
        """Add a request posted to MPI at the end of its line."""
        line = self._lines.setdefault(request.line, deque())
        line.append(request)
        self._stale |= len(line) == 1

    def remove(self, request: MpiRequest) -> None:
        """Remove a request at any place in its line."""
        self._lines[request.line].remove(request)
        self._tidy(request.line)

    def before(self, request: MpiRequest) -> list[MpiRequest]:
        """Return the requests in the line of ``request``, before it is added."""
        return list(self._lines.get(request.line, ()))

    def firsts(self) -> list[MpiRequest]:
        """Return the first request of each line."""
        self._refresh()
        return self._firsts

    def handles(self) -> list[MPI.Request]:
        """Return MPI's handles of :meth:`firsts`."""
        self._refresh()
        return self._handles

    @property
    def is_idle(self) -> bool:
        """Whether no data are in flight: all requests are receives of small messages."""
        self._refresh()
        return self._is_idle

    def drop_ended(self) -> None:
        """Remove requests that have ended from the heads of their lines."""
        for name, line in list(self._lines.items()):
            if line[0].done:
                while line and line[0].done:
                    line.popleft()
                self._tidy(name)

    def drop_all_ended(self) -> None:
        """Remove all requests that have ended, at any place."""
        for request in self:
            if request.done:
                self.remove(request)

    def _tidy(self, name: Hashable) -> None:
        if not self._lines[name]:
            del self._lines[name]
        self._stale = True

    def _refresh(self) -> None:
        if self._stale:
            self._firsts = [line[0] for line in self._lines.values()]
            self._handles = [request.handle for request in self._firsts]
            self._is_idle = all(
                request.receives and request.buffer is not None and request.buffer.nbytes <= SMALL
                for request in self._firsts
            )
            self._stale = False


class Requests:
    """All requests of a rank, from start to end.

    All methods run under the polling lock, except :meth:`send` and :meth:`begin`: the next poll
    takes what they add to ``_fresh``.

    Attributes:
        completions: number of requests that have ended.
        last_news: time of the last completion.
        is_idle: no data were in flight at the last poll.
    """

    def __init__(
        self,
        messages: MPI.Intracomm,
        collectives: MPI.Intracomm,
        traffic: Traffic,
        failures: MpiFailures,
        signals: Signals,
    ) -> None:
        self.completions = 0
        self.last_news = 0.0
        self.is_idle = True
        self.untracked: frozenset[int] = frozenset()
        self._messages = messages
        self._collectives = collectives
        self._traffic = traffic
        self._failures = failures
        self._signals = signals
        self._fresh: deque[MpiRequest] = deque()
        self._pending = PendingRequests()
        self._statuses: list[MPI.Status] = []
        self._held_back: dict[tuple[int, int], deque[tuple[MpiRequest, Event | None]]] = {}
        self._abandoned: list[MpiRequest] = []
        self._broken: dict[MpiRequest, tuple[MPI.Exception, float]] = {}
        """Error and end of requests that ended by a failure of a rank that MPI has not named."""

    # -- start ----------------------------------------------------------------
    @property
    def holds_back(self) -> bool:
        """Whether sends wait for an event, or for an earlier send that does."""
        return bool(self._held_back)

    @property
    def is_quiet(self) -> bool:
        """Whether no data are in flight and nothing is queued."""
        return self.is_idle and not (self._fresh or self._held_back)

    def begin(self, request: MpiRequest) -> None:
        """Queue a request for the next poll."""
        self._fresh.append(request)
        self._signals.notify_posted()

    def send(self, request: MpiRequest) -> None:
        """Send at once, without the polling lock."""
        assert request.buffer is not None
        if self._failures.is_lost(request.peer):
            self.fail(request, request.peer)
        elif request.peer not in self._failures.failed:
            try:
                buffer = in_bytes(request.buffer)
                request.handle = self._messages.Isend(buffer, request.peer, request.tag)
            except MPI.Exception as error:
                self._meet_failure(request, error)
        self.begin(request)

    def send_after(self, request: MpiRequest, after: Event | None) -> None:
        """Send after the event ``after`` and after all earlier sends with this tag to the peer."""
        line = request.peer, request.tag
        if self._held_back.get(line) or (after is not None and not after.query()):
            self._held_back.setdefault(line, deque()).append((request, after))
            self._signals.notify_posted()
        else:
            self.send(request)

    def _release_held_back(self) -> None:
        for line, queue in list(self._held_back.items()):
            while queue and (queue[0][1] is None or queue[0][1].query()):
                self.send(queue.popleft()[0])
            if not queue:
                del self._held_back[line]

    def take_fresh(self) -> None:
        """Take queued requests, and post receives."""
        status = MPI.Status()
        # Requests added at the same time are left to the next poll, or this one might not end.
        for _ in range(len(self._fresh)):
            request = self._fresh.popleft()
            if not request.done and (lost := self._lost_rank(request)) is not None:
                self.fail(request, lost)
            elif request.receives:
                self._post_receive(request)
                self._complete_announced(request, status)
            if not request.done:
                self._pending.add(request)

    def _post_receive(self, request: MpiRequest) -> None:
        assert request.buffer is not None
        source = MPI.ANY_SOURCE if request.source == ANY_SOURCE else request.source
        try:
            request.handle = self._messages.Irecv(in_bytes(request.buffer), source, request.tag)
        except MPI.Exception as error:
            self._meet_failure(request, error)

    # -- end ------------------------------------------------------------------
    def complete(self) -> None:
        """Complete all operations that have finished."""
        if self._held_back:
            self._release_held_back()
        self.take_fresh()
        if not self._failures.survives:
            self._complete_some()
        else:
            self._complete_any()
            self._look_for_failures()
            self._check_named()
        self.is_idle = self._pending.is_idle

    def _complete_some(self) -> None:
        pending, statuses = self._pending, self._statuses
        while firsts := pending.firsts():
            while len(statuses) < len(firsts):
                statuses.append(MPI.Status())
            indices = MPI.Request.Testsome(pending.handles(), statuses)
            if not indices:
                return
            for index, status in sorted(zip(indices, statuses, strict=False), key=itemgetter(0)):
                self._complete(firsts[index], status)
            pending.drop_ended()  # later requests of their lines may have ended too

    def _complete_any(self) -> None:
        """Complete finished requests with ULFM, where MPI does not name the request of an error.

        They are tested together, as every test makes progress, which may yield the core. Only one
        ends in a test without an error.
        """
        pending, status = self._pending, MPI.Status()
        while firsts := pending.firsts():
            try:
                index, has_ended = MPI.Request.Testany(pending.handles(), status)
            except MPI.Exception as error:
                if not self._meet_failure_of_any(firsts, error):
                    return
                continue
            if not has_ended or index == MPI.UNDEFINED:
                return
            self._complete(firsts[index], status)
            pending.drop_ended()

    def _meet_failure_of_any(self, firsts: list[MpiRequest], error: MPI.Exception) -> bool:
        """Handle a failure; return whether it has ended requests, or is left to a later poll."""
        ended = [
            r
            for r in firsts
            if not r.done and r not in self._broken and r.handle == MPI.REQUEST_NULL
        ]
        for request in ended:
            self._meet_failure(request, error)
        if not ended and error.Get_error_class() not in world.FAILURES:
            raise error
        self._pending.drop_all_ended()
        return bool(ended)

    def _complete_announced(self, request: MpiRequest, status: MPI.Status) -> None:
        """Complete a receive whose message had been announced, without waiting for a poll.

        Earlier receives from the same sender, which may have ended unnoticed, are completed first.
        """
        if self._has_ended(request, status):
            if earlier := self._pending.before(request):
                for each in earlier:
                    self._complete_if_done(each, MPI.Status())
                self._pending.drop_ended()
            self._complete(request, status)

    def _complete_if_done(self, request: MpiRequest, status: MPI.Status) -> None:
        if self._has_ended(request, status):
            self._complete(request, status)

    def _has_ended(self, request: MpiRequest, status: MPI.Status) -> bool:
        """Return whether MPI has just ended a request; also handles an end by a failure."""
        if request.done or request in self._broken:
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
            if request.tag not in self.untracked:
                self._traffic.bytes_received += request.nbytes
                self._traffic.messages_received += 1
        request.order = self.completions
        self.completions += 1
        request.done = True
        self.last_news = time.perf_counter()
        if self._signals.waiters:
            self._signals.news.set()

    def cancel(self, request: MpiRequest) -> None:
        """Cancel a receive, unless its message has arrived."""
        self.take_fresh()
        if request.done:
            return
        self._pending.remove(request)
        status = MPI.Status()
        try:
            request.handle.Cancel()
            has_ended = _ends_within(CANCEL_SECONDS, request.handle, status)
        except MPI.Exception as error:
            self._meet_failure(request, error)
            return
        if not has_ended:
            self._abandoned.append(request)
        elif not status.Is_cancelled():
            self._complete(request, status)
        request.done = True

    def abandon(self, request: MpiRequest) -> None:
        """Stop polling for a request; keep its buffer, which MPI may still use."""
        self.take_fresh()
        if request.done:
            return
        if request.handle != MPI.REQUEST_NULL:
            self._pending.remove(request)
            self._abandoned.append(request)
        elif not self._drop_held_back(request):
            return
        request.done = True
        self._signals.news.set()

    def _drop_held_back(self, request: MpiRequest) -> bool:
        """Drop a send that waits for its event; return whether ``request`` was one."""
        line = request.peer, request.tag
        queue = self._held_back.pop(line, deque())
        remaining = deque(each for each in queue if each[0] is not request)
        if remaining:
            self._held_back[line] = remaining
        return len(remaining) < len(queue)

    def _release_abandoned(self) -> None:
        """Release the buffers that MPI does not use any more."""
        for request in self._abandoned:
            _cancel(request)
        self._abandoned = [each for each in self._abandoned if not world.has_ended(each.handle)]

    def abandon_tags(self, tags: range) -> None:
        """Abandon all requests with these tags, and collectives, as their group has ended.

        Their receives stay posted until the next call, for messages that are under way.
        """
        self.take_fresh()
        self._release_abandoned()
        for line in [line for line in self._held_back if line[1] in tags]:
            for request, _ in self._held_back.pop(line):
                request.done = True
        for request in self._pending:
            if (request.tag in tags or request.is_collective) and not request.done:
                self.abandon(request)
        for request in self._broken:
            request.done = True
        self._pending.drop_all_ended()

    def unfinished(self, receives: bool) -> list[MpiRequest]:
        """Return the receives, or all other requests, that have not ended."""
        return [request for request in self._pending if request.receives == receives]

    # -- end by a failure -------------------------------------------------------
    def _look_for_failures(self, at_once: bool = False) -> None:
        for rank in self._failures.new_failures(at_once):
            self._failures.add(rank)
            self.end_what_needs(rank)

    def _meet_failure(self, request: MpiRequest, error: MPI.Exception) -> None:
        """End ``request``, for which MPI reports a failed rank; raise any other error."""
        if not self._failures.may_be_failure(error, request.is_collective):
            raise error
        if request.peer != ANY_SOURCE:
            self.fail(request, request.peer)
            return
        self._look_for_failures(at_once=True)  # ends every collective
        if request.done:
            return
        if (lost := self._lost_rank(request)) is not None:  # which was known before it was posted
            self.fail(request, lost)
        else:
            self._broken[request] = error, time.perf_counter()  # a later query will end it

    def _lost_rank(self, request: MpiRequest) -> int | None:
        """Return a failed rank that a request needs, if any; collectives need every rank."""
        failed = self._failures.failed
        if request.is_collective:
            return min(failed, default=None)
        return request.peer if request.peer in failed else None

    def _check_named(self) -> None:
        """Raise the error of a request whose failure MPI has not explained in time."""
        self._broken = {request: end for request, end in self._broken.items() if not request.done}
        for error, since in self._broken.values():
            # Another rank stops all collectives if it excludes a rank, which may be this one.
            is_explained = error.Get_error_class() == MPI.ERR_REVOKED
            if time.perf_counter() - since > NAMED_WITHIN and not is_explained:
                raise error

    def end_what_needs(self, rank: int) -> None:
        """End all requests that need the failed ``rank``; collectives need every rank."""
        self._stop_collectives()
        for request in self._pending:
            if not request.done and (request.peer == rank or request.is_collective):
                self.fail(request, rank)
        self._pending.drop_all_ended()
        for line in [line for line in self._held_back if line[0] == rank]:
            for request, _ in self._held_back.pop(line):
                self.fail(request, rank)

    def _stop_collectives(self) -> None:
        """Stop those in progress: the others' messages must not be written into memory in use.

        An excluded rank that runs again would continue them, which has crashed surviving ranks.
        """
        if self._failures.survives and not self._collectives.Is_revoked():
            self._collectives.Revoke()

    def fail(self, request: MpiRequest, rank: int) -> None:
        """End a request by the failure of ``rank``; keep its buffer, which MPI may still use."""
        if request.handle != MPI.REQUEST_NULL:
            _cancel(request)  # an excluded rank may return, whose messages are for later receives
            self._abandoned.append(request)
        request.failed = rank
        request.order = self.completions
        self.completions += 1
        request.done = True
        self._signals.news.set()
