"""EASGD and EAMSGD: elastic averaging (Zhang, Choromanska, LeCun; NeurIPS 2015).

Every ``tau`` steps a worker and the centre draw each other together, Algorithm 1:
``d = alpha (x_i - x~)``, ``x_i <- x_i - d``, ``x~ <- x~ + d``; their sum stays as it is.
"""

from __future__ import annotations

from typing import Any

from aladdin_mpi.algorithms.answering import AnsweringServer
from aladdin_mpi.algorithms.local_steps import LocalStepWorker
from aladdin_mpi.algorithms.options import EasgdOptions
from aladdin_mpi.algorithms.server import Arrival, ParameterServer
from aladdin_mpi.algorithms.worker import Worker
from aladdin_mpi.compression.base import GradientCodec
from aladdin_mpi.optimizer import MomentumSGD
from aladdin_mpi.vectors import add, lerp, scale


class EasgdWorker(LocalStepWorker):
    """Local SGD; every tau steps ``x_i <- x_i - alpha (x_i - x~)``."""

    def __init__(
        self, worker: Worker, optimizer: MomentumSGD, wire: GradientCodec, options: EasgdOptions
    ) -> None:
        super().__init__(worker, optimizer, wire)
        self.tau = options.tau

    def is_due(self) -> bool:
        """Every tau steps."""
        return self.steps == self.tau

    def exchange(self) -> None:
        """Send ``x_i``; the centre comes back as it was before it moved, with alpha."""
        self.send(self.x)
        self.inbox.await_into(self.x)


class EamsgdWorker(EasgdWorker):
    """EASGD with Nesterov's momentum: the gradient is taken where the velocity leads."""

    def __init__(
        self, worker: Worker, optimizer: MomentumSGD, wire: GradientCodec, options: EasgdOptions
    ) -> None:
        super().__init__(worker, optimizer, wire, options)
        self.delta = optimizer.momentum
        self.decay = MomentumSGD(self.x, 0.0, optimizer.weight_decay)
        self.v = worker.replica.new_vector()

    def local_step(self) -> None:
        """``v <- delta v - lr g(x + delta v)``, ``x <- x + v`` (equations 9 and 10)."""
        lr = self.worker.lr
        scale(self.v, self.delta)
        add(self.x, self.v)
        self.compute(self.g)
        self.decay.correct(slice(0, self.g.numel()), self.g, self.x)
        add(self.x, self.g, alpha=-lr)
        add(self.v, self.g, alpha=-lr)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {**super().state_dict(), "v": self.v}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.v.copy_(state["v"])


class EasgdServer(AnsweringServer):
    """The centre: ``x~ <- x~ + alpha (x_i - x~)``."""

    def __init__(self, server: ParameterServer, options: EasgdOptions) -> None:
        super().__init__(server, optimizer=None)
        automatic = options.alpha == "auto"
        self.alpha = 0.9 / server.worker_count if automatic else float(options.alpha)

    def apply(self, arrival: Arrival) -> None:
        """Answer with the centre as it is, then move it: both use the same difference."""
        centre = self.server.values[arrival.bucket.index]
        self.server.send_model(arrival.worker, arrival.bucket, self.alpha, exact=True)
        if not arrival.refused:
            lerp(centre, arrival.values, self.alpha)

    def answer(self, arrival: Arrival) -> None:
        """It has gone already."""
