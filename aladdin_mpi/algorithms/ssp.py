"""SSP, stale synchronous parallel, in two readings.

``always``: Ho et al., NIPS 2013. A worker that has finished c steps goes on only if no
other is more than ``bound`` steps behind, and then reads a model with all updates up to
step c - bound.

``on-bound``: Ko et al., IPDPS 2021. A worker applies its gradients to its own model and
goes on without the server's, until it is ``bound`` steps past the last one that it took.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from aladdin_mpi.algorithms.asp import AspOptions, AspServer, AspWorker
from aladdin_mpi.algorithms.registry import Algorithm, register
from aladdin_mpi.compression.codec import GradientCodec
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.parameter_server.push_pull import self_update
from aladdin_mpi.parameter_server.server import Arrival, ParameterServer
from aladdin_mpi.parameter_server.staleness import StalenessBound
from aladdin_mpi.roles.settings import own
from aladdin_mpi.roles.worker import Worker


class SspOptions(AspOptions):
    """For --algorithm ssp (Ho et al., NIPS 2013)."""

    bound: int = Field(
        3,
        ge=0,
        description="steps that a worker may be ahead of the slowest",
        json_schema_extra={"unit": "STEPS"},
    )
    pull: Literal["always", "on-bound"] = Field(
        "always",
        description="when a worker takes the server's model: after every step (Ho et al.), or "
        "only when it has gone bound + 1 steps without (Ko et al., IPDPS 2021)",
    )
    self_update: Literal["workers", "none"] = Field(
        "none",
        description="with --ssp-pull on-bound: what a worker divides its gradient by when it "
        "applies it to its own model: the number of workers, or nothing",
    )
    coalesce: bool = Field(
        True,
        description="with --ssp-pull on-bound: add a gradient to the next one while the last is "
        "still on the wire; otherwise wait until it has gone",
    )


class SspWorker(AspWorker):
    """Push ``g_i`` in every step; wait for ``x~`` in every step, or every bound + 1 steps."""

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: SspOptions
    ) -> None:
        super().__init__(worker, optimizer, wire, options)
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.coalesces = options.coalesce
        self.divisor = worker.count if options.self_update == "workers" else 1

    def step(self, number: int, batch: Ticket) -> None:
        """Push; pull, or go on by oneself."""
        g = self.push(batch)
        if not self.coalesces:
            self.outbox.drain()
        if number % self.every == 0:
            self.outbox.drain()
            self.pull()
        else:
            self_update(self.x, g, self.worker.lr / self.divisor)


class SspServer(AspServer):
    """``x~ <- x~ - lr g_i``, answered when the slowest worker is near enough."""

    def __init__(self, server: ParameterServer, optimizer: Optimizer, options: SspOptions) -> None:
        super().__init__(server, optimizer, options)
        self.every = 1 if options.pull == "always" else options.bound + 1
        self.clocks = StalenessBound(self.n, server.buckets, options.bound, server.send_model)
        self.begin()

    def begin(self) -> None:
        """All workers start a segment with the same model."""
        self.clocks.open()
        self.answered = {bucket.index: [0] * self.n for bucket in self.server.buckets}

    def answer(self, arrival: Arrival) -> None:
        """Hold the answer back while the worker is too far ahead."""
        worker, bucket = arrival.worker, arrival.bucket
        clock = self.clocks.advance(worker, bucket, arrival.count)
        answered = self.answered[bucket.index]
        if clock - answered[worker] >= self.every:
            answered[worker] = clock
            self.clocks.hold(worker, bucket)

    def ended(self, worker: int) -> None:
        """Nobody waits for a worker that has ended."""
        self.clocks.ended(worker)


register(
    Algorithm(
        "ssp",
        lambda worker, optimizer, wire, run: SspWorker(
            worker, optimizer, wire, own(run, SspOptions)
        ),
        lambda server, optimizer, run: SspServer(server, optimizer, own(run, SspOptions)),
        options=SspOptions,
        compresses=True,
        few_bits=True,
        optimizers="by-value",
    )
)
