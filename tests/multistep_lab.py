"""Multistep's ranks on a small network, and an equivalent single process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aladdin_mpi.algorithms.multistep import MultistepWorker
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.budget import Budget, SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.building import Computing, make_worker, momentum_sgd
from aladdin_mpi.session.context import Context, make_layout
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.transport.base import Traffic, Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.step import StepTimeModel
from tests.quadratic import NO_DELAY, STAGGER

CLASSES = 3


def small() -> nn.Module:
    """Return a network of a convolution and three dense layers, the first by far the largest."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 50),
        nn.ReLU(inplace=True),
        nn.Linear(50, 7, bias=False),
        nn.ReLU(),
        nn.Linear(7, CLASSES),
    )


@dataclass
class Job:
    """A run. ``settings`` are fields of RunOptions; ``seconds`` is None for real time."""

    workers: int = 3
    batch: int = 4
    samples: int = 100
    build: Callable[[], nn.Module] = small
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    seconds: float | None = 1.0
    slowdown: dict[int, float] = field(default_factory=dict)
    jitter: float = 0.0
    cluster: Cluster = NO_DELAY
    seed: int = 0
    segments: int = 1
    passes: int = 1
    """Forward passes of one step, each with a part of the batch."""
    dtype: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    wait_free: bool = True
    probe: Callable[[MultistepWorker], None] | None = None
    """Called in every forward pass of a rank, after the first layer."""

    @property
    def options(self) -> RunOptions:
        settings = {"batch_size": self.batch, "wait_free": self.wait_free, **self.settings}
        return RunOptions(algorithm="multistep", quiet=True, **settings)

    def module(self) -> nn.Module:
        torch.manual_seed(7)
        return self.build().to(self.dtype)


def data(numbers: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return samples by number; they are the same on all ranks."""
    random = torch.Generator().manual_seed(3)
    images = torch.randn(64, 1, 6, 6, generator=random, dtype=torch.float64)
    index = torch.tensor([number % 64 for number in numbers], dtype=torch.int64)
    return images[index].to(dtype), (index * 5 % 7) % CLASSES


@dataclass
class Result:
    """Final state of a rank."""

    role: MultistepWorker
    traffic: Traffic
    leases: list[SampleLease]
    seconds: float
    state: dict[str, Any]

    @property
    def x(self) -> Tensor:
        return self.role.x


def alone(job: Job) -> Tensor:
    """Return the flat model after training in one process with the batches of all workers."""
    module = job.module()
    options = job.options
    optimizer = torch.optim.SGD(
        module.parameters(),
        job.lr,
        options.momentum,
        weight_decay=options.weight_decay,
        nesterov=options.nesterov,
    )
    start = 0
    for segment in range(job.segments):
        limit = job.samples * (segment + 1) // job.segments
        while start < limit:
            stop = min(start + job.workers * job.batch, limit)
            images, labels = data(range(start, stop), job.dtype)
            optimizer.zero_grad()
            functional.cross_entropy(module(images), labels).backward()
            optimizer.step()
            start = stop
    return Replica(module).parameters


def run(job: Job) -> list[Result]:
    """Train in simulation."""
    cluster = VirtualCluster(job.workers, job.cluster, job.seed)
    results: list[Any] = cluster.run(lambda transport: run_rank(job, transport))
    return results


def run_rank(job: Job, transport: Transport) -> Result:
    """Run one rank on any transport."""
    module = job.module()
    replica = Replica(module)
    options = job.options
    kind = find_algorithm("multistep")
    layout = make_layout(options, kind, replica, 0, transport.size)
    islands = Islands.of_single_ranks(layout.servers, transport.size)
    context = Context(transport, options, kind, module, replica, islands, [PieceLane(layout, 0, 1)])
    leases: list[SampleLease] = []

    def compute(lease: SampleLease) -> float:
        leases.append(lease)
        worker = role.worker
        before = sum(lease.size_of(each, worker.count) for each in range(worker.index))
        first = lease.start + before
        numbers = range(first, first + lease.size)
        loss = 0.0
        for part in range(job.passes):
            own = numbers[
                len(numbers) * part // job.passes : len(numbers) * (part + 1) // job.passes
            ]
            images, labels = data(own, job.dtype)
            last = part == job.passes - 1
            if worker.step.watch is not None:
                worker.step.watch.enabled = last
            output = functional.cross_entropy(module(images), labels, reduction="sum")
            output = output / max(lease.size, 1)
            if output.requires_grad:
                output.backward()
            loss += output.item()
        return loss

    pace = StepTimeModel(
        job.seconds,
        job.slowdown.get(transport.rank, 1.0),
        job.jitter,
        100 * job.seed + transport.rank,
    )
    sgd = momentum_sgd(options, replica.parameters)
    wire = DenseWire(job.wire, replica.parameters.device)
    role = make_worker(context, sgd, wire, lambda _: job.lr, Computing(compute, pace))
    assert isinstance(role, MultistepWorker)
    if job.probe is not None:
        probe = job.probe
        first_layer = next(part for part in module.modules() if not list(part.children()))
        first_layer.register_forward_hook(lambda *_: probe(role))
    budget = None
    if transport.rank == 0:
        budget = Budget(transport, job.samples, lambda rank, report: None, range(transport.size))
    # Count only what the algorithm sends.
    transport.exclude_from_traffic(Tag.DRAW, Tag.GRANT, Tag.REFUSAL)
    start = transport.now()
    for segment in range(job.segments):
        transport.sleep(STAGGER * (transport.rank + 1))
        if budget is not None:
            budget.open(job.samples * (segment + 1) // job.segments)
        role.run()
        if budget is not None:
            budget.close()
        assert not role.gathering
        seconds = transport.now() - start
        transport.wait(transport.ibarrier())
    return Result(role, transport.traffic, leases, seconds, role.state_dict())
