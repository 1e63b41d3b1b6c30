"""A checkpoint read by other numbers of workers and servers than those that wrote it.

Rank 0 reads all parts, one after another, puts them together and gives the others what all need.
What each worker has of its own besides (random numbers, buffers, the state of the user's loop)
it reads itself, from the part of the former worker with its number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import implementation
from aladdin_mpi.control.exchange import broadcast, broadcast_tensor, packed, unpacked
from aladdin_mpi.errors import LostError
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import console
from aladdin_mpi.run.plan import Origin
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.merged_state import (
    COUNTS,
    MergedState,
    join_servers,
    mean_state,
    put_mirrored,
    scale_held_back,
    without_servers,
)

PIECE = 1 << 26
"""Bytes that are sent at a time."""


class StateAssembly:
    """Puts the states of all ranks together at rank 0.

    Of a server that is lost the workers tell what its buckets were, and a mirror what only it
    knew.

    Args:
        part: a rank's state, asked for in their order; None: it is lost.
        origin: whose they are.
        layout: theirs.
        replica: of the module.
    """

    def __init__(
        self,
        part: Callable[[int], dict[str, Any] | None],
        algorithm: Algorithm,
        options: RunOptions,
        origin: Origin,
        layout: Layout,
        replica: Replica | PhantomReplica,
    ) -> None:
        self._part = part
        self._algorithm = algorithm
        self._options = options
        self._origin = origin
        self._layout = layout
        self._replica = replica
        self._orphans: list[Bucket] = []
        self._mirrors: dict[int, Mapping[str, Any]] = {}
        self._weights = torch.zeros(len(layout.buckets), dtype=torch.float64)
        like = replica.parameters
        device = "meta" if like.is_meta else "cpu"
        self._model = torch.zeros(layout.numel, dtype=like.dtype, device=device)

    def merged(self, workers: int) -> MergedState:
        """All ranks of the checkpoint as one, for so many workers.

        Raises:
            UserError: a part is missing or damaged, or there is no mean of the workers' states.
        """
        parts = [self._noted(self._part(rank)) for rank in range(self._origin.servers)]
        servers = [None if part is None else part["role"] for part in parts]
        for state in filter(None, servers):
            self._take_values(state["server"].pop("values"))
        lost = [server for server, state in enumerate(servers) if state is None]
        self._orphans = [bucket for server in lost for bucket in self._layout.owned_by(server)]
        mean, counts, count = None, [], 0
        for number, part in self._workers():
            counts.append(None if part is None else _counts(part))
            if part is None:
                continue
            state, count = part["role"], count + 1
            self._take_model(state, state.pop("parameters"))
            self._spread_own(state, number, mean)
            mean = mean_state(mean, state, count) if mean is not None else state
        if mean is None:
            raise LostError("no worker's state is left to go on from")
        own = getattr(self._options, self._algorithm.group, None)
        if getattr(own, "normalize", "") == "none":
            # Gradients are not divided by the number of workers: their sum is to stay.
            scale_held_back(mean, count / workers)
        joined = join_servers(servers, self._layout)
        if servers and not joined:
            joined = without_servers(counts)
        self._take_mirrored(joined)
        return MergedState(self._model, mean, joined, counts)

    def _workers(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        for worker in range(self._origin.workers):
            yield worker, self._noted(self._part(self._origin.servers + worker))

    def _noted(self, part: dict[str, Any] | None) -> dict[str, Any] | None:
        """A rank's part, whose mirrors are kept."""
        if part is not None:
            for buckets in part.get("mirrors", {}).values():
                self._mirrors |= buckets
        return part

    def _take_mirrored(self, joined: dict[str, Any]) -> None:
        """What only a lost server knew, from its mirror: the optimizer's state, and a centre."""
        for bucket in self._orphans:
            told = self._mirrors.get(bucket.index)
            if told is None:
                continue
            if self._algorithm.has_centre:
                self._model[bucket.part] = told["values"]
            if told["optimizer"] is not None:
                whole = joined["optimizer"]
                joined["optimizer"] = put_mirrored(whole, told["optimizer"], bucket, self._model)

    # -- the global model -------------------------------------------------------------------
    def _take_values(self, values: dict[int, Tensor]) -> None:
        for index, own in values.items():
            self._model[self._layout.buckets[index].part] = own

    def _take_model(self, state: dict[str, Any], parameters: Tensor) -> None:
        """A worker's model, as far as it makes up the global one: a weighted mean."""
        weights = state.get("alpha", [state.get("w", 1.0)] * len(self._layout.buckets))
        buckets: Sequence[Bucket] = self._layout.buckets
        if self._algorithm.holder == "servers":
            buckets, weights = self._orphans, [1.0] * len(self._orphans)
        if self._algorithm.holder == "first" and self._weights.any():
            return
        for bucket, weight in zip(buckets, weights, strict=True):
            self._weights[bucket.index] += weight
            mine, theirs = self._model[bucket.part], parameters[bucket.part]
            mine.add_(theirs - mine, alpha=weight / self._weights[bucket.index].item())

    def _spread_own(self, state: dict[str, Any], worker: int, mean: dict[str, Any] | None) -> None:
        """A momentum that is dealt to the workers, in its places of one that is as long as all."""
        own_places = implementation(self._algorithm).own_places
        if own_places is None or state["optimizer"]["velocity"] is None:
            return
        places = own_places(self._replica, self._origin.workers, worker, self._options)
        whole = torch.zeros_like(self._model) if mean is None else mean["optimizer"]["velocity"]
        if not whole.is_meta:
            whole[places] = state["optimizer"]["velocity"]
        # The mean of it and itself stays what it is.
        state["optimizer"]["velocity"] = whole.clone() if mean is not None else whole


def _counts(part: dict[str, Any]) -> dict[str, float]:
    role = part["role"]
    found = {**part, **role["worker"], **role.get("outbox", {})}
    return {name: found.get(name, 0) for name in COUNTS}


def share(transport: Transport, merged: MergedState | None) -> MergedState:
    """Rank 0's, at every rank."""
    data = torch.empty(0, dtype=torch.uint8)
    if merged is not None:
        data = packed(vars(merged))
    size = broadcast(transport, data.numel())
    if merged is None:
        data = torch.empty(size, dtype=torch.uint8)
    for start in range(0, size, PIECE):
        broadcast_tensor(transport, data[start : start + PIECE], 0)
    # Rank 0's own, too: ranks of one process must not share what they change.
    return MergedState(**unpacked(data))


def tell(algorithm: Algorithm, before: Origin, now: Origin, lr: LearningRate) -> None:
    """Tell the user of a change of the number of ranks."""
    was = replace(lr, workers=before.workers).scale
    rate = f"is multiplied by {lr.scale:.4g} instead of {was:.4g}"
    texts = [
        f"resumed with {_ranks(now)} instead of {_ranks(before)}",
        algorithm.on_resize,
        f"the learning rate {'stays' if lr.scale == was else rate} "
        f"(--lr-scaling {lr.options.lr_scaling})",
    ]
    console.say(f"aladdin_mpi: {'; '.join(filter(None, texts))}")


def _ranks(of: Origin) -> str:
    workers, servers = of.workers, of.servers
    beside = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    return f"{workers} worker{'s' * (workers > 1)}{beside}"
