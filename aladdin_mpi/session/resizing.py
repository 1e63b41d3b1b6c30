"""Reading a checkpoint with other numbers of workers and servers than those that wrote it.

Rank 0 reads all parts, one after another, merges them and broadcasts what all ranks need; with
islands, the first rank of each lane does so for its lane. Each worker reads the rest of its state
(random numbers, buffers, the training loop's state) from the part of the previous worker with its
number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import broadcast, broadcast_tensor, gather, packed, unpacked
from aladdin_mpi.errors import LostError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedState, numbers
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.process import console
from aladdin_mpi.session.context import Context, former_lane
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.session.plan import Origin
from aladdin_mpi.session.session import traffic_in
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import LEFT_OUT, SAMPLES, Role

PIECE = 1 << 26
"""Bytes of one broadcast."""


class StateAssembly:
    """Merge of the states of all ranks on rank 0, by the rules of its role.

    For a lost server, the workers have the model, and a replica has the rest.

    With islands, the first rank of each lane merges the states of this lane.

    Args:
        part: returns a rank's state, called in rank order; None for a lost one.
        former: the ranks that wrote the states.
        context: context of this run.
        role: this rank's role.

    Raises:
        UserError: the former lanes had other parts of the model.
    """

    def __init__(
        self,
        part: Callable[[int], dict[str, Any] | None],
        former: Islands,
        context: Context,
        role: Role,
    ) -> None:
        like, lane = context.whole.parameters, context.lane
        assert lane is not None
        self._layout = layout = former_lane(context, lane, former).layout
        self._part = part
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
        if self._algorithm.holder == "first" and self._weights.any():
            return
        for bucket, weight in zip(buckets, weights, strict=True):
            self._weights[bucket.index] += weight
            mine, theirs = self._model[bucket.part], parameters[bucket.part]
            mine.add_(theirs - mine, alpha=weight / self._weights[bucket.index].item())


def joined_counts(
    context: Context, former: Islands, merged: MergedState | None
) -> MergedState | None:
    """Return at rank 0 a state with the counts of all former workers, in rank order.

    Every rank calls it; ``merged`` is that of a lane on its first rank. Without islands it is
    that of all.
    """
    if former.size == 1:
        return merged
    lane = None if merged is None or context.lane is None else context.lane.number
    mine = None if lane is None or merged is None else [lane, merged.counts]
    counts: dict[int, dict[str, float] | None] = {}
    for number, of_lane in filter(None, gather(context.transport, mine)):
        counts |= dict(zip(former.workers(number), of_lane, strict=True))
    if context.transport.rank:
        return None
    return MergedState(torch.empty(0), {}, counts=[counts[rank] for rank in sorted(counts)])


def _counts(part: dict[str, Any]) -> dict[str, float]:
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


def report_resize(algorithm: Algorithm, before: Origin, now: Origin, lr: LearningRate) -> None:
    """Print a change of the number of ranks for the user."""
    was = replace(lr, workers=before.workers).scale
    rate = f"is multiplied by {lr.scale:.4g} instead of {was:.4g}"
    ranks = [describe_ranks(each.workers, each.servers) for each in (now, before)]
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
