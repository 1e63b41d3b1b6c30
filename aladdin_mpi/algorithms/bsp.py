"""BSP, bulk synchronous parallel: the servers wait for every worker in every step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import GradientSum, ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import GradientLink
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import saved
from aladdin_mpi.flat.vectors import scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import BSP, BspOptions, own
from aladdin_mpi.transport.checksums import ChecksumTransport
from aladdin_mpi.worker.island import LaneSum, OwnerLink, host_groups
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class LeadingLink(GradientLink):
    """Leader's link: sums its host's gradients, exchanges with the servers, forwards the model."""

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, group: list[int]
    ) -> None:
        super().__init__(worker, optimizer, wire)
        self.wire = wire.plain
        self.group = group
        self.model = wire.buffer_for(self.x)
        self.sum = LaneSum(worker.transport, worker.layout, group[1:], self.wire)

    def gradients_in(self, batch: SampleLease) -> int:
        """Return the number of workers of this host that have samples in the round."""
        first = self.worker.servers
        return sum(batch.size_of(rank - first, self.worker.count) > 0 for rank in self.group)

    def _send(self, g: Tensor) -> Callable[[Bucket], None]:
        self.sum.begin(g)
        return super()._send(g)

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send the host's sum of every bucket that all workers have completed, without waiting."""
        for each in self.sum.complete(bucket):
            self.outbox.put(each)

    def pull(self) -> None:
        """Wait for the model and forward it."""
        super().pull()
        transport, event = self.worker.transport, self.wire.encode(self.x, self.model)
        transport.wait(
            *[
                transport.isend(bucket.of(self.model), rank, Tag.LOCAL_MODEL, after=event)
                for bucket in self.worker.layout.buckets
                for rank in self.group[1:]
            ]
        )


class FollowingLink(GradientLink):
    """Follower's link: sends gradients to the leader of its host and receives the model from it."""

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, group: list[int]
    ) -> None:
        super().__init__(worker, optimizer, wire)
        self.sends_settings = False  # the leader sends them
        transport, layout, plain = worker.transport, worker.layout, wire.plain
        self.g = worker.replica.new_vector()
        # Receive directly into x, unless the message may arrive damaged.
        checked = isinstance(transport, ChecksumTransport)
        model = plain.buffer(layout.numel) if checked else plain.buffer_for(self.x)
        sent = plain.buffer_for(self.g)
        self.leader = OwnerLink(transport, layout, group[0], plain, self.g, sent, self.x, model)

    def push(self, batch: SampleLease) -> Tensor:
        """Compute, and send each bucket to the leader as it is completed."""
        self.leader.flush()
        self.worker.gradient(self.g, self._send(self.g))
        return self.g

    def forward(self, g: Tensor, bucket: Bucket) -> None:
        """Send the bucket to the leader."""
        self.leader.send(bucket.index)

    def pull(self) -> None:
        """Wait for the model from the leader."""
        self.leader.take_model()


class BspWorker(TrainingWorker):
    """``x_i <- x~`` after every gradient; the servers answer once all workers' have arrived."""

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
        """Push ``g_i``, wait for ``x~``, and copy it."""
        self.link.open()
        for batch in self.worker.batches():
            self.link.push(batch)
            self.link.pull()
        self.link.close()


def _link(
    worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: BspOptions, momentum: bool
) -> GradientLink:
    """Return the link to the servers: direct, or through the leader of the host."""
    if options.host_first:
        groups = host_groups(worker.transport.hosts, worker.servers, options.group)
        group = next(group for group in groups if worker.transport.rank in group)
        if len(group) > 1:
            kind = LeadingLink if group[0] == worker.transport.rank else FollowingLink
            return kind(worker, optimizer, wire, group)
    return GradientLink(worker, optimizer, wire, momentum)


class BspServer(ServerAlgorithm):
    """``x~ <- x~ - lr/n (g_1 + ... + g_n)``, then an answer to all.

    In the round in which a worker fails, each bucket is updated by the mean of the gradients that
    have arrived for it: the worker's last gradient may be complete in some buckets only. Servers
    update and send each bucket as soon as it is complete, so a bucket that includes the gradient
    cannot be reverted when a later one turns out to lack it.
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
        self.all_senders = set(range(self.n))
        if options.host_first:
            servers = server.layout.servers
            groups = host_groups(server.transport.hosts, servers, options.group)
            self.all_senders = {group[0] - servers for group in groups}
        self.senders = set(self.all_senders)
        largest = server.layout.largest
        self.sums = {
            bucket.index: GradientSum(bucket.numel, largest, server.values[bucket.index])
            for bucket in server.buckets
        }
        self.arrived: dict[int, set[int]] = {bucket.index: set() for bucket in server.buckets}
        self.weights = {bucket.index: 0.0 for bucket in server.buckets}
        """Sum of the arrived gradients' shares of the round."""

    def run(self) -> None:
        """Sum the gradients of each round; the last one completes it."""
        self.senders = set(self.all_senders)
        for arrival in self.arrivals(self._ended, look=False):  # adding checks for finite values
            if not self.sums[arrival.bucket.index].add(arrival):
                self.server.report_refused(arrival)
            self.arrived[arrival.bucket.index].add(arrival.worker)
            self.weights[arrival.bucket.index] += arrival.weight
            self._complete(arrival.bucket)
        assert not any(self.arrived.values()), "a round is half done"

    def _ended(self, worker: int) -> None:
        """Complete rounds without a worker that has ended or failed."""
        self.senders.discard(worker)
        for bucket in self.server.buckets:
            self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        """Take the step and answer all participants, if all gradients have arrived."""
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
        """Return the divisor of the sum, so that every sample in it has the same weight."""
        if self.host_first or len(self.arrived[bucket.index]) == self.n:
            return self.n  # exactly, not as a sum of fractions
        return self.weights[bucket.index] or self.n  # 0: only what codecs had held back


register(
    BSP,
    worker=lambda worker, optimizer, wire, run: BspWorker(
        worker, optimizer, wire, own(run, BspOptions), momentum=run.compression != "none"
    ),
    server=lambda server, optimizer, run: BspServer(
        server, optimizer, own(run, BspOptions), momentum=run.compression == "none"
    ),
)
