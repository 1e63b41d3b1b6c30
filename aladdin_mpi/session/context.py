"""The objects shared by all components of a rank: options, replica, layout, model exchange."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

import aladdin_mpi
from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.exchange import all_or_none, allreduce_tensor, broadcast_tensor, gather
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, Layout, between_parameters, cut
from aladdin_mpi.flat.parts import outside_parts
from aladdin_mpi.flat.replica import (
    PhantomReplica,
    Projection,
    Projections,
    Replica,
    outline,
)
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions, check_workers
from aladdin_mpi.process import guard
from aladdin_mpi.transport.base import Transport, once, surviving_ranks
from aladdin_mpi.transport.group import PartOfRanks
from aladdin_mpi.worker.node import host_groups
from aladdin_mpi.worker.role import Role


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share, by name."""
    return {
        "aladdin_mpi": aladdin_mpi.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


@dataclass(frozen=True)
class Context:
    """The shared objects of one rank.

    Attributes:
        module: the module, on its device.
        nodes: ranks of each node's workers, if a node is one worker of the algorithm.
        numbers: initial number of each worker in the run; empty: unchanged.
        project: functions that the script applies to parameters after each step.
        parts: names of the submodules that each batch steps one after another.
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
    parts: Sequence[str] = ()

    @cached_property
    def projections(self) -> Projections:
        """The projections of ``project``; none with simulated computation."""
        return Projections(self.project if self.is_real else (), self.module)

    @property
    def number(self) -> int:
        """This worker's initial number in the run."""
        index = self.transport.rank - self.servers
        return self.numbers[index] if self.numbers else index

    @property
    def leaders(self) -> list[int]:
        """The ranks that are workers of the algorithm."""
        return [node[0] for node in self.nodes] or [*range(self.servers, self.transport.size)]

    @property
    def node(self) -> Sequence[int]:
        """The ranks that form one worker with this one."""
        rank = self.transport.rank
        return next((node for node in self.nodes if rank in node), [rank])

    @cached_property
    def among(self) -> Transport:
        """The transport among servers and workers of the algorithm, including this rank."""
        if not self.nodes:
            return self.transport
        return PartOfRanks(self.transport, [*range(self.servers), *self.leaders])

    @property
    def servers(self) -> int:
        """The number of servers, which are the first ranks."""
        return self.layout.servers

    @property
    def workers(self) -> int:
        """The number of ranks that compute."""
        return self.transport.size - self.servers

    @property
    def needs_all(self) -> str | None:
        """The option that requires every worker; None: the run can continue without some."""
        if self.options.node_sums:
            return "--node-sums"
        return self.options.algorithm if self.algorithm.needs_all(self.options) else None

    @property
    def is_led(self) -> bool:
        """Whether this rank computes for the leader of its node."""
        return not self.is_server and self.transport.rank != self.node[0]

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self.transport.rank < self.servers

    @property
    def is_real(self) -> bool:
        """Whether the model has values; simulated computation uses only its sizes."""
        return self.options.compute == "real"

    def holders(self, bucket: Bucket) -> range:
        """Return the ranks whose values of a bucket form the global model's."""
        return self.algorithm.holders(bucket.server, self.transport.size)


def make_context(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    numbers: Sequence[int] = (),
    project: Sequence[Projection] = (),
    parts: Sequence[str] = (),
) -> Context:
    """Return this rank's context; every rank calls it.

    Raises:
        UserError: more servers than the model has parts, or too few workers or nodes; projections
            that the algorithm cannot apply.
    """
    replica = all_or_none(transport, lambda: _make_replica(transport, options, module, parts))
    servers = options.servers if algorithm.has_servers else 0
    workers = transport.size - servers

    def cut_model() -> Layout:
        return make_layout(options, algorithm, replica, servers, workers)

    def make() -> Context:
        if isinstance(replica, Replica):
            layout = between_parameters(cut_model(), replica.sizes) if project else cut_model()
        else:  # the same on all ranks of a simulation
            layout = once(transport, ("layout", id(module), servers, workers), cut_model)
        _check_servers(options, replica, layout)
        if not numbers:  # otherwise the run started with more
            check_workers(options, workers)
        nodes = _nodes(transport, options, algorithm, servers)
        context = Context(
            transport, options, algorithm, module, replica, layout, nodes, numbers, project, parts
        )
        if context.projections and implementation(algorithm).updates_parts:
            raise UserError(
                f"run.project() requires whole parameters on each rank, and {algorithm.name} "
                "updates a part of each layer on each. Use ar-sgd."
            )
        return context

    return all_or_none(transport, make)


def _make_replica(
    transport: Transport, options: RunOptions, module: nn.Module, parts: Sequence[str]
) -> Replica | PhantomReplica:
    outside = outside_parts(module, parts)
    if options.compute == "real":
        return Replica(module, outside)
    _, sizes = once(transport, ("outline", id(module)), lambda: (module, outline(module)))
    return PhantomReplica(sum(sizes.layers), sizes, outside)


def _check_servers(options: RunOptions, replica: Replica | PhantomReplica, layout: Layout) -> None:
    owners = {bucket.server for bucket in layout.buckets}
    if layout.servers and len(owners) < layout.servers:
        layers = ", of which no layer is split" if options.sharding == "layer" else ""
        raise UserError(
            f"--servers: expected at most {len(owners)} for a model of {replica.numel} "
            f"parameters{layers}, got {layout.servers}; use fewer"
        )


def _nodes(
    transport: Transport, options: RunOptions, algorithm: Algorithm, servers: int
) -> list[list[int]]:
    """Return the ranks of each node's workers, leaders first; empty without --node-sums."""
    if not options.node_sums:
        return []
    nodes = host_groups(transport, servers, options.node_size)
    sizes = sorted({len(node) for node in nodes})
    if len(sizes) > 1:
        counts = " and ".join(map(str, sizes))
        raise UserError(
            f"--node-sums requires the same number of workers on every node, got {counts}. Start "
            "as many on each host (servers, which are the first ranks, do not count), or add "
            "--node-size with a number that divides all."
        )
    least = max(algorithm.least_workers, servers)
    if len(nodes) < least:
        raise UserError(
            f"--node-sums requires at least {least} nodes for --algorithm {algorithm.name}"
            + (f" with {servers} servers" if servers > 1 else "")
            + f", got {len(nodes)}. Use more hosts, or leave --node-sums out."
        )
    return nodes


def make_layout(
    options: RunOptions,
    algorithm: Algorithm,
    replica: Replica | PhantomReplica,
    servers: int,
    workers: int,
) -> Layout:
    """Return the division of the model among servers and workers."""
    own_layout = implementation(algorithm).layout
    if own_layout is not None:
        options = options.model_copy(update={"servers": max(1, servers)})
        return own_layout(replica, workers, options)
    sizes = options.bucket_mb, options.shard_mb
    layout = cut(replica.numel, servers, *sizes, options.sharding, replica.layers)
    has_low_rank = options.compression == "powersgd"
    return between_parameters(layout, replica.sizes) if has_low_rank else layout


MOST_APART = 1e-3
"""Largest relative difference of two workers' models that rounding on different CPUs may cause."""


def share_model(context: Context) -> None:
    """Start from rank 0's parameters and buffers, unless the run is resumed."""
    if not context.is_real or context.options.resume is not None:
        return
    for tensor in [context.replica.parameters, *context.replica.buffers()]:
        _broadcast(context.transport, tensor)


def share_buffers(context: Context, source: int) -> None:
    """Copy the buffers of rank ``source``, or of the next surviving one, to every rank."""
    surviving = [rank for rank in surviving_ranks(context.transport) if rank >= source]
    for buffer in context.module.buffers():
        _broadcast(context.transport, buffer, surviving[0])


def _broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> None:
    tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
    staged = tensor.detach().cpu().contiguous()
    broadcast_tensor(transport, staged, root)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


def collect_model(context: Context, role: Role, without: Sequence[int] = ()) -> Tensor | None:
    """Return the global model, flat, on every rank, and copy it into the replica.

    None with simulated computation. The ranks ``without`` hold no part of it.
    """
    transport, replica = context.transport, context.replica
    if not isinstance(replica, Replica):
        return None
    vector = torch.zeros(replica.numel, dtype=full(replica.parameters.dtype))
    for bucket in context.layout.buckets:
        holders = context.holders(bucket)
        mine, weight = vector[bucket.part], 0.0
        if transport.rank in holders and transport.rank not in without:
            mine.copy_(role.part(bucket))
            weight = role.weight(bucket)
        if len(holders) == 1:
            _broadcast(transport, mine, holders[0])
        else:  # the weighted mean
            total = torch.tensor([weight], dtype=torch.float64)
            mine.mul_(total.item())
            allreduce_tensor(transport, total)
            allreduce_tensor(transport, mine)
            mine.div_(total.item())
    context.projections.apply(vector)  # the mean of projected models may not satisfy them
    replica.set(vector)
    return vector


def warn_of_differences(context: Context, own: Tensor, model: Tensor) -> None:
    """Warn if workers' models differ that should be equal: the loop has changed some of them.

    ``own`` is this rank's model at the end of the run, ``model`` the first worker's, which is kept.
    """
    is_leader = context.transport.rank in context.leaders
    apart = float((own.to(model) - model).norm() / model.norm().clamp_min(1e-12))
    found = gather(context.transport, apart if is_leader else 0.0)
    largest = max((each or 0.0 for each in found), default=0.0)
    if largest > MOST_APART:
        guard.warn(
            [
                f"the workers' models differ by {largest:.1%}, and the first worker's is kept: "
                f"worker {found.index(largest)} has another. Writes of the loop into parameters "
                "must be the same on every worker: register them with run.project() "
                "(docs/troubleshooting.md)"
            ]
        )
