"""GoSGD: gossip stochastic gradient descent (Blot, Picard, Cord, Thome; 2016).

No worker ever waits. The weights of all workers and of the messages in flight add up to 1;
the global model is the weighted mean. Every bucket has its own weight alpha, because the
buckets of a message need not arrive between the same two steps.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import torch

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.gossip import GossipInbox, ModelOutbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import GOSGD, GoSgdOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

LEAST_ALPHA = 2.0**-1000
"""Lower limit of alpha, below which a worker stops sending: further halving would reach 0."""


class GoSgdWorker(TrainingWorker):
    """GoSGD worker: mixes in models, steps, and sends to a random peer with probability p.

    A worker whose last model is still on the wire sends none in this step and
    halves no weight: it neither waits nor accumulates copies.
    """

    SAVED = TrainingWorker.SAVED | saved("alpha", "random")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: GoSgdOptions,
        seed: int,
    ) -> None:
        super().__init__(worker, optimizer)
        self.wire = wire.plain
        self.g = worker.replica.new_vector()
        self.p = options.p
        self.random = random.Random(f"gosgd {seed} {self.index}")
        self.alpha = [1 / self.n] * len(self.layout.buckets)
        self.outbox = ModelOutbox(worker, self.wire, Tag.GOSSIP)
        self.inbox = GossipInbox(worker, self.wire)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        for _ in self.worker.batches():
            self.inbox.take_into(self.x, self.alpha)
            self.descend(self.worker.lr, self.g)
            if self.random.random() < self.p:
                self._send_to_random_peer()
        self.outbox.flush()
        self.inbox.drain()
        self.inbox.take_into(self.x, self.alpha)

    def _send_to_random_peer(self) -> None:
        """Halve alpha, and send the other half with x to a random other worker."""
        if self.n == 1:
            return
        failed = self.transport.failed
        peer = (self.index + self.random.randrange(1, self.n)) % self.n
        while peer in failed:
            peer = (peer + 1) % self.n
        if peer == self.index:
            return
        if self.outbox.is_free and min(self.alpha) >= LEAST_ALPHA:
            halves = [alpha / 2 for alpha in self.alpha]
            self.outbox.send(self.x, peer, torch.tensor(halves, dtype=torch.float64))
            self.alpha = halves

    def weight(self, bucket: Bucket) -> float:
        """Return this worker's alpha."""
        return self.alpha[bucket.index]

    def weights_in(self, state: Mapping[str, Any], buckets: int) -> list[float]:
        """Return alpha; the new workers start with equal weights."""
        weights: list[float] = state["alpha"]
        return weights


register(
    GOSGD,
    worker=lambda worker, optimizer, wire, run: GoSgdWorker(
        worker, optimizer, wire, own(run, GoSgdOptions), run.seed
    ),
)
