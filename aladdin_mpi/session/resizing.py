"""Reading a checkpoint with other numbers of workers and servers than those that wrote it.

The first rank of each lane reads the parts of the former lanes that had values of its own, one
after another, merges them and broadcasts what the ranks of the lane need; without islands that is
rank 0. Each worker reads the rest of its state (random numbers, buffers, the training loop's state)
from the part of the previous worker with its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import (
    all_or_none,
    broadcast,
    broadcast_tensor,
    gather,
    packed,
    unpacked,
)
from aladdin_mpi.errors import LostError
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.lanes import Lane
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedState, numbers
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.process import console
from aladdin_mpi.session.context import Context, former_lanes
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.session.lane_change import Counts, LaneCut, counts_of_lane
from aladdin_mpi.session.plan import Origin
from aladdin_mpi.session.session import traffic_in
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import LEFT_OUT, SAMPLES, Role

PIECE = 1 << 26
"""Bytes of one broadcast."""
COUNTERS = ("samples", "received", "staleness", "from_failed", "applied")
"""Counters in the merged state of servers."""
Read = Callable[[int], "dict[str, Any] | None"]
"""Function that returns the state of a former rank; None for a lost one."""


class StateAssembly:
    """Merge of the states of all ranks on rank 0, by the rules of its role.

    For a lost server, the workers have the model, and a replica has the rest.

    Args:
        read: returns a rank's state, called in rank order.
        former: the ranks that wrote the states.
        lane: the lane of these ranks whose states are merged.
        context: context of this run.
        role: this rank's role.
    """

    def __init__(
        self,
        read: Read,
        former: Islands,
        lane: Lane,
        context: Context,
        role: Role,
    ) -> None:
        like = context.whole.parameters
        self._layout = layout = lane.layout
        self._part = read
        self._algorithm = context.algorithm
        ranks = former.ranks(lane.number)
        servers = former.servers // former.lanes
        self._ranks_of_servers, self._ranks_of_workers = ranks[:servers], ranks[servers:]
        self._role = role
        self._lost_buckets: list[Bucket] = []
        self._replicas: dict[int, Mapping[str, Any]] = {}
        self._weights = torch.zeros(len(layout.buckets), dtype=torch.float64)
        device = "meta" if like.is_meta else "cpu"
        self._model = torch.zeros(layout.numel, dtype=like.dtype, device=device)

    @property
    def has_server(self) -> bool:
        """Whether a server's state was found, or there are no servers; once merged."""
        return len(self._lost_buckets) < len(self._layout.buckets)

    def merged(self) -> MergedState:
        """Return the merged state of all ranks of the checkpoint.

        Raises:
            UserError: a part is missing or damaged, or the workers' states have no common value.
        """
        servers = self._servers()
        merged, count = MergedState(self._model, {}), 0
        for worker, rank in enumerate(self._ranks_of_workers):
            part = self._read(rank)
            merged.counts.append(None if part is None else _counts(part))
            if part is None:
                continue
            state, count = part["role"], count + 1
            self._add_model(state, state.pop("parameters"))
            known = merged.worker if count > 1 else None
            workers = len(self._ranks_of_workers)
            merged.worker = self._role.merge_worker(known, state, count, worker, workers)
        if not count:
            raise LostError("no surviving rank has a worker's state to continue from")
        if isinstance(self._role, ServerAlgorithm):
            whole = self._role.merged(servers, self._layout)
            merged.server = self._role.without_states(merged) if whole is None else whole
            self._add_replicas(self._role, merged.server)
        return merged

    def _servers(self) -> list[dict[str, Any] | None]:
        """Return the servers' states without the model; None for a lost server."""
        parts = [self._read(rank) for rank in self._ranks_of_servers]
        for server, part in enumerate(parts):
            if part is None:
                self._lost_buckets += self._layout.owned_by(server)
                continue
            for index, own in part["role"]["server"].pop("values").items():
                self._model[self._layout.buckets[index].part] = own
        return [None if part is None else part["role"] for part in parts]

    def _read(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's part, after storing its replicas."""
        part = self._part(rank)
        for buckets in {} if part is None else part.get("mirrors", {}).values():
            self._replicas |= buckets
        return part

    def _add_replicas(self, role: ServerAlgorithm, merged: dict[str, Any]) -> None:
        """Restore a lost server's optimizer state, and a centre, from its replica."""
        for bucket in self._lost_buckets:
            replica = self._replicas.get(bucket.index)
            if replica is None:
                continue
            if self._algorithm.has_centre:
                self._model[bucket.part] = replica["values"]
            role.put_replica(merged, replica["optimizer"], bucket, self._model)

    def _add_model(self, state: dict[str, Any], parameters: Tensor) -> None:
        """Add a worker's model to the weighted mean that forms the global model."""
        buckets: Sequence[Bucket] = self._layout.buckets
        weights = self._role.weights_in(state, len(buckets))
        if self._algorithm.holder == "servers":
            buckets, weights = self._lost_buckets, [1.0] * len(self._lost_buckets)
        # With progress, models differ between outer steps, and a failure may come then.
        are_equal = self._algorithm.holder == "first" and self._algorithm.all_reduces != "progress"
        if are_equal and self._weights.any():
            return
        for bucket, weight in zip(buckets, weights, strict=True):
            self._weights[bucket.index] += weight
            mine, theirs = self._model[bucket.part], parameters[bucket.part]
            mine.add_(theirs - mine, alpha=weight / self._weights[bucket.index].item())


def merge_lanes(
    read: Read, former: Islands, context: Context, role: Role
) -> tuple[MergedState, MergedState]:
    """Return the merged state of the ranks that trained a rank's lane; every rank calls it.

    The lane's first rank merges, and broadcasts the result among the ranks of the lane.

    Args:
        read: returns the state of a former rank.
        former: the former ranks.
        context: context of this run.
        role: this rank's role.

    Returns:
        The merged state, empty for a rank without a lane; and one that only has the counts of all
        former workers, by rank.

    Raises:
        UserError, RefusedError: see :meth:`StateAssembly.merged`; or a state cannot be divided
            differently.
    """
    transport, lane = context.transport, context.lane
    among = context.among if lane is not None else None
    merges = among is not None and among.rank == 0
    found = all_or_none(
        transport, lambda: _merge_lane(read, former, context, role) if merges else None
    )
    counts = _joined_counts(transport, former, {} if found is None else found.counts, read)
    known = gather(transport, None if found is None else found.counters)
    counters = broadcast(transport, _joint([each for each in known if each is not None]))
    of_all = MergedState(torch.empty(0), {}, counts=[each for _, each in sorted(counts.items())])
    if among is None or lane is None:
        return MergedState(torch.empty(0), {}), of_all
    if found is not None:
        found.merged.server |= counters
        lanes = lane.number, context.islands.lanes
        found.merged.counts = counts_of_lane(*lanes, former, found.source, counts)
    return share(among, None if found is None else found.merged), of_all


class _Merged(NamedTuple):
    """A lane's merged state.

    Attributes:
        merged: the state, without counts.
        source: a former lane that had values of the lane.
        counts: of the workers of all these lanes, by rank.
        counters: of their servers; None without any, or if all are lost.
    """

    merged: MergedState
    source: int
    counts: dict[int, Counts | None]
    counters: Counts | None


def _merge_lane(read: Read, former: Islands, context: Context, role: Role) -> _Merged:
    merged: MergedState | None = None
    counts: dict[int, Counts | None] = {}
    counters: list[Counts] = []
    sources: list[int] = []
    assert context.lane is not None
    for lane in former_lanes(context, former):
        cut = LaneCut(context.lane, lane)
        if cut.is_empty:
            continue
        assembly = StateAssembly(read, former, lane, context, role)
        found = assembly.merged()
        counts |= zip(former.workers(lane.number), found.counts, strict=True)
        sources.append(lane.number)
        if found.server and assembly.has_server:
            counters.append({name: found.server[name] for name in COUNTERS})
        merged = found if cut.is_whole else cut.add(merged, found)
    assert merged is not None
    return _Merged(merged, sources[0], counts, _joint(counters) or None)


def _joint(counters: Sequence[Counts]) -> Counts:
    """Return the counters of the servers of several lanes, as those of several servers of one.

    A gradient that one of them has not applied is not applied.
    """
    if not counters:
        return {}
    joint: Counts = ParameterServer.merged(counters)
    from_survivors = min(each["applied"] - each["from_failed"] for each in counters)
    return {**joint, "applied": from_survivors + joint["from_failed"]}


def _joined_counts(
    transport: Transport, former: Islands, counts: Mapping[int, Counts | None], read: Read
) -> dict[int, Counts | None]:
    """Return the counts of all former workers, of which each rank knows some."""
    joined = dict(pair for pairs in gather(transport, [*counts.items()]) for pair in pairs or ())
    if transport.rank == 0:
        for rank in (rank for island in former.members for rank in island if rank not in joined):
            state = read(rank)  # it had no lane
            joined[rank] = None if state is None else _counts(state)
    return dict(broadcast(transport, [*joined.items()]))


def _counts(part: dict[str, Any]) -> Counts:
    return numbers(traffic_in(part) | part["role"])


def taken(merged: MergedState) -> tuple[int | None, ...]:
    """Return the samples taken by each worker; None for a failed one if unknown.

    A failed worker counts as having taken all samples granted to it. Some may be lost, but the
    budget does not grant them again.
    """
    granted: Sequence[int | None] = merged.granted or [None] * len(merged.counts)
    return tuple(
        own if each is None else int(each[SAMPLES] - each.get(LEFT_OUT, 0))
        for each, own in zip(merged.counts, granted, strict=True)
    )


def share(transport: Transport, merged: MergedState | None) -> MergedState:
    """Broadcast rank 0's merged state."""
    data = torch.empty(0, dtype=torch.uint8)
    if merged is not None:
        data = packed(vars(merged))
    size = broadcast(transport, data.numel())
    if merged is None:
        data = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, PIECE):
        broadcast_tensor(transport, data[start : start + PIECE], 0)
    # Rank 0's copy too, as ranks of one process must not share what they change.
    return MergedState(**unpacked(data))


def report_resize(
    algorithm: Algorithm, before: Origin, now: Origin, lr: LearningRate, island: int
) -> None:
    """Print a change of the number of ranks, or of the size of islands, for the user."""
    was = replace(lr, workers=before.workers).scale
    rate = f"is multiplied by {lr.scale:.4g} instead of {was:.4g}"
    ranks = [describe_ranks(each.workers, each.servers) for each in (now, before)]
    if island != before.ranks.size:
        sizes = (island, before.ranks.size)
        ranks = [f"{each} in islands of {size}" for each, size in zip(ranks, sizes, strict=True)]
    texts = [
        f"resumed with {ranks[0]} instead of {ranks[1]}",
        algorithm.on_resize,
        f"the learning rate {'stays' if lr.scale == was else rate} "
        f"(--lr-scaling {lr.options.lr_scaling})",
    ]
    console.say(f"aladdin_mpi: {'; '.join(filter(None, texts))}")


def describe_ranks(workers: int, servers: int) -> str:
    """Return the numbers of workers and servers as text."""
    beside = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    return f"{workers} worker{'s' * (workers > 1)}{beside}"
