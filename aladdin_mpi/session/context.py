"""The objects shared by all components of a rank: options, replica, layout, model exchange."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import aladdin_mpi
from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.exchange import (
    all_or_none,
    allreduce_tensors,
    broadcast,
    broadcast_tensor,
    gather,
    receive_object,
    send_object,
)
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.lanes import (
    Lane,
    LaneReplica,
    PieceLane,
    make_lanes,
    make_sharded_lanes,
    rows_of,
)
from aladdin_mpi.flat.layout import Bucket, Layout, between_parameters, cut
from aladdin_mpi.flat.parts import outside_parts
from aladdin_mpi.flat.replica import (
    FlatModel,
    PhantomReplica,
    Projection,
    Projections,
    Replica,
    outline,
)
from aladdin_mpi.flat.shards import check_sharding, is_divided, local, ranges
from aladdin_mpi.flat.vectors import checksum, full
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions, check_workers
from aladdin_mpi.process import guard
from aladdin_mpi.session.islands import Islands, check_servers_of_parts, make_islands
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.transport.group import PartOfRanks
from aladdin_mpi.worker.role import Role


def versions() -> dict[str, str]:
    """Return the versions that all ranks must share, by name."""
    return {
        "aladdin_mpi": aladdin_mpi.__version__,
        "torch": torch.__version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


class Piece(NamedTuple):
    """A part of the global model: a bucket of a lane.

    Attributes:
        bucket: the bucket of the lane.
        part: its place in the flat vector of :attr:`Context.whole`.
        holders: ranks whose values form the global model's.
    """

    bucket: Bucket
    part: slice
    holders: Sequence[int]


@dataclass(frozen=True)
class Context:
    """The shared objects of one rank.

    Attributes:
        module: the module, on its device.
        whole: the module's parameters as a flat vector.
        islands: the ranks, by the workers of the algorithm that they form.
        lanes: all lanes of the model.
        numbers: initial number of each worker in the run; empty: unchanged.
        project: functions that the script applies to parameters after each step.
        parts: names of the submodules that each batch steps one after another.
        uncut: samples of a batch, if none may be cut; 0: the last ones of a segment may be.
    """

    transport: Transport
    options: RunOptions
    algorithm: Algorithm
    module: nn.Module
    whole: Replica | PhantomReplica
    islands: Islands
    lanes: Sequence[Lane]
    numbers: Sequence[int] = ()
    project: Sequence[Projection] = ()
    parts: Sequence[str] = ()
    uncut: int = 0

    @cached_property
    def projections(self) -> Projections:
        """The projections of ``project``; none with simulated computation."""
        return Projections(self.project if self.is_real else (), self.module)

    @property
    def number(self) -> int:
        """This worker's initial number in the run."""
        index = self.transport.rank - self.servers
        return self.numbers[index] if self.numbers else index

    @cached_property
    def lane(self) -> Lane | None:
        """The lane of the model that this rank trains; None: it only computes gradients."""
        number = self.islands.lane(self.transport.rank)
        return None if number is None else self.lanes[number]

    @property
    def is_sharded(self) -> bool:
        """Whether FSDP has divided the model among the ranks of an island."""
        return self.whole.is_sharded

    @cached_property
    def unit(self) -> int:
        """Samples of which leases have multiples, so that members of an island have equal parts.

        FSDP adds their gradients without weights.
        """
        if self.uncut:
            return self.uncut * self.islands.size
        return self.islands.size if self.is_sharded else 1

    @cached_property
    def replica(self) -> FlatModel:
        """The model as the algorithm sees it on this rank: its lane."""
        lane = self.lane
        if lane is not None and lane.count == 1:
            return self.whole
        if lane is None or isinstance(lane, PieceLane):
            return LaneReplica(self.whole, lane)
        rows = rows_of(lane.sizes(self.whole.sizes))
        return FlatModel(rows, self.whole.parameters, self.whole.outside)

    @property
    def layout(self) -> Layout:
        """The layout of the replica."""
        return Layout(0, self.servers, ()) if self.lane is None else self.lane.layout

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The parts of the global model that :attr:`whole` has, which its ranks have in one order.

        These are all ranks, or those of one lane if the model is sharded.
        """
        return [
            Piece(bucket, piece.part, self._holders(lane.number, bucket.server))
            for lane in (self.lanes if self.lane is None or not self.is_sharded else [self.lane])
            for bucket, piece in zip(
                lane.layout.buckets,
                lane.pieces.buckets if isinstance(lane, PieceLane) else lane.layout.buckets,
                strict=True,
            )
        ]

    def _holders(self, lane: int, server: int) -> Sequence[int]:
        """Return the ranks whose values of a server's buckets form the global model's."""
        if self.islands.size == 1:
            return self.algorithm.holders(server, self.transport.size)
        ranks = self.islands.ranks(lane)
        return [ranks[place] for place in self.algorithm.holders(server, len(ranks))]

    @property
    def leaders(self) -> list[int]:
        """The first members of the islands, which request samples."""
        return self.islands.workers()

    @property
    def island(self) -> Sequence[int]:
        """The ranks that form one worker with this one."""
        return self.islands.island(self.transport.rank)

    @cached_property
    def among(self) -> Transport:
        """The transport among the ranks that train this rank's lane; all, if it trains none."""
        if self.islands.size == 1 or self.lane is None:
            return self.transport
        return PartOfRanks(self.transport, self.islands.ranks(self.lane.number))

    @property
    def part_ranks(self) -> Sequence[int]:
        """The ranks that have the same part of the model as :attr:`whole`: all, unless sharded."""
        if self.is_sharded and self.islands.size > 1 and self.lane is not None:
            return self.islands.ranks(self.lane.number)
        return range(self.transport.size)

    @property
    def servers(self) -> int:
        """The number of servers, which are the first ranks."""
        return self.islands.servers

    @property
    def workers(self) -> int:
        """The number of ranks that compute."""
        return self.transport.size - self.servers

    @property
    def needs_all(self) -> str | None:
        """The algorithm if it requires every worker; None: the run can continue without some."""
        return self.options.algorithm if self.algorithm.needs_all(self.options) else None

    @property
    def is_server(self) -> bool:
        """Whether this rank is a server."""
        return self.transport.rank < self.servers

    @property
    def is_real(self) -> bool:
        """Whether the model has values; simulated computation uses only its sizes."""
        return self.options.compute == "real"


def make_context(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    numbers: Sequence[int] = (),
    project: Sequence[Projection] = (),
    parts: Sequence[str] = (),
    uncut: int = 0,
) -> Context:
    """Return this rank's context; every rank calls it.

    Raises:
        UserError: more servers than the model has parts, or too few workers or nodes; projections
            that the algorithm cannot apply.
    """
    whole = all_or_none(transport, lambda: _make_replica(transport, options, module, parts))
    servers = options.servers if algorithm.has_servers else 0

    def make() -> Context:
        if not numbers:  # otherwise the run started with more
            check_workers(options, transport.size - servers)
        if whole.is_sharded:
            _check_sharded(transport, options, algorithm)
        islands = make_islands(transport, options, algorithm, servers, bool(numbers))

        def cut_model() -> Sequence[Lane]:
            return _cut(options, algorithm, module, whole, islands, project)

        lanes: Sequence[Lane]
        if isinstance(whole, Replica):
            lanes = cut_model()
        else:  # the same on all ranks of a simulation
            key = "lanes", id(module), servers, transport.size
            lanes = once(transport, key, cut_model)
        if whole.is_sharded:
            place = islands.lane(transport.rank)
            assert place is not None
            check_sharding(module, islands.size, place)
        rest = numbers, project, parts, uncut
        context = Context(transport, options, algorithm, module, whole, islands, lanes, *rest)
        _check_whole_parameters(context)
        return context

    return all_or_none(transport, make)


def _check_sharded(transport: Transport, options: RunOptions, algorithm: Algorithm) -> None:
    """Check that a run can train a model that FSDP has divided."""
    if not algorithm.islands:
        raise UserError(
            f"model: its parameters are divided by FSDP, and {algorithm.name} requires whole "
            "ones. Use an algorithm whose workers can be islands, such as ar-sgd, or leave "
            "fully_shard out."
        )
    if transport.shares_process or options.compute != "real":
        raise UserError(
            "model: its parameters are divided by FSDP, which requires a process for each rank. "
            "Simulate the model without fully_shard: a replicated island makes the same steps."
        )


def _cut(
    options: RunOptions,
    algorithm: Algorithm,
    module: nn.Module,
    whole: Replica | PhantomReplica,
    islands: Islands,
    project: Sequence[Projection] = (),
) -> Sequence[Lane]:
    """Return the lanes of a model for these islands.

    Raises:
        UserError: it has too few parameters for the lanes or servers.
    """
    servers = islands.servers // islands.lanes
    if whole.is_sharded:
        check_servers_of_parts(islands.servers, islands.size)
        sizes = options.bucket_mb, options.shard_mb
        held = ranges(module, islands.size)
        lanes = make_sharded_lanes(held, lambda numel: cut(numel, servers, *sizes))
        for lane in lanes:
            _check_servers(options, lane.layout.numel, lane.layout)
        return lanes
    layout = make_layout(options, algorithm, whole, servers, len(islands.members))
    if project:
        layout = between_parameters(layout, whole.sizes)
    _check_servers(options, whole.numel, layout)
    return make_lanes(layout, islands.lanes)


def former_lanes(context: Context, former: Islands) -> Sequence[Lane]:
    """Return the lanes of this run's model with the islands that wrote a checkpoint."""
    if former == context.islands:
        return context.lanes
    options, algorithm, module = context.options, context.algorithm, context.module
    return _cut(options, algorithm, module, context.whole, former, context.project)


def _check_whole_parameters(context: Context) -> None:
    """Check that nothing requires whole parameters where ranks have parts of each."""
    algorithm, options = context.algorithm, context.options
    if context.projections and implementation(algorithm).updates_parts:
        raise UserError(
            f"run.project() requires whole parameters on each rank, and {algorithm.name} "
            "updates a part of each layer on each. Use ar-sgd."
        )
    if len(context.lanes) == 1:
        return
    compression = f"--compression {options.compression}"
    for feature, is_used in (
        (compression, options.compression != "none"),
        ("run.project()", bool(context.projections)),
        ("--sharding layer", options.sharding == "layer"),
    ):
        if is_used:
            raise UserError(
                f"{options.island_flag} cannot be combined with {feature}, which requires whole "
                f"parameters: each rank of an island has one of {len(context.lanes)} parts. Leave "
                "one out."
            )


def _make_replica(
    transport: Transport, options: RunOptions, module: nn.Module, parts: Sequence[str]
) -> Replica | PhantomReplica:
    outside = outside_parts(module, parts)
    if options.compute == "real":
        return Replica(module, outside)
    _, sizes = once(transport, ("outline", id(module)), lambda: (module, outline(module)))
    return PhantomReplica(sum(sizes.layers), sizes, outside)


def _check_servers(options: RunOptions, numel: int, layout: Layout) -> None:
    owners = {bucket.server for bucket in layout.buckets}
    if layout.servers and len(owners) < layout.servers:
        layers = ", of which no layer is split" if options.sharding == "layer" else ""
        raise UserError(
            f"--servers: expected at most {len(owners)} for a model of {numel} "
            f"parameters{layers}, got {layout.servers}; use fewer"
        )


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
    _broadcast(context.among if context.is_sharded else context.transport, context.whole.parameters)
    for parameter in context.module.parameters():
        if not parameter.requires_grad:
            parts = context.among if is_divided(parameter) else context.transport
            _broadcast(parts, local(parameter.detach()))
    for buffer in context.module.buffers():
        _broadcast(context.transport, buffer)
    if isinstance(context.replica, LaneReplica):
        context.replica.refresh()


def give_buffers(context: Context, is_new: bool) -> None:
    """Give the buffers of the first former worker to new ranks, after a failure."""
    if not context.is_real:
        return
    transport = context.transport
    are_new: list[bool] = broadcast(transport, gather(transport, is_new))
    former = [rank for rank in range(context.servers, transport.size) if not are_new[rank]]
    if not any(are_new) or not former:
        return
    for buffer in context.whole.buffers():
        flat = buffer.view(-1) if buffer.dim() == 0 else buffer
        values = flat.detach().cpu().clone().contiguous()
        broadcast_tensor(transport, values, former[0])
        if is_new:
            flat.copy_(values)


def share_buffers(context: Context, source: int) -> None:
    """Copy the buffers of rank ``source``, or of the next surviving one, to every rank."""
    transport, replica = context.transport, context.whole
    assert isinstance(replica, Replica)
    buffers = replica.named_buffers(context.module)
    facts = gather(transport, [list(buffer.shape) for buffer in buffers])
    root, shapes = broadcast(transport, _first_from(source, facts))
    for buffer, shape in zip(buffers, shapes, strict=True):
        if list(buffer.shape) != shape:  # training has changed it
            buffer.resize_(shape)
        _broadcast(transport, buffer, root)


def share_frozen(context: Context, source: int) -> None:
    """Copy the frozen parameters of a rank, as in :func:`share_buffers`, where others differ.

    A loop may change them itself, as those of a teacher that follows the trained model. Most stay
    as they are, and may be large. Those that FSDP has divided remain as they are on every rank.
    """
    transport = context.transport
    parameters = [p for p in context.module.parameters() if not p.requires_grad]
    frozen = [p.detach() for p in parameters if not is_divided(p)]
    if not frozen:
        return
    checksums = gather(transport, [checksum(each) for each in frozen])
    root, theirs = _first_from(source, checksums) if checksums else (0, [])
    known = [each for each in checksums if each is not None]
    changed = [i for i, each in enumerate(theirs) if any(mine[i] != each for mine in known)]
    root, changed = broadcast(transport, (root, changed))
    for index in changed:
        _broadcast(transport, frozen[index], root)


def _first_from(source: int, facts: Sequence[Any]) -> tuple[int, Any]:
    """Return the first rank from ``source`` on that has sent a fact, and the fact; at rank 0."""
    return next(((r, f) for r, f in enumerate(facts) if r >= source and f is not None), (0, None))


def _broadcast(transport: Transport, tensor: Tensor, root: int = 0) -> None:
    tensor = tensor.view(-1) if tensor.dim() == 0 else tensor
    staged = tensor.detach().cpu().contiguous()
    broadcast_tensor(transport, staged, root)
    if staged.data_ptr() != tensor.data_ptr():
        tensor.copy_(staged)


def collect_model(context: Context, role: Role, without: Sequence[int] = ()) -> Tensor | None:
    """Return the global model, flat, on every rank, and copy it into the replica.

    If the model is sharded, each rank gets its part. None with simulated computation. The ranks
    ``without`` hold no part of the model.
    """
    rank, replica = context.transport.rank, context.whole
    if not isinstance(replica, Replica):
        return None
    transport = context.among if context.is_sharded else context.transport
    ranks = context.part_ranks
    vector = torch.zeros(replica.parameters.numel(), dtype=full(replica.parameters.dtype))
    for bucket, part, holders in context.pieces:
        mine, weight = vector[part], 0.0
        if rank in holders and rank not in without:
            mine.copy_(role.part(bucket))
            weight = role.weight(bucket)
        if len(holders) == 1:
            _broadcast(transport, mine, ranks.index(holders[0]))
        else:  # the weighted mean; in float64, that of equal models is exact
            total = torch.tensor([weight], dtype=torch.float64)
            weighted = mine * total
            allreduce_tensors(transport, total, weighted)
            mine.copy_(weighted / total)
    device = replica.parameters.device
    context.projections.apply(vector, device)  # the mean of projected models may not satisfy them
    replica.set(vector)
    return vector


def measuring_island(context: Context) -> Sequence[int]:
    """Return the ranks of the first island without a failed member; every rank calls it."""
    members, failed = context.islands.members, context.transport.failed
    whole = [number for number, island in enumerate(members) if not failed.intersection(island)]
    return members[broadcast(context.transport, next(iter(whole), 0))]


def joined_parameters(context: Context) -> dict[str, Tensor]:
    """Return the whole parameters of a sharded model by name, on rank 0's host; elsewhere nothing.

    The first rank of each lane sends its parts, one parameter after another.
    """
    if not context.is_sharded:
        return {}
    transport, joined = context.transport, {}
    roots = [context.islands.ranks(lane.number)[0] for lane in context.lanes]
    for name, parameter in context.module.state_dict().items():
        if not is_divided(parameter):
            continue
        part = local(parameter.detach()).cpu().contiguous()
        if transport.rank == COORDINATOR:
            others = [receive_object(transport, root, Tag.STATE) for root in roots[1:]]
            joined[name] = torch.cat([part, *others])
        elif transport.rank in roots:
            transport.wait(*send_object(transport, part, COORDINATOR, Tag.STATE))
    return joined


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
