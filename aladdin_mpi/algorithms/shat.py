"""SHAT: asynchronous training with a staleness-weighted blend.

Ko and Kim, Applied Sciences 12, 292 (2022). As in ASP the server updates on every
gradient and answers; but a worker draws its own model towards the answer only so far
as it is behind: ``x_i <- (1 - alpha_i) x_i + alpha_i x~``.
"""

from __future__ import annotations

from math import log, log2
from typing import Any, Literal

from pydantic import Field

from aladdin_mpi.algorithms.asp import AspOptions, AspServer, AspWorker
from aladdin_mpi.algorithms.registry import Algorithm, register
from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.push_pull import self_update
from aladdin_mpi.parameter_server.server import Arrival, ParameterServer
from aladdin_mpi.roles.former import Former
from aladdin_mpi.roles.settings import own
from aladdin_mpi.roles.worker import Worker


class ShatOptions(AspOptions):
    """For --algorithm shat (Ko et al., Applied Sciences 12, 292, 2022)."""

    log: Literal["e", "2"] = Field(
        "e", description="base of the logarithm in alpha = 1 - n/(c log n)"
    )
    self_update: bool = Field(
        True, description="a worker applies its gradient to its own model before it blends"
    )


def staleness_weight(others: int, workers: int, base: str) -> float:
    """``alpha_i = 1 - s_i / log n`` with ``s_i = n / c_i``, kept within 0 and 1.

    Args:
        others: c_i, updates by other workers since this one's last.
        workers: n.
        base: of the logarithm, which the paper does not say: "e" or "2".
    """
    if workers < 2 or others == 0:
        return 0.0
    logarithm = log2(workers) if base == "2" else log(workers)
    return min(1.0, max(0.0, 1 - workers / others / logarithm))


class ShatWorker(AspWorker):
    """Push ``g_i``, update oneself, wait for ``x~`` and blend it in."""

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: ShatOptions
    ) -> None:
        super().__init__(worker, optimizer, wire, options)
        self.updates_itself = options.self_update

    def step(self, number: int, batch: Ticket) -> None:
        """Push, update, pull."""
        g = self.push(batch)
        if self.updates_itself:
            self_update(self.x, g, self.worker.lr)
        self.pull()


class ShatServer(AspServer):
    """As ASP's, with alpha_i in the answer."""

    def __init__(self, server: ParameterServer, optimizer: Optimizer, options: ShatOptions) -> None:
        super().__init__(server, optimizer, options)
        self.log = options.log
        self.at_last = {index: [0] * self.n for index in self.applied}

    def answer(self, arrival: Arrival) -> None:
        """Send the model with the weight that the worker's staleness gives it."""
        index, worker = arrival.bucket.index, arrival.worker
        before = self.applied[index] - arrival.count
        others = before - self.at_last[index][worker]
        self.at_last[index][worker] = self.applied[index]
        alpha = staleness_weight(others, self.n, self.log)
        self.server.send_model(worker, arrival.bucket, alpha)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        return {**super().state_dict(), "at_last": self.at_last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.at_last = state["at_last"]

    def resize(self, former: Former) -> None:
        """See :meth:`AnsweringServer.resize`."""
        super().resize(former)
        self.at_last = {index: [total] * self.n for index, total in self.applied.items()}


register(
    Algorithm(
        "shat",
        lambda worker, optimizer, wire, run: ShatWorker(
            worker, optimizer, wire, own(run, ShatOptions)
        ),
        lambda server, optimizer, run: ShatServer(server, optimizer, own(run, ShatOptions)),
        options=ShatOptions,
        compresses=True,
        few_bits=True,
        optimizers="by-value",
    )
)
