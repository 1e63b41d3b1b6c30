"""Any algorithm's ranks on a small quadratic problem, assembled without the trainer.

Unlike the commands, it exposes every rank's role to the test. It runs in simulation (:func:`run`)
or on any transport (:func:`run_rank`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.budget import Budget, SampleLease, WorkerReport
from aladdin_mpi.control.exchange import barrier
from aladdin_mpi.control.refusals import NBYTES, Refusal
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.flat.layout import (
    BYTES_PER_MB,
    BYTES_PER_VALUE,
    Bucket,
    Layout,
    between_parameters,
    cut,
)
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.options.algorithms import Algorithm, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.building import (
    Computing,
    make_server,
    make_wire,
    make_worker,
    momentum_sgd,
)
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.transport.base import Traffic, Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.role import Role
from aladdin_mpi.worker.step import StepTimeModel
from tests.quadratic import NO_DELAY, STAGGER, Quadratic, noise_of

Probe = Callable[[Transport, Role, SampleLease], None]


@dataclass
class Job:
    """A run. ``bucket`` counts values; times are simulated seconds.

    ``settings`` are fields of RunOptions, such as ``{"ssp": {"bound": 2}}``. ``probe`` is
    called by a worker at the start of each of its steps.
    """

    algorithm: str
    workers: int = 4
    servers: int = 1
    numel: int = 17
    bucket: int = 1000
    samples: int = 200
    batch: int = 4
    segments: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[[int], float] = lambda samples: 0.05
    noise: float = 0.3
    seconds: float = 1.0
    slowdown: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    cluster: Cluster = NO_DELAY
    seed: int = 0
    silence: float | None = None
    start: Callable[[int], Tensor] | None = None
    probe: Probe | None = None
    spoil: Callable[[int, int], Tensor | float] = lambda worker, step: 0.0
    """Added to the noise of a worker's step, both counted from 0."""
    wrap: Callable[[Transport], Transport] = lambda transport: transport
    """Wraps the transport of each rank."""
    problem: Callable[[int], nn.Module] = Quadratic
    """Builds the model from the number of its values; called with the noise, it returns the loss.
    """
    watch: Callable[[ServerAlgorithm, Bucket], None] | None = None
    """Called by a server after it has processed an arrival."""

    @property
    def options(self) -> RunOptions:
        settings = {"bucket_mb": self.megabytes, "servers": max(1, self.servers)}
        settings["batch_size"] = self.batch
        return RunOptions(algorithm=self.algorithm, **{**settings, **self.settings})

    @property
    def megabytes(self) -> float:
        """Bucket size in MB; half a value more, because the layout rounds down."""
        return (self.bucket + 0.5) * BYTES_PER_VALUE / BYTES_PER_MB

    @property
    def kind(self) -> Algorithm:
        return find_algorithm(self.algorithm)

    @property
    def served_by(self) -> int:
        """Number of servers."""
        return self.servers if self.kind.has_servers else 0

    @property
    def layout(self) -> Layout:
        own_layout = implementation(self.kind).layout
        if own_layout is not None:
            return own_layout(Replica(self.problem(self.numel)), self.workers, self.options)
        layout = cut(self.numel, self.served_by, self.megabytes, 100.0)
        if self.options.compression != "powersgd":
            return layout
        return between_parameters(layout, Replica(self.problem(self.numel)).sizes)


@dataclass
class RankResult:
    """Final state of a rank. ``leases`` are those it computed."""

    role: Role
    traffic: Traffic
    leases: list[SampleLease]
    reports: list[tuple[int, WorkerReport]]
    budget: Budget | None
    refusals: list[Refusal]
    """Refused gradients that were reported to rank 0."""


@dataclass
class Outcome:
    """Results of a run."""

    job: Job
    first: Tensor
    ranks: list[Any]  # of RankResult
    """None for a failed rank."""

    @property
    def servers(self) -> list[RankResult]:
        return [rank for rank in self.ranks[: self.job.served_by] if rank is not None]

    @property
    def workers(self) -> list[RankResult]:
        """Workers that completed the run."""
        return [rank for rank in self.ranks[self.job.served_by :] if rank is not None]

    @property
    def model(self) -> Tensor:
        """The global model as a flat vector: the weighted mean over the ranks that hold it."""
        parts = []
        for bucket in self.job.layout.buckets:
            ranks = [self.ranks[r] for r in self.job.kind.holders(bucket.server, len(self.ranks))]
            roles = [rank.role for rank in ranks if rank is not None]
            total = sum(role.weight(bucket) for role in roles)
            parts.append(
                sum(role.part(bucket).double() * (role.weight(bucket) / total) for role in roles)
            )
        return torch.cat([torch.as_tensor(part) for part in parts]).float()

    @property
    def locals(self) -> Tensor:
        """The workers' models, one per row."""
        return torch.stack([flat(worker.role, self.job.layout) for worker in self.workers])

    def check_accounts(self) -> None:
        """Check that all samples were used once, all gradients applied, all messages received."""
        sizes = [lease.size for worker in self.workers for lease in worker.leases]
        assert sum(sizes) == self.job.samples
        computed = sum(worker.role.counts()["computed"] for worker in self.workers)
        assert computed == len(sizes)
        for server in self.servers:
            counts = server.role.counts()
            assert counts["applied"] + counts["dropped"] == computed
        for name in ("messages", "bytes"):
            sent = sum(getattr(rank.traffic, f"{name}_sent") for rank in self.ranks)
            received = sum(getattr(rank.traffic, f"{name}_received") for rank in self.ranks)
            assert sent == received, name


def flat(role: Role, layout: Layout) -> Tensor:
    """Return a role's values as a flat vector."""
    return torch.cat([role.part(bucket) for bucket in layout.buckets]).clone()


def run(job: Job) -> Outcome:
    """Train until the budget is used up, in simulation."""
    size = job.served_by + job.workers
    cluster = VirtualCluster(size, job.cluster, job.seed, silence=job.silence)
    results: list[Any] = cluster.run(lambda transport: run_rank(job, transport))
    return Outcome(job, Replica(job.problem(job.numel)).parameters.clone(), results)


def flat_start(numel: int) -> Tensor:
    """Return the problem's initial model as a flat vector."""
    return Replica(Quadratic(numel)).parameters.clone()


def run_rank(job: Job, transport: Transport) -> RankResult:
    """Run one rank on any transport."""
    transport = job.wrap(transport)
    module = job.problem(job.numel)
    replica = Replica(module)
    x, options = replica.parameters, job.options
    islands = Islands.of_single_ranks(job.layout.servers, transport.size)
    lanes = [PieceLane(job.layout, 0, 1)]
    context = Context(transport, options, job.kind, module, replica, islands, lanes)
    sgd = momentum_sgd(options, x)
    wire = make_wire(context, sgd, job.samples)
    leases: list[SampleLease] = []
    reports: list[tuple[int, WorkerReport]] = []
    role: Role
    if context.is_server:
        role = make_server(context, sgd, wire, job.schedule)
        if job.watch is not None:
            role.server.on_update(partial(job.watch, role))
    else:
        computing = _computing(job, transport, module, replica, leases, lambda: role)
        role = make_worker(context, sgd, wire, job.schedule, computing)
    budget = None
    refusals: list[Refusal] = []
    if transport.rank == 0:
        transport.on_message(
            Tag.REFUSAL, NBYTES, lambda _, message: refusals.append(Refusal.unpack(message))
        )
        size = transport.size
        lockstep = range(size - job.workers, size) if job.kind.lockstep else ()
        budget = Budget(
            transport, job.samples, lambda r, report: reports.append((r, report)), lockstep
        )
    for segment in range(job.segments):
        transport.sleep(STAGGER * (transport.rank + 1))
        if budget is not None:
            budget.open(job.samples * (segment + 1) // job.segments)
        role.run()
        barrier(transport)
        if budget is not None:
            budget.close()
        barrier(transport)  # no lease of the next segment is requested before
    if isinstance(role, ServerAlgorithm):
        role.complete()
    role.close()
    if transport.models_time:
        transport.sleep(100.0)  # the last reports arrive
    return RankResult(role, transport.traffic, leases, reports, budget, refusals)


def _computing(
    job: Job,
    transport: Transport,
    module: nn.Module,
    replica: Replica,
    leases: list[SampleLease],
    role: Callable[[], Role],
) -> Computing:
    index = transport.rank - job.served_by

    def compute(lease: SampleLease) -> float:
        if job.probe is not None:
            job.probe(transport, role(), lease)
        noise = noise_of_samples(job, index, leases, lease) + job.spoil(index, len(leases))
        leases.append(lease)
        loss: Tensor = module(noise)
        loss.backward()
        return loss.item()

    if job.start is not None:
        replica.parameters.copy_(job.start(index))
    virtual = transport.models_time
    slow = job.slowdown.get(index, 1.0)
    pace = StepTimeModel(job.seconds if virtual else None, slow, job.jitter, job.seed * 100 + index)
    return Computing(compute, pace)


def noise_of_samples(
    job: Job, worker: int, before: list[SampleLease], lease: SampleLease
) -> Tensor:
    """Return the mean of the noises of a worker's next samples, which are numbered individually."""
    first = sum(earlier.size for earlier in before)
    each = [noise_of(worker, first + i, job.numel, job.noise) for i in range(lease.size)]
    return torch.stack(each).mean(0)


def any_network(seed: int, ranks: int, bytes_a_message: int = 70) -> Cluster:
    """Return a random cluster: few or many hosts, delays, narrow links, pauses."""
    import random

    r = random.Random(seed)
    seconds = r.choice([0.001, 0.05, 0.3])
    pauses = [
        f"{r.randrange(ranks)}:{r.uniform(0, 20):.3f}:{r.uniform(0.5, 4):.3f}"
        for _ in range(r.choice([0, 0, 2]))
    ]
    return Cluster.model_validate(
        {
            "hosts": r.randint(1, ranks),
            "bandwidth_gbit": bytes_a_message * 8e-9 / seconds,
            "latency_us": r.choice([0.0, 50.0, 2e5]),
            "delay_us": r.choice([0.0, 1e3, 5e5]),
            "pauses": pauses,
        }
    )


def single_process(job: Job) -> Tensor:
    """Return momentum SGD on the n-fold batch, in float64 and without buckets."""
    problem = Quadratic(job.numel)
    x = flat_start(job.numel).double()
    options = job.options
    velocity = torch.zeros_like(x)
    used: list[list[SampleLease]] = [[] for _ in range(job.workers)]
    drawn = 0
    while drawn < job.samples:
        whole = min(job.batch * job.workers, job.samples - drawn)
        gradient = torch.zeros_like(x)
        for worker in range(job.workers):
            lease = SampleLease(drawn, 0, whole)
            lease = lease._replace(size=lease.size_of(worker, job.workers))
            if lease.size:
                noise = noise_of_samples(job, worker, used[worker], lease)
                mean = problem.scale.double() * (x - problem.optimum.double()) + noise.double()
                gradient += mean * lease.size / whole
                used[worker].append(lease)
        gradient += options.weight_decay * x
        velocity = options.momentum * velocity + gradient
        direction = gradient + options.momentum * velocity if options.nesterov else velocity
        x = x - job.schedule(drawn) * direction
        drawn += whole
    return x.float()
