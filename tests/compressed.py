"""A perceptron trained on the digits with any gradient codec, assembled without the trainer.

It runs in simulation (:func:`run`) or on any transport (:func:`run_rank`), and exposes every rank's
role and codec to the test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.codec.base import DenseWire, GradientCodec
from aladdin_mpi.codec.dgc import DeepGradientCompression
from aladdin_mpi.codec.quantised import make_codec
from aladdin_mpi.control.budget import Budget, SampleLease
from aladdin_mpi.data.builtin_sets import read_digits
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.flat.layout import Layout, cut
from aladdin_mpi.flat.replica import PhantomReplica, Replica, outline
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.building import Computing, make_server, make_worker, momentum_sgd
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.transport.base import Traffic, Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.role import Role
from aladdin_mpi.worker.step import StepTimeModel
from tests.quadratic import NO_DELAY, STAGGER

TRAINING = 1500


class WholeModels(DeepGradientCompression):
    """Compressed gradients with models sent whole."""

    def model_encoder(self) -> None:
        return None

    def model_decoder(self) -> None:
        return None


@dataclass
class Job:
    """A run. ``ratio`` is the share of values sent; None means no compression.

    ``wire`` is a value of ``--wire`` and replaces ratio, kind and dtype. ``settings`` are fields
    of RunOptions; times are simulated seconds.
    """

    algorithm: str = "aladdin"
    ratio: float | None = 0.01
    kind: type[DeepGradientCompression] = DeepGradientCompression
    dtype: torch.dtype = torch.float32
    wire: str | None = None
    hidden: int = 64
    workers: int = 3
    servers: int = 2
    bucket_mb: float = 0.008
    samples: int = 6000
    batch: int = 20
    segments: int = 1
    timed: bool = False
    lr: float = 0.1
    settings: dict[str, Any] = field(default_factory=dict)
    seconds: float = 1.0
    slowdown: tuple[float, ...] = ()
    jitter: float = 0.0
    cluster: Cluster = NO_DELAY

    @property
    def options(self) -> RunOptions:
        settings = {"batch_size": self.batch, **self.settings}
        return RunOptions(algorithm=self.algorithm, **settings)


@dataclass
class RankResult:
    """Final state of a rank."""

    role: Role
    codec: GradientCodec
    traffic: Traffic


@dataclass
class Outcome:
    """Results of a run."""

    job: Job
    layout: Layout
    ranks: list[RankResult]

    @property
    def servers(self) -> list[RankResult]:
        return self.ranks[: self.job.servers]

    @property
    def workers(self) -> list[RankResult]:
        return self.ranks[self.job.servers :]

    @property
    def model(self) -> Tensor:
        """The servers' model as a flat vector."""
        return torch.cat([self.ranks[b.server].role.part(b) for b in self.layout.buckets])

    @property
    def locals(self) -> Tensor:
        """The workers' models, one per row."""
        whole = self.layout.buckets
        return torch.stack([torch.cat([w.role.part(b) for b in whole]) for w in self.workers])

    def bytes_sent(self, ranks: list[RankResult]) -> int:
        return sum(rank.traffic.bytes_sent for rank in ranks)

    def accuracy(self) -> float:
        """Return the accuracy of the servers' model on held-out digits."""
        module = perceptron(self.job.hidden)
        Replica(module).parameters.copy_(self.model)
        images, labels = digits()
        with torch.no_grad():
            predicted = module(images[TRAINING:]).argmax(1)
        return float((predicted == labels[TRAINING:]).float().mean())


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return shuffled images, with values from 0 to 1, and labels."""
    arrays = read_digits()
    images, labels = arrays["pixels"].flatten(1) / 16, arrays["labels"].long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def perceptron(hidden: int) -> nn.Module:
    kept = torch.get_rng_state()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    torch.set_rng_state(kept)
    return module


def run(job: Job) -> Outcome:
    """Train in simulation."""
    cluster = VirtualCluster(job.servers + job.workers, job.cluster)
    results: list[Any] = cluster.run(lambda transport: run_rank(job, transport))
    return Outcome(job, layout_of(job), results)


def layout_of(job: Job) -> Layout:
    sizes = outline(perceptron(job.hidden))
    return cut(sum(sizes.layers), job.servers, job.bucket_mb, 16.0, "layer", sizes.layers)


def run_rank(job: Job, transport: Transport) -> RankResult:
    """Run one rank."""
    module = perceptron(job.hidden)
    replica: Replica | PhantomReplica
    sizes = outline(module)
    replica = PhantomReplica(sum(sizes.layers), sizes) if job.timed else Replica(module)
    x, options, layout = replica.parameters, job.options, layout_of(job)
    algorithm = find_algorithm(job.algorithm)
    islands = Islands.of_single_ranks(layout.servers, transport.size)
    context = Context(
        transport, options, algorithm, module, replica, islands, [PieceLane(layout, 0, 1)]
    )
    sgd = momentum_sgd(options, x)
    codec = _codec(job, replica, sgd, moves_bytes=transport.needs_memory)
    schedule: Callable[[int], float] = lambda samples: job.lr  # noqa: E731
    role: Role
    if context.is_server:
        role = make_server(context, sgd, codec, schedule)
    else:
        role = make_worker(context, sgd, codec, schedule, _computing(job, transport, module))
    budget = Budget(transport, job.samples, lambda *_: None) if transport.rank == 0 else None
    for segment in range(job.segments):
        transport.sleep(STAGGER * (transport.rank + 1))
        if budget is not None:
            budget.open(job.samples * (segment + 1) // job.segments)
        role.run()
        transport.wait(transport.ibarrier())
        if budget is not None:
            budget.close()
        transport.wait(transport.ibarrier())
    if isinstance(role, ServerAlgorithm):
        role.complete()
    return RankResult(role, codec, transport.traffic)


def _codec(
    job: Job, replica: Replica | PhantomReplica, sgd: MomentumSGD, moves_bytes: bool
) -> GradientCodec:
    ratio, device = job.ratio, replica.parameters.device
    if job.wire is not None:
        return make_codec(job.wire, layout_of(job), device, moves_bytes)
    wire = DenseWire(job.dtype, device, moves_bytes)
    if ratio is None:
        return wire
    return job.kind(wire, layout_of(job), replica.shapes, lambda samples: ratio, sgd.velocity)


def _computing(job: Job, transport: Transport, module: nn.Module) -> Computing:
    index = transport.rank - job.servers
    images, labels = digits()

    def compute(lease: SampleLease) -> float:
        if job.timed:
            return 0.0
        batch = torch.arange(lease.start, lease.start + lease.size) % TRAINING
        loss: Tensor = nn.functional.cross_entropy(module(images[batch]), labels[batch])
        loss.backward()
        return loss.item()

    seconds = job.seconds if transport.models_time or job.timed else None
    slowdown = job.slowdown[index] if job.slowdown else 1.0
    return Computing(compute, StepTimeModel(seconds, slowdown, job.jitter, seed=index))
