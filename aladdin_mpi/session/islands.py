"""The division of a job's ranks into servers and islands, and of the model among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.worker.island import host_groups


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

    def island(self, rank: int) -> Sequence[int]:
        """Return the members of a rank's island."""
        return self.members[self._places[rank][0]]

    def lane(self, rank: int) -> int | None:
        """Return the number of a rank's lane; None: it owns none."""
        place = rank % self.lanes if rank < self.servers else self._places[rank][1]
        return place if place < self.lanes else None

    def workers(self, lane: int = 0) -> list[int]:
        """Return the ranks that are the algorithm's workers in a lane."""
        return [island[lane] for island in self.members]

    def ranks(self, lane: int) -> list[int]:
        """Return the ranks that train a lane, servers first."""
        return [*range(lane, self.servers, self.lanes), *self.workers(lane)]


def make_islands(
    transport: Transport, options: RunOptions, algorithm: Algorithm, servers: int
) -> Islands:
    """Return the islands of a run; by default, each rank that computes is one.

    Raises:
        UserError: islands would differ in size, or be too few.
    """
    flag, largest = options.island_flag, options.island_size
    if not flag:
        size = transport.size
        key = "islands", servers, size
        return once(transport, key, lambda: Islands.of_single_ranks(servers, size))
    members = host_groups(transport, servers, largest)
    counts = sorted({len(island) for island in members})
    given = options.island if isinstance(options.island, int) else None
    if len(counts) > 1 or given not in (None, 1, counts[0]):
        multiple = f"{given} workers, or a multiple," if given not in (None, 1) else ""
        number = multiple or "the same number of workers"
        divided = ", or add --node-size with a number that divides all" * (flag == "--node-sums")
        raise UserError(
            f"{flag} requires {number} on every node, got {' and '.join(map(str, counts))}. Start "
            f"as many on each host (servers, which are the first ranks, do not count){divided}."
        )
    lanes = gcd(counts[0], servers) if servers else counts[0]
    least = max(algorithm.least_workers, servers // lanes)
    if len(members) < least:
        raise UserError(
            f"{flag} requires at least {least} nodes for --algorithm {algorithm.name}"
            + (f" with {servers} servers" if servers > 1 else "")
            + f", got {len(members)}. Use more hosts, or leave {flag} out."
        )
    return Islands(servers, members, lanes)
