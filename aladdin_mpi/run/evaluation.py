"""Evaluation of the global model: beside training, never inside it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.model.layout import Bucket, Layout
from aladdin_mpi.model.replica import Replica
from aladdin_mpi.roles.role import Role
from aladdin_mpi.transport.base import Transport

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Measures a model; what it returns goes into the metrics, such as ``test_accuracy``."""


Record = Callable[[dict[str, Any], Mapping[str, float]], None]
"""Takes what is known of the moment of a copy, and what was measured."""


@dataclass(frozen=True)
class Measurement:
    """An evaluation that estimates batch norm's statistics by itself."""

    evaluate: Evaluate

    def __call__(self, module: nn.Module) -> Mapping[str, float]:
        """Measure ``module``."""
        return self.evaluate(module)


FRAME_BYTES = 16
"""Before the values of a bucket: its number and their weight."""


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module's forward pass."""


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The parts of ``module`` that have running statistics."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def reestimate_batch_norm(module: nn.Module, calls: Iterable[Call]) -> None:
    """Estimate the running statistics of all batch norms anew by training passes.

    No gradient method transmits these statistics, and an average of models has none
    that would fit it. A model without batch norm costs nothing.
    """
    norms = batch_norms(module)
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    mode = module.training
    module.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    with torch.no_grad():
        for args, kwargs in calls:
            module(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.train(mode)


class Snapshots:
    """Copies of the global model, collected at rank 0 while training goes on.

    Whoever holds a part of it answers a request as soon as it arrives, from the handler
    of its message: its own work is not interrupted. In virtual time that takes no room
    on the network.

    Args:
        role: this rank's.
        holders: the ranks whose weighted mean is the model's bucket.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        role: Role,
        holders: Callable[[Bucket], range],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._role = role
        self._holders = {bucket: holders(bucket) for bucket in layout.buckets}
        self._done: Callable[[Tensor], None] = _nobody
        self._vector = torch.empty(0)
        self._weights: list[float] = []
        self._missing: set[tuple[int, int]] = set()
        transport.on_failure(self._lose)
        transport.exclude_from_traffic(Tag.SNAPSHOT, Tag.SHARD)
        self._others = {rank for ranks in self._holders.values() for rank in ranks} - {0}
        if self._others:
            transport.on_message(Tag.SNAPSHOT, 1, self._answer)
            if transport.rank == 0:
                transport.on_message(Tag.SHARD, FRAME_BYTES + 4 * layout.largest, self._collect)

    @property
    def busy(self) -> bool:
        """Whether a copy is being collected."""
        return bool(self._missing)

    def take(self, done: Callable[[Tensor], None]) -> None:
        """At rank 0: start to collect a copy; ``done`` is called with it (flat, fp32, CPU)."""
        self._done = done
        self._vector = torch.zeros(self._layout.numel)
        self._weights = [0.0] * len(self._layout.buckets)
        failed = self._transport.failed
        self._missing = {
            (rank, bucket.index)
            for bucket, ranks in self._holders.items()
            for rank in ranks
            if rank not in failed
        }
        for rank in sorted(self._others - failed):
            self._transport.isend(torch.zeros(1, dtype=torch.uint8), rank, Tag.SNAPSHOT)
        self._role.when_whole(self._add_mine)

    def _add_mine(self) -> None:
        for bucket in self._mine():
            self._add(0, bucket, self._role.weight(bucket), self._role.part(bucket))

    def _lose(self, rank: int) -> None:
        """Without the part of a rank that has failed the copy may be complete."""
        lost = {key for key in self._missing if key[0] == rank}
        if lost:
            self._missing -= lost
            self._finish()

    def _mine(self) -> list[Bucket]:
        rank = self._transport.rank
        return [bucket for bucket, ranks in self._holders.items() if rank in ranks]

    def _answer(self, source: int, message: Tensor) -> None:
        for bucket in self._mine():
            weight = self._role.weight(bucket)
            head = torch.tensor([bucket.index, weight], dtype=torch.float64)
            values = self._role.part(bucket).detach().to("cpu", torch.float32)
            frame = torch.cat([head.view(torch.uint8), values.view(torch.uint8)])
            self._transport.isend(frame, source, Tag.SHARD)

    def _collect(self, source: int, message: Tensor) -> None:
        index, weight = message[:FRAME_BYTES].clone().view(torch.float64).tolist()
        values = message[FRAME_BYTES:].clone().view(torch.float32)
        self._add(source, self._layout.buckets[int(index)], weight, values)

    def _add(self, source: int, bucket: Bucket, weight: float, values: Tensor) -> None:
        mine = self._vector[bucket.part]
        if len(self._holders[bucket]) == 1:
            mine.copy_(values)
        else:
            # The running mean: exact when all are the same.
            self._weights[bucket.index] += weight
            mine.lerp_(values.to(mine.device, mine.dtype), weight / self._weights[bucket.index])
        self._missing.discard((source, bucket.index))
        self._finish()

    def _finish(self) -> None:
        if not self._missing:
            self._done(self._vector)


class Evaluator:
    """Measures copies of the global model, in a thread of its own over MPI.

    In virtual time an evaluation takes no time, and is made on the spot. Over MPI one
    that is due while another still runs is left out.

    Args:
        module: as at the start; it is copied.
        evaluate: the measurement.
    """

    def __init__(
        self,
        module: nn.Module,
        evaluate: Evaluate,
        threaded: bool,
    ) -> None:
        self.module = copy.deepcopy(module).cpu()
        self._replica = Replica(self.module)
        self._evaluate = evaluate
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, vector: Tensor, moment: dict[str, Any], record: Record) -> None:
        """Evaluate a copy of the model taken at ``moment``; ``record`` is called with both."""
        if not self._threaded:
            self._run(vector, moment, record)
            return
        self._thread = threading.Thread(
            target=self._run, args=(vector, moment, record), name="evaluation", daemon=True
        )
        self._thread.start()

    def _run(self, vector: Tensor, moment: dict[str, Any], record: Record) -> None:
        record(moment, self.measure(vector))

    def measure(self, vector: Tensor) -> Mapping[str, float]:
        """Measure the model with the parameters ``vector`` now."""
        self._replica.set(vector)
        state = torch.get_rng_state()
        try:
            return self._evaluate(self.module)
        finally:
            torch.set_rng_state(state)

    def wait(self) -> None:
        """Wait for the evaluation under way."""
        if self._thread is not None:
            self._thread.join()


def _nobody(vector: Tensor) -> None:
    """No copy has been asked for."""
