"""What every part of a rank stands on: its options, its replica, and how the model is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.exchange import agree
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.layout import Bucket, Layout, between_parameters, cut
from aladdin_mpi.model.projection import Projection, Projections
from aladdin_mpi.model.replica import PhantomReplica, Replica, shared_outline
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions, check_workers
from aladdin_mpi.run.nodes import make_nodes
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.part import PartOfRanks


@dataclass(frozen=True)
class Context:
    """One rank's.

    Attributes:
        module: on its device.
        replica: of the module.
        layout: how the flat model is cut.
        nodes: ranks of the workers of each node, where a node is one worker of the algorithm.
        numbers: of each worker, the one that it began the run with; none: as they are now.
        project: what the script applies to parameters after each step.
    """

    transport: Transport
    options: RunOptions
    algorithm: Algorithm
    module: nn.Module
    replica: Replica | PhantomReplica
    layout: Layout
    nodes: Sequence[Sequence[int]] = ()
    numbers: Sequence[int] = ()
    project: Sequence[Projection] = ()

    @cached_property
    def projections(self) -> Projections:
        """The script's; none with timed computing."""
        return Projections(self.project if self.is_real else (), self.module)

    @property
    def number(self) -> int:
        """This worker's, with which it began the run."""
        index = self.transport.rank - self.servers
        return self.numbers[index] if self.numbers else index

    @property
    def leaders(self) -> list[int]:
        """The ranks that are workers of the algorithm."""
        return [node[0] for node in self.nodes] or [*range(self.servers, self.transport.size)]

    @property
    def node(self) -> Sequence[int]:
        """The ranks that are one worker with this one."""
        rank = self.transport.rank
        return next((node for node in self.nodes if rank in node), [rank])

    @cached_property
    def among(self) -> Transport:
        """The transport among servers and workers of the algorithm; of them this is one."""
        if not self.nodes:
            return self.transport
        return PartOfRanks(self.transport, [*range(self.servers), *self.leaders])

    @property
    def servers(self) -> int:
        """Their number: they are the first ranks."""
        return self.layout.servers

    @property
    def workers(self) -> int:
        """How many ranks compute."""
        return self.transport.size - self.layout.servers

    @property
    def needs_all(self) -> str | None:
        """What cannot go on without every worker; None: the run can."""
        if self.options.node_sums:
            return "--node-sums"
        return self.options.algorithm if self.algorithm.needs_all(self.options) else None

    @property
    def is_led(self) -> bool:
        """Whether this rank computes for another one."""
        return not self.is_server and self.transport.rank != self.node[0]

    @property
    def is_server(self) -> bool:
        """Whether this rank is one."""
        return self.transport.rank < self.layout.servers

    @property
    def is_real(self) -> bool:
        """Whether there is a model; with timed computing there are its sizes alone."""
        return self.options.compute == "real"

    def holders(self, bucket: Bucket) -> range:
        """The ranks whose values of a bucket make up the global model's."""
        return self.algorithm.holders(bucket.server, self.transport.size)


def server_count(options: RunOptions, algorithm: Algorithm) -> int:
    """How many of the ranks are servers."""
    return options.servers if algorithm.has_servers else 0


def make_context(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    numbers: Sequence[int] = (),
    project: Sequence[Projection] = (),
) -> Context:
    """Every rank calls it. ``numbers`` and ``project`` as in :class:`Context`.

    Raises:
        UserError: more servers than the model has parts, or too few workers; projections that the
            algorithm cannot apply.
    """
    replica = agree(transport, lambda: _make_replica(transport, options, module))
    servers = server_count(options, algorithm)
    workers = transport.size - servers
    if isinstance(replica, Replica):
        layout = make_layout(options, algorithm, replica, servers, workers)
        if project:
            layout = between_parameters(layout, replica.sizes)
    else:  # all ranks of a simulation have the same
        key = "layout", id(module), servers, workers
        layout = transport.once(
            key, lambda: make_layout(options, algorithm, replica, servers, workers)
        )
    agree(transport, lambda: _check(options, replica, layout))
    if not numbers:  # else the run began with more
        agree(transport, lambda: check_workers(options, workers))
    nodes = agree(transport, lambda: make_nodes(options, algorithm, transport, servers))
    context = Context(
        transport, options, algorithm, module, replica, layout, nodes, numbers, project
    )
    agree(transport, lambda: _check_projections(context))
    return context


def _check_projections(context: Context) -> None:
    if not context.projections:
        return
    if implementation(context.algorithm).own_places is not None:
        raise UserError(
            f"run.project() requires whole parameters on each rank, and {context.algorithm.name} "
            "updates a part of each layer on each. Use ar-sgd."
        )


def _make_replica(
    transport: Transport, options: RunOptions, module: nn.Module
) -> Replica | PhantomReplica:
    if options.compute == "real":
        return Replica(module)
    _, sizes = transport.once(("outline", id(module)), lambda: (module, shared_outline(module)))
    return PhantomReplica(sum(sizes.layers), sizes)


def make_layout(
    options: RunOptions,
    algorithm: Algorithm,
    replica: Replica | PhantomReplica,
    servers: int,
    workers: int,
) -> Layout:
    """How so many servers and workers cut the model."""
    own_layout = implementation(algorithm).layout
    if own_layout is not None:
        options = options.model_copy(update={"servers": max(1, servers)})
        return own_layout(replica, workers, options)
    return cut(
        replica.numel,
        servers,
        options.bucket_mb,
        options.shard_mb,
        options.sharding,
        replica.layers,
    )


def _check(options: RunOptions, replica: Replica | PhantomReplica, layout: Layout) -> None:
    servers = layout.servers
    owners = {bucket.server for bucket in layout.buckets}
    if servers and len(owners) < servers:
        layers = ", of which no layer is split" if options.sharding == "layer" else ""
        raise UserError(
            f"--servers: expected at most {len(owners)} for a model of "
            f"{replica.numel} parameters{layers}, got {servers}; use fewer"
        )
