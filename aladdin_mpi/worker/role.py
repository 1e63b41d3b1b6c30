"""What a run asks of an algorithm's part on one rank, and of a worker's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import (
    MergedPart,
    MergedState,
    Saved,
    load_state,
    merge,
    saved,
    state_of,
    take_merged,
)
from aladdin_mpi.flat.vectors import add, copy, full, scale
from aladdin_mpi.optimizers.base import INHERITED, Optimizer
from aladdin_mpi.worker.node import LeaderLink
from aladdin_mpi.worker.worker import Worker

SAMPLES, COMPUTED = "worker.samples", "worker.computed"
"""Paths of a worker's numbers in :attr:`MergedState.counts`."""


class Role(ABC):
    """An algorithm's part on one rank. It is run for one segment after another.

    Between segments nothing is in flight: all that an algorithm remembers then is
    in :meth:`state_dict`.
    """

    SAVED: ClassVar[Saved]
    """The attributes that are its state, and how each is merged."""

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

    def measures(self) -> dict[str, float]:
        """Figures of rank 0 for each line of the metrics."""
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

    # -- another number of ranks: rank 0's role merges the states of all workers ------------
    def merge_worker(
        self,
        merged: dict[str, Any] | None,
        new: dict[str, Any],
        count: int,
        worker: int,
        workers: int,
    ) -> dict[str, Any]:
        """Merge the state of one more worker into those of ``count - 1`` others.

        Args:
            merged: theirs; None: it is the first one.
            new: less the model; it may be changed.
            count: of the states, this one included.
            worker: its number.
            workers: that wrote the checkpoint.

        Raises:
            UserError: the states have no common value.
        """
        return merge(TrainingWorker.SAVED, merged, new, count)

    def weights_in(self, state: Mapping[str, Any], buckets: int) -> Sequence[float]:
        """The weights of each bucket of a worker's model in the global one, by its state."""
        return [1.0] * buckets

    @abstractmethod
    def resize(self, merged: MergedState) -> None:
        """Continue from the state of other numbers of workers and servers.

        Raises:
            UserError: a state cannot be divided among other ranks.
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

    SAVED = saved("worker") | saved("optimizer", merge=INHERITED) | saved(parameters="x")
    divides = True
    """Whether gradients are divided by the number of workers."""

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

    def merge_worker(
        self,
        merged: dict[str, Any] | None,
        new: dict[str, Any],
        count: int,
        worker: int,
        workers: int,
    ) -> dict[str, Any]:
        """See :meth:`Role.merge_worker`."""
        return merge(self.SAVED, merged, new, count)

    def resize(self, merged: MergedState) -> None:
        """Begin from the global model, with what ``SAVED`` says of the workers' own states."""
        copy(self.x, merged.model)
        workers = self.worker.whole.size - self.worker.servers
        held_back = 1.0 if self.divides else merged.survivors / workers
        take_merged(self, self.SAVED, MergedPart(merged, self.index, self.n, held_back))


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
