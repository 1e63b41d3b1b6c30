"""Small problems with a known minimum, and ALADDIN's ranks on them in simulation.

The ranks are assembled from the package's parts, so that a test can access what the public
interface hides: every worker's model, and every shard of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.aladdin import AladdinServer, AladdinWorker
from aladdin_mpi.codec.base import DenseWire, GradientCodec
from aladdin_mpi.control.budget import Budget, SampleLease, WorkerReport
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.lanes import PieceLane
from aladdin_mpi.flat.layout import BYTES_PER_MB, BYTES_PER_VALUE, Layout, cut
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import AladdinOptions, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.session.building import Computing, make_server, make_worker, momentum_sgd
from aladdin_mpi.session.context import Context
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.transport.base import Traffic
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from aladdin_mpi.worker.step import StepTimeModel


def aladdin_options(**values: Any) -> AladdinOptions:
    return AladdinOptions.model_validate(values)


def network(**values: Any) -> Cluster:
    return Cluster.model_validate(values)


STAGGER = 1e-6
"""Seconds between the starts of two ranks, which makes their order deterministic."""
NO_DELAY = network(
    latency_us=0,
    local_latency_us=0,
    message_overhead_us=0,
    bandwidth_gbit=1e15,
    local_bandwidth_gbit=1e15,
)


class Quadratic(nn.Module):
    """``loss = 1/2 sum scale (x - optimum)^2``, with x in three parameters.

    ``scale`` lies between 0.1 and 1: the condition number is 10.
    """

    scale: Tensor
    optimum: Tensor

    def __init__(self, numel: int, seed: int = 0) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        sizes = [numel // 3, numel // 2]
        sizes.append(numel - sum(sizes))
        self.parts = nn.ParameterList([torch.randn(n, generator=random) for n in sizes])
        self.register_buffer("scale", torch.linspace(0.1, 1.0, numel))
        self.register_buffer("optimum", torch.randn(numel, generator=random))

    def forward(self, noise: Tensor | float = 0.0) -> Tensor:
        """Return the loss; its gradient is ``scale (x - optimum) + noise``."""
        x = torch.cat([part.view(-1) for part in list(self.parts)[::-1]])
        return (0.5 * self.scale * (x - self.optimum) ** 2 + noise * x).sum()


def noise_of(worker: int, step: int, numel: int, size: float) -> Tensor:
    """Return the gradient noise of a worker's step, which depends only on its arguments."""
    random = torch.Generator().manual_seed(1_000_003 * (worker + 1) + step)
    return size * torch.randn(numel, generator=random)


@dataclass
class Setup:
    """A run. ``bucket`` and ``shard`` count values; times are simulated seconds."""

    workers: int = 2
    servers: int = 1
    numel: int = 17
    bucket: int = 1000
    shard: int = 100_000
    samples: int = 200
    batch: int = 4
    segments: int = 1
    aladdin: AladdinOptions = field(default_factory=aladdin_options)
    schedule: Callable[[int], float] = lambda samples: 0.05
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    noise: float = 0.3
    seconds: float = 1.0
    slowdown: tuple[float, ...] = ()
    jitter: float = 0.0
    server_seconds: float = 0.0
    """Seconds that a server needs for each bucket."""
    cluster: Cluster = NO_DELAY
    wire: torch.dtype = torch.float32
    seed: int = 0
    start: Callable[[int], Tensor] | None = None
    """Builds a worker's initial model, if it is not the same for all."""

    @property
    def options(self) -> RunOptions:
        settings: dict[str, Any] = {"aladdin": self.aladdin}
        return RunOptions(
            algorithm="aladdin",
            servers=self.servers,
            batch_size=self.batch,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            **settings,
        )

    @property
    def layout(self) -> Layout:
        def megabytes(values: int) -> float:
            # Half a value more, because the layout rounds down.
            return (values + 0.5) * BYTES_PER_VALUE / BYTES_PER_MB

        return cut(self.numel, self.servers, megabytes(self.bucket), megabytes(self.shard))

    def slowdown_of(self, worker: int) -> float:
        return self.slowdown[worker] if self.slowdown else 1.0


class SlowServer(ParameterServer):
    """A server that takes a given time for each bucket."""

    seconds = 0.0

    def gradients(
        self,
        on_end: Callable[[int], None] | None = None,
        look: bool = True,
        at_end: Callable[[], None] | None = None,
    ) -> Iterator[ReceivedBucket]:
        for arrival in super().gradients(on_end, look, at_end):
            if self.seconds:
                self.transport.sleep(self.seconds)
            yield arrival


@dataclass
class WorkerResult:
    """Final state of a worker. ``waited`` is the accumulated waiting at the start of each step."""

    x: Tensor
    role: AladdinWorker
    traffic: Traffic
    leases: list[SampleLease]
    waited: list[float]


@dataclass
class ServerResult:
    """Final state of a server; ``budget`` is rank 0's."""

    role: AladdinServer
    traffic: Traffic
    reports: list[tuple[int, WorkerReport]]
    budget: Budget | None


@dataclass
class Outcome:
    """Results of a run."""

    setup: Setup
    first: Tensor
    servers: list[ServerResult]
    workers: list[WorkerResult]

    @property
    def model(self) -> Tensor:
        """The global model as a flat vector."""
        values: dict[int, Tensor] = {}
        for server in self.servers:
            values |= server.role.server.values
        return torch.cat([values[bucket.index] for bucket in self.setup.layout.buckets])

    @property
    def locals(self) -> Tensor:
        """The workers' models, one per row."""
        return torch.stack([worker.x for worker in self.workers])

    def total(self, name: str) -> int:
        """Return the sum of a counter over the workers."""
        return sum(worker.role.counts()[name] for worker in self.workers)

    def in_flight(self) -> tuple[int, int]:
        """Return messages and bytes that were sent but never received."""
        all_traffic = [server.traffic for server in self.servers]
        all_traffic += [worker.traffic for worker in self.workers]
        return (
            sum(t.messages_sent - t.messages_received for t in all_traffic),
            sum(t.bytes_sent - t.bytes_received for t in all_traffic),
        )


def run(setup: Setup) -> Outcome:
    """Train until the budget is used up, in ``setup.segments`` segments."""
    size = setup.servers + setup.workers
    cluster = VirtualCluster(size, setup.cluster, setup.seed)
    results: list[Any] = cluster.run(lambda transport: _rank(setup, transport))
    first = Replica(Quadratic(setup.numel)).parameters
    return Outcome(setup, first, results[: setup.servers], results[setup.servers :])


def _rank(setup: Setup, transport: VirtualTransport) -> WorkerResult | ServerResult:
    module = Quadratic(setup.numel)
    replica = Replica(module)
    x = replica.parameters
    islands = Islands.of_single_ranks(setup.layout.servers, transport.size)
    lanes, algorithm = [PieceLane(setup.layout, 0, 1)], find_algorithm("aladdin")
    context = Context(transport, setup.options, algorithm, module, replica, islands, lanes)
    sgd = momentum_sgd(setup.options, x)
    wire = DenseWire(setup.wire, x.device)
    if context.is_server:
        return _serve(setup, transport, context, sgd, wire)
    return _work(setup, transport, context, sgd, wire)


def _segments(setup: Setup, transport: VirtualTransport, begin: Callable[[int], None]) -> None:
    """Run the segments as the training does: with barriers between them, and staggered starts."""
    for segment in range(setup.segments):
        transport.sleep(STAGGER * (transport.rank + 1))
        begin(setup.samples * (segment + 1) // setup.segments)
        transport.wait(transport.ibarrier())


def _serve(
    setup: Setup,
    transport: VirtualTransport,
    context: Context,
    sgd: MomentumSGD,
    wire: GradientCodec,
) -> ServerResult:
    role = make_server(context, sgd, wire, setup.schedule, SlowServer)
    assert isinstance(role, AladdinServer) and isinstance(role.server, SlowServer)
    role.server.seconds = setup.server_seconds
    reports: list[tuple[int, WorkerReport]] = []
    budget = None
    if transport.rank == 0:
        budget = Budget(transport, setup.samples, lambda rank, r: reports.append((rank, r)))

    def segment(limit: int) -> None:
        if budget is not None:
            budget.open(limit)
        role.run()
        if budget is not None:
            budget.close()

    _segments(setup, transport, segment)
    role.complete()
    return ServerResult(role, transport.traffic, reports, budget)


def _work(
    setup: Setup,
    transport: VirtualTransport,
    context: Context,
    sgd: MomentumSGD,
    wire: GradientCodec,
) -> WorkerResult:
    index = transport.rank - setup.servers
    leases: list[SampleLease] = []
    waited: list[float] = []

    def compute(lease: SampleLease) -> float:
        waited.append(transport.traffic.waiting)
        leases.append(lease)
        loss: Tensor = context.module(noise_of(index, len(leases), setup.numel, setup.noise))
        loss.backward()
        return loss.item()

    pace = StepTimeModel(
        setup.seconds, setup.slowdown_of(index), setup.jitter, setup.seed * 100 + index
    )
    x = context.replica.parameters
    if setup.start is not None:
        x.copy_(setup.start(index))
    role = make_worker(context, sgd, wire, setup.schedule, Computing(compute, pace))
    assert isinstance(role, AladdinWorker)
    _segments(setup, transport, lambda limit: role.run())
    return WorkerResult(x, role, transport.traffic, leases, waited)
