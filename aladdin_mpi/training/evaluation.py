"""Evaluation of the global model: beside training, never inside it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from aladdin_mpi.layout import Layout
from aladdin_mpi.replica import Replica
from aladdin_mpi.tags import Tag
from aladdin_mpi.transport.base import Transport

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Measures a model; what it returns goes into the metrics, such as ``test_accuracy``."""

INDEX_BYTES = 8


def reestimate_batch_norm(module: nn.Module, batches: Iterable[Tensor]) -> None:
    """Estimate the running statistics of all batch norms anew from ``batches`` of inputs.

    No gradient method transmits these statistics, and an average of models has none
    that would fit it. A model without batch norm costs nothing.
    """
    norms = [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    mode = module.training
    module.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    with torch.no_grad():
        for inputs in batches:
            module(inputs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    module.train(mode)


class Snapshots:
    """Copies of the global model, collected at rank 0 while training goes on.

    Each server answers a request as soon as it arrives, from the handler of its
    message: its loop over gradients is not interrupted.

    Args:
        part: this rank's buckets of the model, by index; empty if it has none.
        done: at rank 0, called with every complete copy (flat, fp32, CPU).
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        part: Mapping[int, Tensor],
        done: Callable[[Tensor], None],
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._part = part
        self._done = done
        self._vector = torch.empty(0)
        self._missing = 0
        if layout.servers > 1:
            transport.on_message(Tag.SNAPSHOT, 1, self._answer)
            if transport.rank == 0:
                transport.on_message(Tag.SHARD, INDEX_BYTES + 4 * layout.largest, self._collect)

    @property
    def busy(self) -> bool:
        """Whether a copy is being collected."""
        return self._missing > 0

    def take(self) -> None:
        """At rank 0: start to collect a copy."""
        self._vector = torch.empty(self._layout.numel)
        self._missing = len(self._layout.buckets) - len(self._part)
        for index, values in self._part.items():
            self._vector[self._layout.buckets[index].part].copy_(values)
        for server in range(1, self._layout.servers):
            self._transport.isend(torch.zeros(1, dtype=torch.uint8), server, Tag.SNAPSHOT)
        if not self._missing:
            self._done(self._vector)

    def _answer(self, source: int, message: Tensor) -> None:
        for index, values in self._part.items():
            frame = torch.cat([torch.tensor([index]).view(torch.uint8), values.view(torch.uint8)])
            self._transport.isend(frame, source, Tag.SHARD)

    def _collect(self, source: int, message: Tensor) -> None:
        index = int(message[:INDEX_BYTES].clone().view(torch.int64))
        values = message[INDEX_BYTES:].clone().view(torch.float32)
        self._vector[self._layout.buckets[index].part].copy_(values)
        self._missing -= 1
        if not self._missing:
            self._done(self._vector)


class Evaluator:
    """Measures copies of the global model, in a thread of its own over MPI.

    In virtual time an evaluation takes no time, and is made on the spot. Over MPI one
    that is due while another still runs is left out.

    Args:
        module: as at the start; it is copied.
        evaluate: the measurement.
        record: called with what is known of the moment and what was measured.
    """

    def __init__(
        self,
        module: nn.Module,
        evaluate: Evaluate,
        record: Callable[[dict[str, Any], Mapping[str, float]], None],
        threaded: bool,
    ) -> None:
        self.module = copy.deepcopy(module).cpu()
        self._replica = Replica(self.module)
        self._evaluate = evaluate
        self._record = record
        self._threaded = threaded
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, vector: Tensor, moment: dict[str, Any]) -> None:
        """Evaluate a copy of the model taken at ``moment``."""
        if not self._threaded:
            self._run(vector, moment)
            return
        self._thread = threading.Thread(
            target=self._run, args=(vector, moment), name="evaluation", daemon=True
        )
        self._thread.start()

    def _run(self, vector: Tensor, moment: dict[str, Any]) -> None:
        self._record(moment, self.measure(vector))

    def measure(self, vector: Tensor) -> Mapping[str, float]:
        """Measure the model with the parameters ``vector`` now."""
        self._replica.parameters.copy_(vector)
        state = torch.get_rng_state()
        try:
            return self._evaluate(self.module)
        finally:
            torch.set_rng_state(state)

    def wait(self) -> None:
        """Wait for the evaluation under way."""
        if self._thread is not None:
            self._thread.join()
