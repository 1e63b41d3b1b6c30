"""Who trains: the ranks of a group, and who follows when some of them are lost.

The first rank of the next group is known to all as soon as they know who is lost. All tell it
what they bring, and it tells them who is in. A rank that is lost meanwhile is found by whoever
waits for it, and they begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from aladdin_mpi.control.exchange import receive_object, send_object
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import LostError, PeerFailedError
from aladdin_mpi.transport.base import Transport, surviving_ranks, wait_ended


@dataclass(frozen=True)
class Membership:
    """The ranks of a group by their numbers in the job, the servers first.

    Attributes:
        number: counts the groups from 1.
        ranks: of the group.
        servers: how many of them are servers.
        spares: ranks that wait for a place.
        full: with how many servers and workers the run began.
    """

    number: int
    ranks: tuple[int, ...]
    servers: int
    spares: tuple[int, ...]
    full: tuple[int, int]

    @property
    def workers(self) -> int:
        """How many of the ranks compute."""
        return len(self.ranks) - self.servers

    def place(self, rank: int) -> int | None:
        """A rank's number in the group; None: it is not in it."""
        return self.ranks.index(rank) if rank in self.ranks else None


def begin(size: int, servers: int, spares: int) -> Membership:
    """The first group of a job of so many ranks."""
    active = size - spares
    full = servers, active - servers
    return Membership(1, tuple(range(active)), servers, tuple(range(active, size)), full)


def next_membership(
    before: Membership, living: Collection[int], is_over: bool = False
) -> Membership:
    """The group that follows when only ``living`` are left.

    Spare ranks take the places of those who are lost, unless the training ``is_over``. The last
    server's place is taken by a worker where there is no spare.

    Raises:
        LostError: no worker, or no rank for a server, is left.
    """
    servers = [rank for rank in before.ranks[: before.servers] if rank in living]
    workers = [rank for rank in before.ranks[before.servers :] if rank in living]
    waiting = [rank for rank in before.spares if rank in living]
    spares = [] if is_over else waiting
    full_servers, full_workers = before.full
    if full_servers and not servers and len(workers) == 1:
        spares = waiting
    if full_servers and not servers and (spares or len(workers) > 1):
        servers = [(spares or workers).pop(0)]
    for places, full in ((workers, full_workers), (servers, full_servers)):
        while spares and len(places) < full:
            places.append(spares.pop(0))
    if not workers or (full_servers and not servers):
        lost = ", ".join(str(rank) for rank in before.ranks if rank not in living)
        raise LostError(f"rank {lost} has failed, and too few ranks are left to train on")
    return replace(
        before,
        number=before.number + 1,
        ranks=(*servers, *workers),
        servers=len(servers),
        spares=tuple(rank for rank in waiting if rank not in (*servers, *workers)),
    )


@dataclass(frozen=True)
class NextGroup:
    """The next group, and what its ranks bring.

    Attributes:
        brought: by every rank of the job that is left.
    """

    members: Membership
    brought: dict[int, Any]


def rendezvous(
    base: Transport,
    before: Membership,
    mine: Any,
    patience: float,
    is_coming: Callable[[int], bool] = lambda rank: False,
) -> NextGroup:
    """Agree on the group that follows ``before``; every rank that is left calls it.

    Args:
        base: the transport among all ranks of the job.
        before: this rank's last group.
        mine: what this rank brings, as a checkpoint can hold it.
        patience: seconds after which a rank that does not come is taken as lost; 0: none is.
        is_coming: whether a rank has said that it lives; it may be in the middle of a long step.

    Raises:
        LostError: too few ranks are left.
    """
    while True:
        leader = next_membership(before, surviving_ranks(base)).ranks[0]
        try:
            if base.rank == leader:
                return _lead(base, before, mine, patience or None, is_coming)
            return _follow(base, leader, before.number, mine)
        except PeerFailedError:
            continue  # the leader is lost, or somebody who was one in this rank's eyes


def _follow(base: Transport, leader: int, number: int, mine: Any) -> NextGroup:
    wait_ended(base, send_object(base, [number, mine], leader, Tag.JOIN))
    told = receive_object(base, leader, Tag.MEMBERS)
    members = Membership(**{k: _frozen(v) for k, v in told["members"].items()})
    for rank in surviving_ranks(base):
        if rank not in told["brought"]:
            base.exclude(rank)  # it did not come in time
    return NextGroup(members, told["brought"])


def _lead(
    base: Transport,
    before: Membership,
    mine: Any,
    patience: float | None,
    is_coming: Callable[[int], bool],
) -> NextGroup:
    number, brought = before.number, {base.rank: mine}
    for rank in [rank for rank in surviving_ranks(base) if rank != base.rank]:
        try:
            comes = partial(is_coming, rank)
            other, theirs = receive_object(base, rank, Tag.JOIN, patience, comes)
        except PeerFailedError:
            continue
        except TimeoutError:
            base.exclude(rank)
            continue
        number, brought[rank] = max(number, other), theirs
    living = set(brought).difference(base.failed)
    is_over = any(each.get("ended_at") is not None for each in brought.values())
    members = next_membership(replace(before, number=number), living, is_over)
    told = {"members": asdict(members), "brought": brought}
    for rank in brought:
        if rank != base.rank and rank not in base.failed:
            send_object(base, told, rank, Tag.MEMBERS)
    return NextGroup(members, brought)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
