"""The division of a job's ranks into servers and islands, and of the model among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import gcd
from typing import Any, Literal

from aladdin_mpi.control.tags import COORDINATOR
from aladdin_mpi.errors import ExcludedError, LostError, UserError
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import guard
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.worker.island import host_groups, share


@dataclass(frozen=True)
class Islands:
    """The ranks that train, by islands: each is one worker of the algorithm.

    The model has ``lanes`` equal parts. Lane j is trained by the j-th members of all islands and by
    every ``lanes``-th server from the j-th one on. Further members of an island own no lane.

    Attributes:
        servers: number of servers, which are the first ranks.
        members: the ranks of each island.
        lanes: number of lanes.
    """

    servers: int
    members: Sequence[Sequence[int]]
    lanes: int = 1

    @classmethod
    def of_single_ranks(cls, servers: int, ranks: int) -> Islands:
        """Return islands of one worker each."""
        return cls(servers, [[rank] for rank in range(servers, ranks)])

    def as_json(self) -> dict[str, Any]:
        """Return the entries for a checkpoint's manifest; none for islands of one rank."""
        return {} if self.size == 1 else {"islands": self.members, "lanes": self.lanes}

    @property
    def size(self) -> int:
        """The number of ranks of an island."""
        return len(self.members[0])

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """Island and place in it of each rank that computes."""
        return {
            rank: (number, place)
            for number, island in enumerate(self.members)
            for place, rank in enumerate(island)
        }

    def number(self, rank: int) -> int:
        """Return the number of a rank's island, from 0."""
        return self._places[rank][0]

    def island(self, rank: int) -> Sequence[int]:
        """Return the members of a rank's island."""
        return self.members[self.number(rank)]

    def mates(self, rank: int) -> list[int]:
        """Return the other members of a rank's island."""
        return [each for each in self.island(rank) if each != rank]

    def lane(self, rank: int) -> int | None:
        """Return the number of a rank's lane; None: it owns none."""
        place = rank % self.lanes if rank < self.servers else self._places[rank][1]
        return place if place < self.lanes else None

    def workers(self, lane: int = 0) -> list[int]:
        """Return the ranks that are the algorithm's workers in a lane."""
        return [island[lane] for island in self.members]

    def divided(self, granted: Sequence[int]) -> list[int]:
        """Return each rank's samples, given those granted to the first member of each island."""
        found = list(granted)
        for island in self.members if found else ():
            total = sum(granted[rank] for rank in island)
            for place, rank in enumerate(island):
                found[rank] = share(total, place, len(island))
        return found

    def ranks(self, lane: int) -> list[int]:
        """Return the ranks that train a lane, servers first."""
        return [*range(lane, self.servers, self.lanes), *self.workers(lane)]


def excuse(transport: Transport, islands: Islands) -> str:
    """Return why this rank leaves the run, as a member of its island has failed; else ""."""
    me = transport.rank
    mates = islands.mates(me) if me >= islands.servers else []
    for mate in transport.failed.intersection(mates):
        return leaving(transport, me, mate)
    return ""


def leaving(transport: Transport, rank: int, lost: int) -> str:
    """Return the message of a rank that leaves the run because rank ``lost`` has failed."""
    mine, other = (transport.original_ranks[each] for each in (rank, lost))
    return (
        f"rank {mine} (host {transport.host_names[rank]}) exits, because rank {other} of its "
        "island has failed; the run continues without this island"
    )


def fail_together(transport: Transport, islands: Islands) -> None:
    """Exclude the other members of an island from the run when one fails; every rank calls it.

    Over MPI these leave the run by themselves, with an ExcludedError or, if they wait for the
    failed rank, by :data:`.guard.excuse`. If the island has rank 0, the surviving islands form a
    new group, or the run ends.
    """

    def lose(rank: int) -> None:
        if rank < islands.servers:
            return  # the run ends, or continues in a new group
        mates, forms_group = islands.mates(rank), transport.is_revoked(without=rank)
        if rank == COORDINATOR and not forms_group:
            return  # the run ends
        if COORDINATOR in mates and not forms_group:
            number, host = transport.original_ranks[rank], transport.host_names[rank]
            raise LostError(f"rank {number} (host {host}) has failed, in the island of rank 0")
        if transport.rank in mates and not transport.shares_process:
            if forms_group:
                return  # this rank leaves when the others meet
            raise ExcludedError(excuse(transport, islands))
        for mate in mates:
            if mate not in transport.failed:
                transport.exclude(mate)

    if islands.size > 1 and transport.survives:
        if not transport.shares_process:
            guard.excuse = partial(excuse, transport, islands)
        transport.on_failure(lose)


def equal_groups(
    hosts: Sequence[int], servers: int, island: int | Literal["node"], flag: str
) -> list[list[int]]:
    """Return the ranks of each island.

    Args:
        hosts: the host of each rank.
        servers: number of servers, which are the first ranks.
        island: size of an island; "node": all workers of a host.
        flag: the option that has set it.

    Raises:
        UserError: islands would differ in size.
    """
    size = None if island == "node" else island
    groups = host_groups(hosts, servers, size)
    _check_equal(groups, size, flag)
    return groups


def _check_equal(
    groups: Sequence[Sequence[int]], size: int | None, flag: str, remedy: str = ""
) -> None:
    counts = sorted({len(group) for group in groups})
    if len(counts) == 1 and size in (None, counts[0]):
        return
    number = "the same number of workers" if size is None else f"{size} workers, or a multiple,"
    found = " and ".join(map(str, counts)) or "none"
    raise UserError(
        f"{flag} requires {number} on every node, got {found}. Start as many on each host "
        f"(servers, which are the first ranks, do not count){remedy}."
    )


def check_servers_of_parts(servers: int, parts: int) -> None:
    """Check that each part of a model that an island divides has equally many servers.

    Raises:
        UserError: ``servers`` is not a multiple of the number of parts.
    """
    if servers % parts:
        raise UserError(
            f"--servers: expected a multiple of the {parts} parts into which islands divide the "
            f"model, got {servers}; use {-(-servers // parts) * parts}"
        )


def make_islands(
    transport: Transport,
    options: RunOptions,
    algorithm: Algorithm,
    servers: int,
    has_begun: bool = False,
) -> Islands:
    """Return the islands of a run; by default, each rank that computes is one.

    A run that ``has_begun`` continues with any number of islands.

    Raises:
        UserError: islands would differ in size, or be too few.
    """
    flag, largest = options.island_flag, options.island_size
    if not flag:
        size = transport.size
        key = "islands", servers, size
        return once(transport, key, lambda: Islands.of_single_ranks(servers, size))
    if options.node_sums:
        members = host_groups(transport.hosts, servers, largest)
        _check_equal(members, None, flag, ", or add --node-size with a number that divides all")
    else:
        members = equal_groups(transport.hosts, servers, options.island, flag)
    size = len(members[0])
    lanes = gcd(size, servers) if servers else size
    if options.node_sums:
        lanes = 1
    least = 1 if has_begun else max(algorithm.least_workers, servers // lanes)
    if len(members) < least:
        raise UserError(
            f"{flag} requires at least {least} islands for --algorithm {algorithm.name}"
            + (f" with {servers} servers" if servers > 1 else "")
            + f", got {len(members)}. Use more workers or fewer servers, or leave {flag} out."
        )
    return Islands(servers, members, lanes)
