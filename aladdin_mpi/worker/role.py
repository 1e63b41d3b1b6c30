"""Base classes of an algorithm's part on one rank, and of a worker's part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

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
from aladdin_mpi.flat.vectors import copy, scale
from aladdin_mpi.optimizers.base import INHERITED, Optimizer
from aladdin_mpi.worker.worker import Worker

SAMPLES, LEFT_OUT, COMPUTED = "worker.samples", "worker.left_out", "worker.computed"
REFUSED = "worker.refused"
"""Paths of a worker's counters in :attr:`MergedState.counts`."""


class Role(ABC):
    """An algorithm's part on one rank, run for one segment after another.

    Between segments nothing is in flight: :meth:`state_dict` contains all state of the
    algorithm.
    """

    SAVED: ClassVar[Saved]
    """The attributes that form its state, with the rules for merging them."""

    @abstractmethod
    def run(self) -> None:
        """Take part in a segment until its end, and leave nothing in flight."""

    def close(self) -> None:
        """Release resources of other libraries at the end of the run, on every rank."""
        return

    def describe(self) -> str:
        """Return notes on the setup for the log; empty by default."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return rank 0's automatic decisions for the summary; by default :meth:`measures`."""
        return dict(self.measures())

    def measures(self) -> dict[str, float]:
        """Return rank 0's figures for each line of the metrics."""
        return {}

    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Return totals of gradients and samples for the counters of the run."""

    def doubt(self) -> str:
        """Return a reason why a checkpoint may be worthless now; empty without one."""
        return ""

    @abstractmethod
    def part(self, bucket: Bucket) -> Tensor:
        """Return this rank's values of a bucket, for the global model."""

    def when_whole(self, action: Callable[[], None]) -> None:
        """Call ``action``, possibly at once, when all parts on this rank belong to one step.

        Call it from a message handler; ``action`` runs as one.
        """
        action()

    def weight(self, bucket: Bucket) -> float:
        """Return the weight of this rank's values in the mean over all ranks that have some."""
        return 1.0

    def state_dict(self) -> dict[str, Any]:
        """Return all state, as tensors, numbers, strings, lists and dicts."""
        return state_of(self, self.SAVED)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
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
            merged: merged state of the others; None for the first worker.
            new: the worker's state without the model; it may be changed.
            count: number of states, including this one.
            worker: index of the worker.
            workers: number of workers that wrote the checkpoint.

        Raises:
            UserError: the states have no common value.
        """
        return merge(TrainingWorker.SAVED, merged, new, count)

    def weights_in(self, state: Mapping[str, Any], buckets: int) -> Sequence[float]:
        """Return the weights of each bucket of a worker's model in the global one."""
        return [1.0] * buckets

    @abstractmethod
    def resize(self, merged: MergedState) -> None:
        """Continue from the merged state of another number of workers and servers.

        Raises:
            UserError: a state cannot be divided among other ranks.
        """

    def common(self) -> dict[str, Any]:
        """Return the state shared by all ranks, as JSON, for a rank that rejoins."""
        return {}

    def join(self, common: dict[str, Any]) -> None:
        """Rejoin after a failure, without own state, once the run is resumed."""
        return


class TrainingWorker(Role):
    """A rank that computes gradients, with its own model and optimizer.

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

    def fill_gradient(self, g: Tensor) -> None:
        """Compute the current batch's gradient into ``g``, times the worker's share."""
        self.worker.gradient(g)
        if self.worker.share != 1.0:
            scale(g, self.worker.share)

    def direction(self, g: Tensor) -> Tensor:
        """Return ``opt(g)``, with g the current batch's gradient at ``x``; overwrites ``g``."""
        self.fill_gradient(g)
        whole = slice(0, g.numel())
        self.optimizer.correct(whole, g, self.x, unused=self.worker.unused(whole))
        return g

    def descend(self, rate: float, g: Tensor) -> None:
        """Compute ``x <- x - rate opt(g)``, and project x; overwrites ``g``."""
        self.fill_gradient(g)
        whole = slice(0, g.numel())
        self.optimizer.descend(whole, g, self.x, rate, unused=self.worker.unused(whole))
        self.worker.project(self.x)

    def project(self) -> None:
        """Apply the script's projections to the own model after a step."""
        self.worker.project(self.own_model)

    def assist(self) -> None:
        """Take part in repeated sums of other workers, after a failure, between two steps.

        Does nothing by default.
        """
        return

    def close(self) -> None:
        """Detach from the user's model."""
        self.worker.close()

    def counts(self) -> dict[str, int]:
        """Return the numbers of gradients computed and refused, and of samples left out."""
        worker = self.worker
        return {
            "computed": worker.computed,
            "refused": worker.refused,
            "left_out": worker.left_out,
        }

    def doubt(self) -> str:
        """Return a reason after several refused gradients in a row; one may be a bad sample's."""
        worker = self.worker
        if worker.in_a_row < 2:
            return ""
        number = worker.whole.rank - worker.servers
        return f"the last {worker.in_a_row} gradients of worker {number} were refused"

    def part(self, bucket: Bucket) -> Tensor:
        """Return a bucket of this worker's model."""
        return bucket.of(self.x)

    def merge_worker(
        self,
        merged: dict[str, Any] | None,
        new: dict[str, Any],
        count: int,
        worker: int,
        workers: int,
    ) -> dict[str, Any]:
        """Merge the state of one more worker by the rules of ``SAVED``."""
        return merge(self.SAVED, merged, new, count)

    def resize(self, merged: MergedState) -> None:
        """Start from the global model, with the workers' own states merged by ``SAVED``."""
        copy(self.x, merged.model)
        workers = self.worker.whole.size - self.worker.servers
        held_back = 1.0 if self.divides else merged.survivors / workers
        take_merged(self, self.SAVED, MergedPart(merged, self.index, self.n, held_back))


class ComputingMember(TrainingWorker):
    """A member of an island that owns no lane: it only computes gradients for the others."""

    def run(self) -> None:
        """Compute until the segment's samples are used up; the island moves the values."""
        for _ in self.worker.batches():
            self.worker.gradient(self.x)

    def resize(self, merged: MergedState) -> None:
        """Do nothing: the owners have all state."""

    def project(self) -> None:
        """Do nothing: the owners' values are projected."""

    def weight(self, bucket: Bucket) -> float:
        """Return 0: it has no values."""
        return 0.0
