"""EASGD and EAMSGD: elastic averaging (Zhang, Choromanska, LeCun; NeurIPS 2015).

Every ``tau`` steps a worker and the centre draw each other together, Algorithm 1:
``d = alpha (x_i - x~)``, ``x_i <- x_i - d``, ``x~ <- x~ + d``; their sum stays as it is.
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
"""Of a message that says that a difference was lost."""


class ModelCodec(GradientCodec):
    """Writes a worker's model for its servers, as the difference from what they have of it.

    Args:
        codec: of gradients.
        differences: written by this worker.
    """

    def __init__(self, codec: GradientCodec, differences: ModelEncoder) -> None:
        self.dtype = codec.dtype
        self._codec = codec
        self._differences = differences

    @property
    def plain(self) -> DenseWire:
        """That of the gradients' codec."""
        return self._codec.plain

    def buffer(self, numel: int) -> Tensor:
        """See :meth:`GradientCodec.buffer`."""
        return self._codec.buffer(numel)

    def buffer_for(self, vector: Tensor) -> Tensor:
        """See :meth:`GradientCodec.buffer_for`."""
        return self._codec.buffer_for(vector)

    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """The difference; see :meth:`GradientCodec.compress`."""
        return self._differences.encode(bucket.server, bucket, values, room), None

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """See :meth:`GradientCodec.add`."""
        self._codec.add(bucket, message, target, alpha)


class ElasticLink(ServerLink):
    """A worker's end of the elastic force: its model up, the centre and alpha down."""

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
        """A segment begins: with models as wholes."""
        super().open()
        if self.differences is not None:
            self.differences.forget()

    def _lost(self, server: int, message: Tensor) -> None:
        """A server has not got the last difference about a bucket."""
        if self.differences is not None:
            self.differences.lost(server, int(message.view(torch.int64)))

    @property
    def is_due(self) -> bool:
        """Whether an exchange belongs between the next gradient and its step."""
        return self._is_before and self._steps == self._tau

    def end_step(self) -> None:
        """A step has been made: exchange, if that comes after it."""
        self._steps += 1
        if self._steps == self._tau and not self._is_before:
            self.exchange()

    def exchange(self) -> None:
        """Send ``x_i`` and move it to the centre, which comes back as it was before it moved."""
        self.push_values(self.x, self._steps)
        self.pull()
        self._steps = 0

    def close(self) -> None:
        """The segment ends: with an exchange, if steps were made since the last one."""
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
        """Algorithm 1: step alone, and meet the centre every tau steps and at the end."""
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
    """EASGD with Nesterov's momentum: the gradient is taken where the velocity leads."""

    SAVED = TrainingWorker.SAVED | saved("v", merge=MEAN)

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: EasgdOptions
    ) -> None:
        super().__init__(worker, optimizer)
        assert isinstance(optimizer, MomentumSGD)  # EAMSGD takes no other
        self.link = ElasticLink(worker, wire, options)
        self.delta = optimizer.momentum
        self.decay = MomentumSGD(self.x, 0.0, optimizer.weight_decay)
        self.g = worker.replica.new_vector()
        self.v = worker.replica.new_vector()

    def run(self) -> None:
        """Algorithm 2."""
        self.link.open()
        for _ in self.worker.batches():
            self._step()
            self.link.end_step()
        self.link.close()

    def _step(self) -> None:
        """``v <- delta v - lr g(x + delta v)``, ``x <- x + v`` (equations 9 and 10)."""
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
        """The workers' models, where these come as differences."""

    @property
    def alpha(self) -> float:
        """How far a worker and the centre move towards each other."""
        alpha = self.options.alpha
        return 0.9 / self.server.surviving_workers if alpha == "auto" else float(alpha)

    def run(self) -> None:
        """Answer with the centre as it is, then move it: both use the same difference."""
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
        """The worker's model, if it has come."""
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
