"""Tools for tests of algorithms without servers: observed transports and random runs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from aladdin_mpi.transport.base import (
    Event,
    Handler,
    IdleUntil,
    Request,
    Sendable,
    Transport,
    sleep_and_call,
)
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.transport.wrapper import TransportWrapper
from tests.roles import Job, Outcome, any_network, flat_start, noise_of_samples, run_rank


class Spy(TransportWrapper):
    """A transport that reports its traffic to methods that a test overrides."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.simulation = cast(Any, self)  # for sleep_between

    def sent(self, buffer: Tensor, dest: int, tag: int) -> None:
        """Called when a message has been sent."""

    def handled(self, source: int, message: Tensor, tag: int) -> None:
        """Called when a handler has processed a message."""

    def switched(self) -> None:
        """Called when other ranks may run, and when they have run."""

    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        request = super().isend(buffer, dest, tag, after)
        if isinstance(buffer, Tensor):
            self.sent(buffer, dest, tag)
        return request

    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        if as_numbers:
            super().on_message(tag, nbytes, handler, as_numbers=True)
            return

        def spied(source: int, message: Tensor) -> None:
            kept = message.clone()
            handler(source, message)
            self.handled(source, kept, tag)
            self.switched()

        super().on_message(tag, nbytes, spied)

    def sleep(self, seconds: float = 0.0, *, until: float | None = None) -> None:
        self.switched()
        super().sleep(seconds, until=until)
        self.switched()

    def sleep_between(
        self,
        moments: Sequence[float],
        action: Callable[[int], None],
        idle_until: IdleUntil | None = None,
    ) -> None:
        # Sleep separately for each moment, so that each switch is reported.
        sleep_and_call(self, moments, action)

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        self.switched()
        first = super().wait_any(requests, timeout)
        self.switched()
        return first


def run_spied(job: Job, spy: Callable[[Transport], Spy]) -> Outcome:
    """Run ``tests.roles.run`` on transports created by ``spy``."""
    cluster = VirtualCluster(job.workers, job.cluster, job.seed)
    results: list[Any] = cluster.run(lambda transport: run_rank(job, spy(transport)))
    return Outcome(job, flat_start(job.numel), results)


def any_job(algorithm: str, seed: int, **settings: Any) -> Job:
    """Return a random run: any number of workers, layout, speeds and network."""
    r = random.Random(seed)
    workers = r.randint(2, 16)
    numel = r.randint(6, 60)
    return Job(
        algorithm,
        workers=workers,
        numel=numel,
        bucket=max(r.randint(1, numel), numel // 6),
        samples=r.choice([r.randint(1, 2 * workers), r.randint(20, 30 * workers)]),
        batch=r.randint(1, 4),
        segments=r.randint(1, 3),
        settings={"wire": r.choice(["fp32", "fp32", "bf16"]), **settings},
        slowdown={r.randrange(workers): r.choice([2.0, 10.0])} if r.random() < 0.5 else {},
        jitter=r.choice([0.0, 0.3, 1.0]),
        cluster=any_network(seed, workers),
        seed=seed,
    )


def large(job: Job) -> Job:
    """Return a similar run with two buckets too large for the network to buffer (64 KiB)."""
    return replace(job, numel=33_000, bucket=16_500, samples=min(job.samples, 6 * job.workers))


def starts(rank: int, numel: int) -> Tensor:
    """Return every worker's initial model."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 + rank))


def noises(job: Job, outcome: Outcome, worker: int) -> list[Tensor]:
    """Return the gradient noise of each of a worker's steps."""
    leases = outcome.workers[worker].leases
    return [
        noise_of_samples(job, worker, leases[:k], lease).double() for k, lease in enumerate(leases)
    ]
