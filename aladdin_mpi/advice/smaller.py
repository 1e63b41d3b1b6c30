"""A cluster of many workers, looked at as one of fewer hosts.

Virtual time takes a processor's time for every message, and with servers there are as many as
workers times servers. What a link carries in a step hardly depends on how many hosts of its kind
there are, if there are as many workers to a server. So first runs are those of a part of the hosts;
only the best are run on all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from aladdin_mpi.advice.candidates import Candidate, Ground, ground
from aladdin_mpi.advice.options import Request
from aladdin_mpi.advice.timed_run import Link, Timed
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import SimulateOptions

MANY = 128
"""Workers from which a smaller cluster stands for a larger one."""
ROUNDED = 0.3
"""Share by which the number of servers may be off for it."""


@dataclass(frozen=True)
class Smaller:
    """A cluster with a part of the hosts.

    Attributes:
        request: the same on the smaller cluster; ``ground`` is of it, ``whole`` of the larger one.
        stands_for: for each host of the larger one, that which stands for it.
    """

    request: Request
    ground: Ground
    whole: Ground
    stands_for: Sequence[int]

    def candidate(self, candidate: Candidate) -> Candidate | None:
        """With its part of the servers; None: they cannot be divided so."""
        wanted = candidate.servers * self.ground.hosts / self.whole.hosts
        servers = round(wanted)
        if abs(servers - wanted) > ROUNDED * wanted:
            return None
        return replace(candidate, servers=servers, spread=candidate.spread and servers > 1)

    def growth(self, candidate: Candidate) -> float:
        """How many times as many messages a step has on the larger one."""
        workers = self.whole.workers / self.ground.workers
        return workers * (self.whole.hosts / self.ground.hosts if candidate.servers else 1.0)

    def scaled(self, candidate: Candidate, timed: Timed) -> Timed:
        """What a run on the smaller one says of the larger one."""
        ratio = self.whole.ideal / self.ground.ideal
        if ALGORITHMS[candidate.algorithm].lockstep:
            ratio = self.whole.in_step / self.ground.in_step
        used = {(link.host, link.way): link.used for link in timed.links}
        links = [
            Link(host, way, used[place, way])
            for way in ("out", "in")
            for host, place in enumerate(self.stands_for)
            if (place, way) in used
        ]
        links.sort(key=lambda link: -link.used)
        return replace(timed, rate=timed.rate * ratio, links=tuple(links))


def smaller(request: Request, on: Ground) -> Smaller | None:
    """A part of the cluster with hosts of all kinds; None: it is small, or has too many kinds."""
    options = request.simulated({"compute": "timed"})
    if on.workers <= MANY or not _is_regular(options, on):
        return None
    parts = -(-on.workers // MANY)
    kept = _kept(_kinds(on), parts)
    hosts = sorted({host for those in kept.values() for host in those})
    if not 2 <= len(hosts) <= 1.5 * on.hosts / parts:
        return None
    places = {host: place for place, host in enumerate(hosts)}
    stands_for = [0] * on.hosts
    for those, some in kept.items():
        for number, host in enumerate(those):
            stands_for[host] = places[some[number * len(some) // len(those)]]
    part = request.on(_fields(options, on, hosts))
    return Smaller(part, ground(part.simulated({"compute": "timed"}), on.megabytes), on, stands_for)


def _is_regular(options: SimulateOptions, on: Ground) -> bool:
    """Whether every host has as many workers, one host's after the other's."""
    cluster, each = options.cluster, on.on_host[0]
    blocks = tuple(worker // each for worker in range(on.workers)) if each else ()
    return (
        len(set(on.on_host)) == 1
        and not (cluster.deaths or cluster.pauses)
        and cluster.worker_hosts in ((), blocks)
    )


def _kinds(on: Ground) -> list[tuple[int, ...]]:
    """Hosts that are alike, by their links and how slow their workers are, to a tenth."""
    each = on.on_host[0]
    found: dict[Any, list[int]] = {}
    for host in range(on.hosts):
        slow = on.slowdowns[host * each : (host + 1) * each]
        kind = f"{on.links[host]:.1e}", tuple(round(factor, 1) for factor in slow)
        found.setdefault(kind, []).append(host)
    return [tuple(hosts) for hosts in found.values()]


def _kept(kinds: Sequence[tuple[int, ...]], parts: int) -> dict[tuple[int, ...], list[int]]:
    """Of each kind its part of the hosts, evenly taken, and one at least."""
    kept = {}
    for hosts in kinds:
        count = max(1, round(len(hosts) / parts))
        kept[hosts] = [hosts[number * len(hosts) // count] for number in range(count)]
    return kept


def _fields(options: SimulateOptions, on: Ground, hosts: Sequence[int]) -> dict[str, Any]:
    each, cluster = on.on_host[0], options.cluster
    rates = {place: cluster.link_gbit(host) for place, host in enumerate(hosts)}
    slow = {
        place * each + number: on.slowdowns[host * each + number]
        for place, host in enumerate(hosts)
        for number in range(each)
    }
    return {
        "workers": len(hosts) * each,
        "cluster.hosts": len(hosts),
        "cluster.worker_hosts": (),
        "cluster.links": {p: rate for p, rate in rates.items() if rate != cluster.bandwidth_gbit},
        "slowdown": {worker: factor for worker, factor in slow.items() if factor > 1},
    }
