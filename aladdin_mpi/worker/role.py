"""What a run asks of an algorithm's part on one rank, and of a worker's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import Saved, load_state, saved, state_of
from aladdin_mpi.flat.vectors import add, copy, full, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.worker.merged_state import MergedState
from aladdin_mpi.worker.node import LeaderLink
from aladdin_mpi.worker.worker import Worker


class Role(ABC):
    """An algorithm's part on one rank. It is run for one segment after another.

    Between segments nothing is in flight: all that an algorithm remembers then is
    in :meth:`state_dict`.
    """

    SAVED: ClassVar[Saved]
    """The attributes that are its state."""

    @abstractmethod
    def run(self) -> None:
        """Take part in a segment, to its end, and leave nothing in flight."""

    def close(self) -> None:
        """The run is over: give back what other libraries hold, on every rank."""
        return

    def describe(self) -> str:
        """What the user should know of how it was set up; empty if there is nothing."""
        return ""

    def facts(self) -> dict[str, Any]:
        """What it has decided by itself, for the summary; rank 0 is asked."""
        return {}

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Totals of gradients for the accounts of the run."""

    def doubt(self) -> str:
        """Why a checkpoint of this moment may be worthless; empty if there is no reason."""
        return ""

    @abstractmethod
    def part(self, bucket: Bucket) -> Tensor:
        """This rank's values of a bucket, for the global model."""

    def when_whole(self, action: Callable[[], None]) -> None:
        """Call ``action`` when this rank's parts all belong to one step: at once, or soon.

        To be called by a message handler; ``action`` runs as one.
        """
        action()

    def weight(self, bucket: Bucket) -> float:
        """What they weigh in the mean over all ranks that have some."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """All state, as tensors, numbers, strings, lists and dicts."""
        return state_of(self, self.SAVED)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        load_state(self, self.SAVED, state)

    @abstractmethod
    def resize(self, merged: MergedState) -> None:
        """Go on where other numbers of workers and servers have come to.

        Raises:
            UserError: a state cannot be dealt to other ranks.
        """

    def common(self) -> dict[str, Any]:
        """What all ranks have in common, as JSON: for one that takes part again."""
        return {}

    def join(self, common: dict[str, Any]) -> None:
        """Take part again, without a state of one's own, after a failure and a resumption."""
        return


class TrainingWorker(Role):
    """A rank that computes gradients, with a model and an optimizer of its own.

    ``x`` is the model, one flat vector; ``index`` counts the ``n`` workers from 0.
    """

    SAVED = saved("worker", "optimizer", parameters="x")
    RESIZED: ClassVar[tuple[str, ...]] = ("worker",)
    """The parts that go on, each by its ``resize(former)``, with other numbers of workers."""

    def __init__(self, worker: Worker, optimizer: Optimizer) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.x = worker.parameters
        self.transport = worker.transport
        self.layout = worker.layout
        self.index, self.n = worker.index, worker.count

    @property
    def own_model(self) -> Tensor:
        """The flat vector that this worker's steps change."""
        return self.x

    def direction(self, g: Tensor) -> Tensor:
        """``opt(g)``, g the gradient of the current batch at ``x``: into ``g``, which holds any."""
        self.worker.gradient(g)
        if self.worker.share != 1.0:
            scale(g, self.worker.share)
        whole = slice(0, g.numel())
        self.optimizer.correct(whole, g, self.x, unused=self.worker.unused(whole))
        return g

    def descend(self, rate: float, g: Tensor) -> None:
        """``x <- x - rate opt(g)``; ``g`` holds any. The result is projected before it is sent."""
        add(self.x, self.direction(g), alpha=-rate)
        self.worker.project(self.x)

    def close(self) -> None:
        """The model is the user's again."""
        self.worker.close()

    def counts(self) -> dict[str, int]:
        """Gradients computed so far, and how many of them were refused."""
        return {"computed": self.worker.computed, "refused": self.worker.refused}

    def doubt(self) -> str:
        """One refused gradient may be that of one bad sample; several in a row are not."""
        worker = self.worker
        if worker.in_a_row < 2:
            return ""
        return f"the last {worker.in_a_row} gradients of worker {worker.index} were refused"

    def part(self, bucket: Bucket) -> Tensor:
        """This worker's own model."""
        return bucket.of(self.x)

    def resize(self, merged: MergedState) -> None:
        """Begin from the global model, with the mean of what the workers had of their own."""
        copy(self.x, merged.model)
        self.optimizer.inherit(merged.worker["optimizer"])
        for name in self.RESIZED:
            getattr(self, name).resize(merged)


class LedWorker(TrainingWorker):
    """A worker that computes gradients for the leader of its node, at the leader's model."""

    def __init__(self, worker: Worker, optimizer: Optimizer, leader: int) -> None:
        super().__init__(worker, optimizer)
        transport, layout, x = self.transport, self.layout, self.x
        wire = DenseWire(full(x.dtype), x.device, transport.needs_memory)
        self.g = worker.replica.new_vector()
        model = wire.buffer(layout.numel)
        self.leader = LeaderLink(transport, layout, leader, wire, self.g, x, model)

    def run(self) -> None:
        """Take the model, compute, send; until the segment's samples are used up."""
        for _ in self.worker.batches():
            self.leader.take_model()
            self.leader.flush()
            self.worker.gradient(self.g, self.leader.send)
        self.leader.flush()

    def counts(self) -> dict[str, int]:
        """The gradients are the leader's."""
        return {"computed": 0, "refused": self.worker.refused}

    def weight(self, bucket: Bucket) -> float:
        """Its model is the leader's of a step before."""
        return 0.0
