"""A worker that computes gradients for another one, the leader of its node."""

from __future__ import annotations

from aladdin_mpi.compression.codec import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.model.layout import Bucket
from aladdin_mpi.model.vectors import copy, full
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.roles.role import TrainingWorker
from aladdin_mpi.roles.worker import Worker
from aladdin_mpi.transport.request import Event, Request
from aladdin_mpi.transport.sealed import is_void


class LedWorker(TrainingWorker):
    """A worker that computes gradients for the leader of its node, at the leader's model."""

    def __init__(self, worker: Worker, optimizer: Optimizer, leader: int) -> None:
        super().__init__(worker, optimizer)
        self.leader = leader
        needs_memory = worker.transport.needs_memory
        self.wire = DenseWire(full(self.x.dtype), self.x.device, needs_memory)
        self.g = worker.replica.new_vector()
        self.sent = self.wire.buffer_for(self.g)
        self.model = self.wire.buffer(self.layout.numel)
        self.taken: Event | None = None
        """A device reads the model until then."""
        self.sends: list[Request] = []

    def run(self) -> None:
        """Take the model, compute, send; until the segment's samples are used up."""
        for _ in self.worker.batches():
            self._take_model()
            self.transport.wait_all(self.sends)
            self.sends.clear()
            self.worker.gradient(self.g, self._send)
        self.transport.wait_all(self.sends)
        self.sends.clear()

    def _take_model(self) -> None:
        if self.taken is not None:
            self.transport.await_event(self.taken)
        receives = [
            self.transport.irecv(bucket.of(self.model), self.leader, Tag.LOCAL_MODEL)
            for bucket in self.layout.buckets
        ]
        self.transport.wait_all(receives)
        for bucket in self.layout.buckets:
            if not is_void(bucket.of(self.model)):
                there, self.taken = self.wire.fetch(bucket.of(self.model))
                with self.transport.atomic():
                    copy(bucket.of(self.x), there)

    def _send(self, bucket: Bucket) -> None:
        wire = bucket.of(self.sent)
        event = self.wire.encode(bucket.of(self.g), wire)
        send = self.transport.isend(wire, self.leader, Tag.LOCAL_GRADIENT, after=event)
        self.sends.append(send)

    def counts(self) -> dict[str, int]:
        """The gradients are the leader's."""
        return {"computed": 0, "refused": self.worker.refused}

    def weight(self, bucket: Bucket) -> float:
        """Its model is the leader's of a step before."""
        return 0.0
