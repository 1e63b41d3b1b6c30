"""EASGD and EAMSGD: elastic averaging (Zhang, Choromanska, LeCun; NeurIPS 2015).

Every ``tau`` steps a worker and the centre move towards each other, Algorithm 1:
``d = alpha (x_i - x~)``, ``x_i <- x_i - d``, ``x~ <- x~ + d``; their sum stays the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelEncoder
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import ServerLink
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.exchange.worker_mailbox import ModelInbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MEAN, saved
from aladdin_mpi.flat.vectors import add, lerp, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import EAMSGD, EASGD, EasgdOptions, own
from aladdin_mpi.transport.base import Event
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

WHOLE_BYTES = 8
"""Size of a message that reports a lost difference."""


class ModelCodec(GradientCodec):
    """Codec of a worker's model, as the difference from its servers' copy of it.

    Args:
        codec: codec of gradients.
        differences: encoder of this worker's differences.
    """

    def __init__(self, codec: GradientCodec, differences: ModelEncoder) -> None:
        self.dtype = codec.dtype
        self._codec = codec
        self._differences = differences

    @property
    def plain(self) -> DenseWire:
        """The plain codec of gradients."""
        return self._codec.plain

    def buffer(self, numel: int) -> Tensor:
        """Return an uninitialised buffer for ``numel`` values."""
        return self._codec.buffer(numel)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return a buffer for the messages of ``vector``."""
        return self._codec.buffer_for(vector)

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Write the difference from the servers' copy of the bucket."""
        return self._differences.encode(bucket.server, bucket, values, out), None

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values of a message to ``target``."""
        self._codec.add(bucket, message, target, alpha)


class ElasticLink(ServerLink):
    """A worker's end of the elastic force: sends its model, receives the centre and alpha."""

    def __init__(self, worker: Worker, wire: GradientCodec, options: EasgdOptions) -> None:
        self._tau = options.tau
        self._is_before = options.exchange == "before"
        self._steps = 0
        """Steps since the last exchange."""
        self.differences = wire.model_encoder()
        sent = wire if self.differences is None else ModelCodec(wire, self.differences)
        inbox = ModelInbox(worker.transport, worker.layout, wire)
        super().__init__(worker, sent, inbox)
        worker.transport.on_message(Tag.WHOLE, WHOLE_BYTES, self._lost)

    def open(self) -> None:
        """Start a segment, whose first models are sent in full."""
        super().open()
        if self.differences is not None:
            self.differences.forget()

    def _lost(self, server: int, message: Tensor) -> None:
        """Send the bucket in full next time: the last difference did not reach the server."""
        if self.differences is not None:
            self.differences.lost(server, int(message.view(torch.int64)))

    @property
    def is_due(self) -> bool:
        """Whether an exchange is due between the next gradient and its step."""
        return self._is_before and self._steps == self._tau

    def end_step(self) -> None:
        """Count a step; exchange if that is due after it."""
        self._steps += 1
        if self._steps == self._tau and not self._is_before:
            self.exchange()

    def exchange(self) -> None:
        """Send ``x_i`` and move it towards the centre, which is returned as of before its move."""
        self.push_values(self.x, self._steps)
        self.pull()
        self._steps = 0

    def close(self) -> None:
        """End the segment, with an exchange if steps were made since the last one."""
        if self._steps:
            self.exchange()
        super().close()


class EasgdWorker(TrainingWorker):
    """Local SGD; every tau steps ``x_i <- x_i - alpha (x_i - x~)``."""

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: EasgdOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.link = ElasticLink(worker, wire, options)
        self.g = worker.replica.new_vector()
        self.whole = slice(0, self.g.numel())

    def run(self) -> None:
        """Run Algorithm 1: exchange with the centre every tau local steps and at the end."""
        self.link.open()
        for _ in self.worker.batches():
            if self.link.is_due:
                direction = self.direction(self.g)
                self.link.exchange()
                add(self.x, direction, alpha=-self.worker.lr)
            else:
                self.worker.gradient(self.g)
                unused = self.worker.unused(self.whole)
                self.optimizer.descend(self.whole, self.g, self.x, self.worker.lr, unused=unused)
            self.link.end_step()
        self.link.close()


class EamsgdWorker(TrainingWorker):
    """EASGD with Nesterov momentum: the gradient is computed one velocity step ahead."""

    SAVED = TrainingWorker.SAVED | saved("v", merge=MEAN)

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: EasgdOptions
    ) -> None:
        super().__init__(worker, optimizer)
        assert isinstance(optimizer, MomentumSGD)  # EAMSGD accepts no other
        self.link = ElasticLink(worker, wire, options)
        self.delta = optimizer.momentum
        self.decay = MomentumSGD(self.x, 0.0, optimizer.weight_decay)
        self.g = worker.replica.new_vector()
        self.v = worker.replica.new_vector()

    def run(self) -> None:
        """Run Algorithm 2: steps of equations 9 and 10, with an exchange every tau steps."""
        self.link.open()
        for _ in self.worker.batches():
            self._step()
            self.link.end_step()
        self.link.close()

    def _step(self) -> None:
        """Compute ``v <- delta v - lr g(x + delta v)``, ``x <- x + v`` (equations 9 and 10)."""
        lr = self.worker.lr
        scale(self.v, self.delta)
        add(self.x, self.v)
        self.worker.gradient(self.g)
        self.decay.correct(slice(0, self.g.numel()), self.g, self.x)
        if self.link.is_due:
            add(self.x, self.v, alpha=-1.0)
            self.link.exchange()
            add(self.x, self.v)
        add(self.x, self.g, alpha=-lr)
        add(self.v, self.g, alpha=-lr)


class EasgdServer(ServerAlgorithm):
    """The centre: ``x~ <- x~ + alpha (x_i - x~)``."""

    def __init__(self, server: ParameterServer, options: EasgdOptions) -> None:
        super().__init__(server)
        self.options = options
        self.models = [server.codec.model_decoder() for _ in range(server.worker_count)]
        """Decoders of the workers' models, if these are sent as differences."""

    @property
    def alpha(self) -> float:
        """Weight with which a worker and the centre move towards each other."""
        alpha = self.options.alpha
        return 0.9 / self.server.surviving_workers if alpha == "auto" else float(alpha)

    def run(self) -> None:
        """Answer with the current centre, then move it: both sides use the same difference."""
        for models in self.models:
            if models is not None:
                models.forget()
        for arrival in self.arrivals():
            centre, alpha = self.server.values[arrival.bucket.index], self.alpha
            self.server.send_model(arrival.worker, arrival.bucket, alpha, exact=True)
            model = None if centre.is_meta else self._read(arrival)
            if model is not None:
                lerp(centre, model, alpha)

    def _read(self, arrival: ReceivedBucket) -> Tensor | None:
        """Return the worker's model, or None if it did not arrive intact."""
        models, bucket = self.models[arrival.worker], arrival.bucket
        if models is None:
            return None if arrival.refused else arrival.values
        if arrival.refused:
            models.lost(bucket)
            rank = self.server.layout.servers + arrival.worker
            self.server.transport.isend(torch.tensor([bucket.index]), rank, Tag.WHOLE)
            return None
        return models.decode(bucket, arrival.storage[: arrival.length])


register(
    EASGD,
    worker=lambda worker, optimizer, wire, run: EasgdWorker(
        worker, optimizer, wire, own(run, EasgdOptions)
    ),
    server=lambda server, optimizer, run: EasgdServer(server, own(run, EasgdOptions)),
)


register(
    EAMSGD,
    worker=lambda worker, optimizer, wire, run: EamsgdWorker(
        worker, optimizer, wire, own(run, EasgdOptions)
    ),
    server=lambda server, optimizer, run: EasgdServer(server, own(run, EasgdOptions)),
)
