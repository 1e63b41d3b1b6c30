"""The MPI engine, in real time.

:mod:`.progress` contains the threading protocol, :mod:`.requests` the life cycle of requests,
:mod:`.world` failure detection and the end of the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any, NamedTuple

from aladdin_mpi.process import guard, startup
from aladdin_mpi.transport.mpi import world  # before MPI, whose start and end it configures

# isort: split
from mpi4py import MPI  # before torch: Cray MPICH fails in the opposite order

# isort: split
import torch
from torch import Tensor

from aladdin_mpi.errors import (
    PeerFailedError,
    RefusedError,
    TransportError,
    UserError,
    WaitTimeoutError,
)
from aladdin_mpi.process.identity import ProcessIdentity
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import (
    ANY_SOURCE,
    Event,
    Handler,
    PollHooks,
    Request,
    Sendable,
    SideChannel,
    Traffic,
    Transport,
    as_tensor,
    first_done,
    reading_numbers,
    surviving_ranks,
    wait_ended,
)
from aladdin_mpi.transport.mpi.progress import (
    HANDLER_DEPTH,
    Handlers,
    PollBackoff,
    Polling,
    cores_of_host,
)
from aladdin_mpi.transport.mpi.requests import MpiRequest, Requests, Signals, check_buffer, in_bytes
from aladdin_mpi.transport.mpi.side_channel import MpiSideChannel
from aladdin_mpi.transport.mpi.world import HangingRanks, MpiFailures

DATATYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int64: MPI.INT64_T,
}
"""MPI datatypes of :data:`collectives.REDUCIBLE`."""


class MpiTransport(Transport):
    """The ranks of ``MPI_COMM_WORLD``, on separate communicators.

    Args:
        timeout: longest wait for another rank in seconds; None: no limit.
        progress: run the progress thread. Without it messages do not progress while a rank
            computes; the benchmarks show the difference.

    Raises:
        UserError: on rank 0, if a host's number of cores is invalid; RefusedError on the others.
        PeerFailedError: a rank has failed already.
    """

    engine = "mpi"
    models_time = shares_process = False
    needs_memory = has_collectives = True
    simulation = None
    meets = False

    def __init__(self, timeout: float | None = None, progress: bool = True) -> None:
        self.rank = MPI.COMM_WORLD.Get_rank()
        self.size = MPI.COMM_WORLD.Get_size()
        self.traffic = Traffic()
        self.timeout = timeout
        startup.expect(startup.RANKS_MEET, timeout, startup.MEETING_LEAST)
        self._messages, self._collectives, self._control, names, processes, cores = _set_up()
        startup.end()
        numbers = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.hosts = [numbers[name] for name in names]
        self.host = self.hosts[self.rank]
        self.host_names = names
        self.original_ranks = range(self.size)
        self._start = time.perf_counter()
        threads = MPI.Query_thread()
        self.progresses = progress and threads >= MPI.THREAD_SERIALIZED
        pace = PollBackoff(self.hosts.count(self.host), cores)
        self._signals = Signals()
        self._failures = MpiFailures()
        self._hanging = HangingRanks(self._failures, names, processes)
        if self.survives:  # otherwise Open MPI ends stopped ranks
            guard.before_ending(self._hanging.kill_with_stopped)
        self._requests = Requests(
            self._messages, self._collectives, self.traffic, self._failures, self._signals
        )
        self._handlers = Handlers(self._receive)
        self.poll_hooks: PollHooks | None = self._handlers
        self._polling = Polling(self._requests, self._handlers, self._failures, self._signals, pace)
        free = threads >= MPI.THREAD_MULTIPLE
        self._posting: AbstractContextManager[Any] = nullcontext() if free else self._polling.lock
        self.side_channel: SideChannel | None = None
        if self.survives:
            lock = Lock() if free else self._polling.lock
            self.side_channel = MpiSideChannel(self._control, lock, self._readmit)
        if self.progresses:
            self._polling.start()

    # -- time ---------------------------------------------------------------
    def now(self) -> float:
        return time.perf_counter() - self._start

    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        time.sleep(seconds if until is None else max(0.0, until - self.now()))

    # -- point to point -----------------------------------------------------
    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        buffer = as_tensor(buffer)
        name = f"send to rank {dest}, tag {tag}"
        request = MpiRequest(name, buffer, receives=False, peer=dest, tag=tag)
        if tag not in self._requests.untracked:
            self.traffic.bytes_sent += buffer.nbytes
            self.traffic.messages_sent += 1
        if after is None and not self._requests.holds_back:
            with self._posting:
                self._requests.send(request)
        else:
            with self._polling.lock:
                self._requests.send_after(request, after)
        return request

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return self._receive(buffer, source, tag)

    def _receive(self, buffer: Tensor, source: int, tag: int) -> MpiRequest:
        check_buffer(buffer)
        sender = "any rank" if source == ANY_SOURCE else f"rank {source}"
        name = f"receive from {sender}, tag {tag}"
        request = MpiRequest(name, buffer, receives=True, peer=source, tag=tag)
        request.source = source
        # Posted by the next poll: inside Irecv, MPI copies a message that has been announced,
        # which must not delay this thread.
        self._requests.begin(request)
        return request

    def test(self, request: Request) -> bool:
        if not request.done:
            # Wait for another polling thread, so that everything that has ended is seen.
            self._polling.poll(patient=True)
        if request.failed is not None:
            raise PeerFailedError(request.failed, self.host_names[request.failed])
        return request.done

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        first = first_done(requests)
        if first < 0:
            start = time.perf_counter()
            limit = self.timeout if timeout is None else timeout
            first = self._polling.wait_until(lambda: first_done(requests), start, limit)
            if first < 0 and timeout is None:
                raise WaitTimeoutError(
                    f"rank {self.rank} waited {limit:g} s for {_summary(requests)}: that rank "
                    "hangs, has failed, or is slower than --timeout allows "
                    "(docs/troubleshooting.md)"
                )
            self.traffic.waiting += time.perf_counter() - start
        if first >= 0 and requests[first].failed is not None:
            self.test(requests[first])
        return first

    def cancel(self, request: Request) -> None:
        assert isinstance(request, MpiRequest)
        with self._polling.lock:
            self._requests.cancel(request)

    def abandon(self, target: Request | range) -> None:
        if isinstance(target, range):
            with self._handlers.lock:
                self._handlers.drop_tags(target)
                with self._polling.lock:
                    self._requests.abandon_tags(target)
            return
        assert isinstance(target, MpiRequest)
        with self._polling.lock:
            self._requests.abandon(target)

    def exclude_from_traffic(self, *tags: int) -> None:
        self._requests.untracked |= set(tags)

    # -- failed ranks -------------------------------------------------------
    @property
    def survives(self) -> bool:  # type: ignore[override]
        return self._failures.survives

    @property
    def failed(self) -> frozenset[int]:
        return self._failures.failed

    @property
    def excluded(self) -> frozenset[int]:
        return self._failures.excluded

    def on_failure(self, action: Callable[[int], None]) -> None:
        self._failures.actions.append(action)

    def exclude(self, rank: int) -> None:
        with self._polling.lock:
            if rank in self._failures.failed:
                return
            self._failures.excluded |= {rank}
            self._failures.add(rank)
        # First, so that a group that needs the rank reports its failure before requests end.
        self._polling.report_failures()
        with self._polling.lock:
            self._requests.end_what_needs(rank)

    def _readmit(self, rank: int) -> None:
        with self._polling.lock:
            self._failures.readmit(rank)
        if rank not in self.failed:
            with self._handlers.lock:
                self._handlers.resume_source(rank)

    def is_revoked(self, without: int | None = None) -> bool:
        return False

    # -- message handlers ---------------------------------------------------
    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        # A receive from any rank ends with an error at every failure, so post one for each rank.
        sources, depth = [ANY_SOURCE], HANDLER_DEPTH
        if self.survives:
            sources, depth = surviving_ranks(self), 1
        handle = reading_numbers(handler) if as_numbers else handler
        self._handlers.add(sources, depth, tag, nbytes, handle)
        for rank in self.excluded:
            self._handlers.add_excluded(rank, tag, nbytes, handle)

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        self._handlers.when_done(operation, action)
        if not isinstance(operation, Request):
            self._signals.notify_posted()

    def atomic(self) -> AbstractContextManager[Any]:
        return self._handlers.lock

    # -- collectives ----------------------------------------------------------
    def _collective(
        self, name: str, volume: int, *arguments: object, kept: Tensor | None = None
    ) -> Request:
        """Start a collective; ``volume`` is its estimated number of bytes sent.

        ``kept`` is referenced until it is done, since mpi4py does not keep the send buffer.
        """
        self.traffic.bytes_sent += volume
        request = MpiRequest(name, kept, receives=False)
        if self.failed:
            self._requests.fail(request, min(self.failed))
            return request
        with self._posting:
            request.handle = getattr(self._collectives, name)(*arguments)
        self._requests.begin(request)
        return request

    def ibarrier(self) -> Request:
        return self._collective("Ibarrier", 0)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        volume = collectives.partial_bytes(buffer.nbytes, self.size)
        return self._collective("Ibcast", volume, in_bytes(buffer), root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        collectives.check_reducible(buffer)
        if total is None:
            # Not in place: Open MPI then uses a tree, which moves whole buffers and took twice as
            # long with 8 ranks on 4 hosts. A copy costs a hundredth of that.
            buffer, total = buffer.detach().clone(), buffer
        kind = DATATYPES[buffer.dtype]
        volume = collectives.allreduce_bytes(buffer.nbytes, self.size)
        arguments = ([buffer.detach().numpy(), kind], [total.detach().numpy(), kind])
        return self._collective("Iallreduce", volume, *arguments, kept=buffer)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        volume = collectives.allgather_bytes(buffer.nbytes, self.size)
        arguments = (in_bytes(buffer), in_bytes(gathered))
        return self._collective("Iallgather", volume, *arguments, kept=buffer)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        volume = collectives.partial_bytes(buffer.nbytes, self.size)
        arguments = (in_bytes(buffer), in_bytes(received))
        return self._collective("Ialltoall", volume, *arguments, kept=buffer)

    # -- end ------------------------------------------------------------------
    def close(self, status: int = 0) -> None:
        if self._polling.closed:
            return
        self._polling.stop()
        self._requests.take_fresh()
        wait_ended(self, self._requests.unfinished(receives=False))
        for request in self._requests.unfinished(receives=True):
            self.cancel(request)
        self._polling.closed = True
        self._take_leave(status)
        if self._requests.holds_back:
            raise TransportError("closed while sends waited for their event")

    def _take_leave(self, status: int) -> None:
        """Leave together, the first rank last, so that no rank leaves while others send to it."""
        last, *others = surviving_ranks(self)
        if self.rank != last:
            if self.survives:
                world.announce_exit(self._control, last, self._hanging)
            world.take_leave(self._control, last, self.timeout)
            return
        world.give_leave(self._control, others)
        if self.survives:
            world.leave_last(self._control, self._hanging, others, status)


class _Setup(NamedTuple):
    """Three communicators; every rank's host and process, and the cores of this rank's host.

    ``control`` is for exits and for excluded ranks.
    """

    messages: MPI.Intracomm
    collectives: MPI.Intracomm
    control: MPI.Intracomm
    hosts: list[str]
    processes: list[ProcessIdentity | None]
    cores: int


def _set_up() -> _Setup:
    """Set up communication; raises the errors of the transport's constructor."""
    cores, problem = 0, None
    try:
        cores = cores_of_host()
    except UserError as error:
        problem = str(error)
    with world.as_failures():
        messages, collectives, control = (MPI.COMM_WORLD.Dup() for _ in range(3))
        own = (MPI.Get_processor_name(), ProcessIdentity.own(), problem)
        hosts, processes, problems = zip(*messages.allgather(own), strict=True)
    first_problem = next(filter(None, problems), None)
    if first_problem is not None:
        host = hosts[problems.index(first_problem)]
        refused = UserError(f"host {host}: {first_problem}", agreed=True)
        raise refused if messages.rank == 0 else RefusedError
    return _Setup(messages, collectives, control, list(hosts), list(processes), cores)


def _summary(requests: Sequence[Request]) -> str:
    shown = "; ".join(request.what for request in requests[:4])
    return shown + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")
