"""BSP, bulk synchronous parallel: the servers wait for every worker in every step.

``host_first.py`` has the workers for ``--bsp-host-first``.
"""

from __future__ import annotations

from typing import Any

from aladdin_mpi.algorithms.answering import AnsweringServer
from aladdin_mpi.algorithms.gradient_sum import GradientSum
from aladdin_mpi.algorithms.host_first import FollowingWorker, LeadingWorker, host_groups
from aladdin_mpi.algorithms.options import BspOptions
from aladdin_mpi.algorithms.push_pull import PushPullWorker
from aladdin_mpi.algorithms.server import Arrival, ParameterServer
from aladdin_mpi.algorithms.worker import Worker
from aladdin_mpi.compression.base import GradientCodec
from aladdin_mpi.optimizer import MomentumSGD
from aladdin_mpi.vectors import scale


def bsp_worker(
    worker: Worker, optimizer: MomentumSGD, wire: GradientCodec, options: BspOptions, momentum: bool
) -> PushPullWorker:
    """Push ``g_i``, wait for ``x~``, take it: by oneself or with the others of one's host."""
    if options.host_first:
        groups = host_groups(worker.transport, worker.servers)
        group = next(group for group in groups if worker.transport.rank in group)
        if len(group) > 1:
            kind = LeadingWorker if group[0] == worker.transport.rank else FollowingWorker
            return kind(worker, optimizer, wire, momentum, group)
    return PushPullWorker(worker, optimizer, wire, momentum)


class BspServer(AnsweringServer):
    """``x~ <- x~ - lr/n (g_1 + ... + g_n)``, then an answer to all."""

    def __init__(
        self,
        server: ParameterServer,
        optimizer: MomentumSGD,
        options: BspOptions,
        momentum: bool,
    ) -> None:
        super().__init__(server, optimizer if momentum else None)
        self.senders = list(range(self.n))
        if options.host_first:
            servers = server.layout.servers
            self.senders = [group[0] - servers for group in host_groups(server.transport, servers)]
        largest = server.layout.largest
        self.sums = {
            bucket.index: GradientSum(bucket.numel, largest, server.values[bucket.index])
            for bucket in server.buckets
        }
        self.arrived = {bucket.index: 0 for bucket in server.buckets}

    def apply(self, arrival: Arrival) -> None:
        """Add up; the last of a round completes the step."""
        bucket, index = arrival.bucket, arrival.bucket.index
        self.sums[index].add(arrival)
        self.arrived[index] += 1
        if self.arrived[index] == len(self.senders):
            mean = self.sums[index].values
            scale(mean, 1 / self.n)
            self.step(bucket, self.server.values[index], mean)
            self.sums[index].clear()

    def answer(self, arrival: Arrival) -> None:
        """After the last of a round, to all who take part in it."""
        index = arrival.bucket.index
        if self.arrived[index] == len(self.senders):
            self.arrived[index] = 0
            for sender in self.senders:
                self.server.send_model(sender, arrival.bucket)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on: no round is half done then."""
        assert not any(self.arrived.values())
        return super().state_dict()
