"""BSP, bulk synchronous parallel: the servers wait for every worker in every step.

``host_first.py`` has the links for ``--bsp-host-first``.
"""

from __future__ import annotations

from collections import deque

from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import GradientSum, ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.exchange.server_mailbox import TAKEN
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import saved
from aladdin_mpi.flat.vectors import copy, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import BSP, BspOptions, own
from aladdin_mpi.transport.base import Event, Request, Transport, await_event, charge_memory
from aladdin_mpi.transport.checksums import ChecksumTransport, is_void
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


def host_groups(transport: Transport, servers: int, largest: int | None = None) -> list[list[int]]:
    """The workers' ranks, host by host; the first of each leads the others.

    Args:
        transport: knows the hosts.
        servers: their number; they are the first ranks.
        largest: workers of a group; a host with more has several. None: all of a host.
    """
    hosts: dict[int, list[int]] = {}
    for rank in range(servers, transport.size):
        hosts.setdefault(transport.hosts[rank], []).append(rank)
    return [
        ranks[start : start + (largest or len(ranks))]
        for ranks in hosts.values()
        for start in range(0, len(ranks), largest or len(ranks))
    ]


class LeadingLink(GradientLink):
    """Adds its host's gradients to its own, talks to the servers, and hands on the model."""

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        momentum: bool,
        group: list[int],
    ) -> None:
        super().__init__(worker, optimizer, wire, momentum)
        self.transport = worker.transport
        self.layout = worker.layout
        self.wire = wire.plain
        self.group = group
        self.model = wire.buffer_for(self.x)
        self.received = {rank: wire.buffer(self.layout.numel) for rank in group[1:]}
        self.awaited: deque[tuple[Bucket, list[Request]]] = deque()
        self.completed = 0

    def gradients_in(self, batch: SampleLease) -> int:
        """Workers of this host that have samples in the round."""
        first = self.layout.servers
        return sum(batch.size_of(rank - first, self.worker.count) > 0 for rank in self.group)

    def push(self, batch: SampleLease) -> Tensor:
        """Compute, and send each bucket of the host's sum as it is completed."""
        self.completed = 0
        for bucket in self.layout.buckets:
            receives = [
                self.transport.irecv(bucket.of(buffer), rank, Tag.LOCAL_GRADIENT)
                for rank, buffer in self.received.items()
            ]
            self.awaited.append((bucket, receives))
        return super().push(batch)

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send the host's sum of every bucket that has come from all, without waiting."""
        self.completed = bucket.index + 1
        last = self.completed == len(self.layout.buckets)
        while self.awaited and self.awaited[0][0].index < self.completed:
            bucket, receives = self.awaited[0]
            if last:
                self.transport.wait(*receives)
            elif not all(self.transport.test(receive) for receive in receives):
                break
            self.awaited.popleft()
            self._add(g, bucket)
            self.outbox.put(bucket)

    def _add(self, g: Tensor, bucket: Bucket) -> None:
        mine = bucket.of(g)
        charge_memory(
            self.transport, TAKEN * mine.numel() * self.wire.dtype.itemsize * len(self.received)
        )
        if not mine.is_meta:
            for buffer in self.received.values():
                theirs = bucket.of(buffer)
                if not is_void(theirs):
                    # It is received into again after the answer to the sum, which left after this.
                    there, _ = self.wire.fetch(theirs)
                    mine.add_(there)

    def pull(self) -> None:
        """Wait for the model and hand it on."""
        super().pull()
        event = self.wire.encode(self.x, self.model)
        self.transport.wait(
            *[
                self.transport.isend(bucket.of(self.model), rank, Tag.LOCAL_MODEL, after=event)
                for bucket in self.layout.buckets
                for rank in self.group[1:]
            ]
        )


class FollowingLink(GradientLink):
    """Sends its gradients to the leader of its host and gets the model from it."""

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        momentum: bool,
        group: list[int],
    ) -> None:
        super().__init__(worker, optimizer, wire, momentum)
        self.transport = worker.transport
        self.layout = worker.layout
        self.wire = wire.plain
        self.leader = group[0]
        self.sends_settings = False  # the leader does
        self.g = worker.replica.new_vector()
        self.sent = wire.buffer_for(self.g)
        # Straight into x, unless it may arrive damaged.
        checked = isinstance(self.transport, ChecksumTransport)
        self.model = wire.buffer(self.layout.numel) if checked else wire.buffer_for(self.x)
        self.requests: list[Request] = []
        self.taken: Event | None = None
        """A device reads the model until then."""

    def push(self, batch: SampleLease) -> Tensor:
        """Compute, and send each bucket to the leader as it is completed."""
        self.transport.wait(*self.requests)
        self.requests.clear()
        self.worker.gradient(self.g, self._send(self.g))
        return self.g

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send it to the leader."""
        wire = bucket.of(self.sent)
        event = self.wire.encode(bucket.of(g), wire)
        self.requests.append(
            self.transport.isend(wire, self.leader, Tag.LOCAL_GRADIENT, after=event)
        )

    def pull(self) -> None:
        """Wait for the model from the leader."""
        if self.taken is not None:
            await_event(self.transport, self.taken)
        receives = [
            self.transport.irecv(bucket.of(self.model), self.leader, Tag.LOCAL_MODEL)
            for bucket in self.layout.buckets
        ]
        self.transport.wait(*receives)
        if self.model.data_ptr() != self.x.data_ptr():
            for bucket in self.layout.buckets:
                if not is_void(bucket.of(self.model)):
                    there, self.taken = self.wire.fetch(bucket.of(self.model))
                    copy(bucket.of(self.x), there)


class BspWorker(TrainingWorker):
    """``x_i <- x~`` after every gradient; the servers answer when they have all workers'."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: BspOptions,
        momentum: bool,
    ) -> None:
        super().__init__(worker, optimizer)
        self.link = _link(worker, optimizer, wire, options, momentum)

    def run(self) -> None:
        """Push ``g_i``, wait for ``x~``, take it."""
        self.link.open()
        for batch in self.worker.batches():
            self.link.push(batch)
            self.link.pull()
        self.link.close()


def _link(
    worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: BspOptions, momentum: bool
) -> GradientLink:
    """To the servers: by oneself or with the others of one's host."""
    if options.host_first:
        groups = host_groups(worker.transport, worker.servers, options.group)
        group = next(group for group in groups if worker.transport.rank in group)
        if len(group) > 1:
            kind = LeadingLink if group[0] == worker.transport.rank else FollowingLink
            return kind(worker, optimizer, wire, momentum, group)
    return GradientLink(worker, optimizer, wire, momentum)


class BspServer(ServerAlgorithm):
    """``x~ <- x~ - lr/n (g_1 + ... + g_n)``, then an answer to all.

    In the round in which a worker fails, each bucket is updated by the mean of the gradients that
    have arrived for it: its last gradient may be complete in some buckets only. Servers update and
    send back each bucket as soon as it is complete, so one that holds the gradient of the failed
    worker cannot be taken back when the next one turns out to lack it.
    """

    def __init__(
        self,
        server: ParameterServer,
        optimizer: Optimizer,
        options: BspOptions,
        momentum: bool,
    ) -> None:
        super().__init__(server, optimizer if momentum else None)
        self.host_first = options.host_first
        self.everyone = set(range(self.n))
        if options.host_first:
            servers = server.layout.servers
            groups = host_groups(server.transport, servers, options.group)
            self.everyone = {group[0] - servers for group in groups}
        self.senders = set(self.everyone)
        largest = server.layout.largest
        self.sums = {
            bucket.index: GradientSum(bucket.numel, largest, server.values[bucket.index])
            for bucket in server.buckets
        }
        self.arrived: dict[int, set[int]] = {bucket.index: set() for bucket in server.buckets}
        self.weights = {bucket.index: 0.0 for bucket in server.buckets}
        """The sum of the arrived gradients' shares of the round."""

    def run(self) -> None:
        """Add up; the last gradient of a round completes it."""
        self.senders = set(self.everyone)
        for arrival in self.arrivals(self._ended, look=False):  # adding looks
            if not self.sums[arrival.bucket.index].add(arrival):
                self.server.tell_refused(arrival)
            self.arrived[arrival.bucket.index].add(arrival.worker)
            self.weights[arrival.bucket.index] += arrival.weight
            self._complete(arrival.bucket)
        assert not any(self.arrived.values()), "a round is half done"

    def _ended(self, worker: int) -> None:
        """Rounds are completed without a worker that has ended or failed."""
        self.senders.discard(worker)
        for bucket in self.server.buckets:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """If all have come: the step, and an answer to all who take part."""
        arrived = self.arrived[bucket.index]
        if not arrived or not self.senders <= arrived:
            return
        mean = self.sums[bucket.index].values
        scale(mean, 1 / self._weight_of_sum(bucket))
        arrived.clear()
        self.weights[bucket.index] = 0.0
        self.step(bucket, self.server.values[bucket.index], mean)
        self.sums[bucket.index].clear()
        for sender in sorted(self.senders):
            self.server.send_model(sender, bucket)

    def _weight_of_sum(self, bucket: Bucket) -> float:
        """Return what the sum is divided by, so that every sample in it weighs the same."""
        if self.host_first or len(self.arrived[bucket.index]) == self.n:
            return self.n  # exactly, not as a sum of fractions
        return self.weights[bucket.index] or 1.0  # 0: a sum of zeros


register(
    BSP,
    worker=lambda worker, optimizer, wire, run: BspWorker(
        worker, optimizer, wire, own(run, BspOptions), momentum=run.compression != "none"
    ),
    server=lambda server, optimizer, run: BspServer(
        server, optimizer, own(run, BspOptions), momentum=run.compression == "none"
    ),
)
