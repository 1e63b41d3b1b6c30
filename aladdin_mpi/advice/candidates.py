"""Candidates for a cluster: algorithms with the options that affect their speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aladdin_mpi.advice.options import AdviceRequest
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun, busiest_first
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import (
    ALGORITHMS,
    Algorithm,
    AshlOptions,
    LocalSgdOptions,
    find_algorithm,
)
from aladdin_mpi.options.fields import kebab
from aladdin_mpi.options.run import SimulateOptions

NOT_ADVISED = ("multistep", "eamsgd")
"""multistep sums parts of layers, which a size does not define; eamsgd is as fast as easgd."""
EARLY = ("aladdin-ahead", "ar-sgd", "sgp", "aladdin", "local-sgd", "bsp")
"""Main algorithms of each kind, which run first among equals, as time may run out."""
BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5, "int2": 0.25}
"""Bytes of a value on the wire."""
CHOOSES_WIRE = ("aladdin-ahead", "aladdin-local")
"""Algorithms that choose the precision of each message themselves."""
GOSSIP = ("ad-psgd", "gosgd")
"""Algorithms that send a model to one other worker at a time, and more rarely over slow links."""
ADAPTIVE = ("aladdin", *CHOOSES_WIRE)
"""Algorithms that send less over slower links instead of waiting, and so learn less per sample."""
ROUNDS = (8, 16, 32, 64)
"""Steps between two exchanges that are tried, for the algorithms that exchange progress."""
SERVERS = 32
"""Most servers of a first run, whose cost is proportional to them; later runs have up to twice as
many."""


@dataclass(frozen=True)
class Candidate:
    """An algorithm with its options.

    Attributes:
        servers: their number; 0 for an algorithm without servers.
        spread: whether servers are distributed over the hosts; else all are on the first host.
        options: other fields of the run's options.
    """

    algorithm: str
    servers: int
    spread: bool
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> list[str]:
        """The command-line options of aladdin_mpi.train."""
        words = ["--algorithm", self.algorithm]
        if self.servers:
            words += ["--servers", str(self.servers)]
        for name, value in self.options:
            option = f"--{kebab(name.replace('.', '-'))}"
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [option] if value is True else [option, text]
        return words

    @property
    def key(self) -> str:
        """The command-line options as one string."""
        return " ".join(self.words)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a simulation's options."""
        placement = {"cluster.placement": "spread" if self.spread else "workers"}
        servers = {"servers": self.servers} if self.servers else {}
        return {"algorithm": self.algorithm, **servers, **placement, **dict(self.options)}

    @property
    def wire(self) -> str:
        """The wire format in the options; empty for the default."""
        return str(dict(self.options).get("wire", ""))

    @property
    def rounds(self) -> int:
        """The steps between two exchanges of progress; 0 for an algorithm that sends gradients."""
        own = dict(self.options)
        return int(own.get("diloco.steps", own.get("async_diloco.steps", 0)))

    @property
    def period(self) -> int:
        """Steps from one exchange to the next, if they are several; 0: it sends in every step."""
        return self.rounds or PERIODS.get(self.algorithm, 0)

    @property
    def has_islands(self) -> bool:
        """Whether the workers of a node act as one."""
        return "island" in dict(self.options)

    def describe(self) -> str:
        """Return a short description of the algorithm and its options."""
        return ", ".join(filter(None, [self.algorithm, self.settings]))

    @property
    def settings(self) -> str:
        """A short description of the options without the algorithm."""
        parts = []
        if self.servers:
            place = "" if self.servers == 1 else " spread" if self.spread else " on one host"
            parts.append(f"{self.servers} server{'s' * (self.servers > 1)}{place}")
        parts += [f"{self.rounds} steps per round"] if self.rounds else []
        parts += [self.wire] if self.wire else []
        parts += ["an island per node"] if self.has_islands else []
        return ", ".join(parts)


_ASHL = AshlOptions()
PERIODS = {
    "local-sgd": LocalSgdOptions().steps,
    "ashl": _ASHL.profile + _ASHL.coarse_steps,
}
"""See :attr:`Candidate.period`."""
REFERENCE = Candidate("ar-sgd", 0, False)
"""The baseline, which is always timed."""


@dataclass(frozen=True)
class ClusterTraits:
    """The properties of a cluster and a model on which candidates depend.

    Attributes:
        slowdowns: slowdown factor of each worker, 1 or more.
        on_host: number of workers on each host.
        links: bandwidth of each host's link in each direction, in bytes/s.
        megabytes: size of the model.
        step: time of a step, in seconds.
    """

    slowdowns: Sequence[float]
    on_host: Sequence[int]
    links: Sequence[float]
    megabytes: float
    step: float

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return len(self.on_host)

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.slowdowns)

    @property
    def ideal(self) -> float:
        """Ideal speedup over one worker, without any waiting."""
        return sum(1 / slow for slow in self.slowdowns)

    @property
    def in_step(self) -> float:
        """Speedup over one worker if all workers wait for the slowest."""
        return self.workers / max(self.slowdowns)

    @property
    def node(self) -> int:
        """Workers per host if hosts are alike and have several; else 0."""
        first = self.on_host[0]
        return first if len(set(self.on_host)) == 1 and first > 1 and self.hosts > 1 else 0


def ground(request: AdviceRequest, megabytes: float) -> ClusterTraits:
    """Return the traits of the request's cluster, for a model of this size in MB."""
    options = request.simulated({"compute": "timed"})
    cluster, workers = options.cluster, options.workers
    hosts = [cluster.host_of(worker, workers) for worker in range(workers)]
    if cluster.placement not in ("spread", "workers") and not cluster.worker_hosts:
        hosts = [worker // -(-workers // cluster.hosts) for worker in range(workers)]
    return ClusterTraits(
        [options.slowdown.get(worker, 1.0) for worker in range(workers)],
        [hosts.count(host) for host in range(cluster.hosts)],
        [cluster.link_gbit(host) / 8 * 1e9 for host in range(cluster.hosts)],
        megabytes,
        float(options.compute_time or 0.0),
    )


def names(requested: Sequence[str], workers: int) -> list[str]:
    """Return the algorithms to try; UserError if one is unknown, or none supports ``workers``."""
    known = [find_algorithm(name, "--algorithms").name for name in requested] or [
        name for name in sorted(ALGORITHMS) if name not in NOT_ADVISED
    ]
    usable = [name for name in known if ALGORITHMS[name].least_workers <= workers]
    if not usable:
        raise UserError(
            f"--algorithms: expected one that runs with {workers} workers, got "
            f"{' '.join(known)}; name others"
        )
    return list(dict.fromkeys(usable))


def plain(name: str, on: ClusterTraits) -> Candidate:
    """Return an algorithm with its defaults and a server on every host, up to :data:`SERVERS`.

    Algorithms that exchange progress have as few steps per round as the links permit.
    """
    servers = min(on.hosts, on.workers, SERVERS) if ALGORITHMS[name].has_servers else 0
    first = Candidate(name, servers, servers > 1)
    if name not in ROUND_OPTIONS:
        return first
    needed = BYTES[_in_rounds(first, ROUNDS[0]).wire] / 4 * link_steps(first, on)
    rounds = next((steps for steps in ROUNDS if steps >= needed), ROUNDS[-1])
    return _in_rounds(first, rounds)


def variants(name: str, on: ClusterTraits) -> Iterator[Candidate]:
    """Yield variants with other options, those that may be faster first."""
    algorithm = ALGORITHMS[name]
    first = plain(name, on)
    if name in ROUND_OPTIONS:
        for rounds in ROUNDS:
            if rounds > first.rounds:
                yield _in_rounds(first, rounds)
        return
    for wire in _wires(algorithm):
        yield _with(first, wire=wire)
    if on.node and algorithm.islands and on.hosts >= max(2, algorithm.least_workers):
        yield _with(first, island="node")
        for wire in _wires(algorithm)[:1]:
            yield _with(first, wire=wire, island="node")
    if first.servers > 1:
        more = {min(on.hosts, 2 * SERVERS)} if on.hosts > SERVERS else set()
        half = min(SERVERS, -(-on.hosts // 2))
        for servers in sorted({1, half, *more} - {first.servers}, reverse=True):
            yield Candidate(name, servers, servers > 1, first.options)


def _wires(algorithm: Algorithm) -> list[str]:
    if algorithm.auto_wire not in BYTES or algorithm.name in CHOOSES_WIRE:
        return []  # the algorithm chooses the format
    if algorithm.name == REFERENCE.algorithm:
        return ["int4", "int8", "bf16"]
    return ["int8"] * algorithm.quantises + ["bf16"] * algorithm.whole_models


def _diloco(rounds: int) -> dict[str, Any]:
    """Return options of DiLoCo with averaging, which is the fastest to a loss in short rounds."""
    return {
        "diloco.steps": rounds,
        "diloco.outer_lr": 1.0,
        "diloco.outer_momentum": 0.0,
        "wire": "int2",
    }


def _async_diloco(rounds: int) -> dict[str, Any]:
    return {
        "async_diloco.steps": rounds,
        "async_diloco.outer_lr": 1.0,
        "async_diloco.outer_momentum": 0.0,
        "wire": "int4",
    }


ROUND_OPTIONS = {"diloco": _diloco, "async-diloco": _async_diloco}
"""Options of the algorithms that exchange progress, by the steps of a round, as measured in
benchmarks/outer_advice.py."""


def _in_rounds(candidate: Candidate, rounds: int) -> Candidate:
    return replace(candidate, options=tuple(ROUND_OPTIONS[candidate.algorithm](rounds).items()))


def _with(candidate: Candidate, **options: Any) -> Candidate:
    mine = dict(candidate.options) | options
    return replace(candidate, options=tuple(sorted(mine.items())))


def link_steps(candidate: Candidate, on: ClusterTraits) -> float:
    """Return the steps that the busiest link takes for an fp32 gradient of every worker.

    Gradients are sent to the candidate's servers, to another worker, or in a ring of all workers.
    """
    if candidate.servers:
        seconds = max(max(arriving, leaving) for arriving, leaving in _crossings(candidate, on))
    elif candidate.algorithm in GOSSIP and on.hosts > 1:
        each = zip(on.on_host, on.links, strict=True)
        seconds = on.megabytes * 1e6 * max(workers / link for workers, link in each)
    else:
        ring = 2 * (on.workers - 1) / on.workers if on.hosts > 1 else 0.0
        seconds = ring * on.megabytes * 1e6 / min(on.links)
    return seconds / on.step


def bound(candidate: Candidate, on: ClusterTraits) -> float:
    """Return an upper bound of the speedup, by the slowest worker and the servers' links.

    The links count only for algorithms in which every gradient is sent to the servers.
    """
    algorithm = ALGORITHMS[candidate.algorithm]
    best = on.in_step if algorithm.lockstep else on.ideal
    sends_each = ("bsp", "asp", "ssp", "shat")
    if candidate.algorithm not in sends_each or not candidate.servers:
        return best
    value = BYTES.get(candidate.wire or algorithm.auto_wire, 0.5)
    seconds = value / 4 * max(arriving for arriving, _ in _crossings(candidate, on))
    return min(best, on.workers * on.step / seconds) if seconds else best


def _crossings(candidate: Candidate, on: ClusterTraits) -> Iterator[tuple[float, float]]:
    """Yield the seconds that each host's link is busy with gradients, arriving and leaving.

    Every worker sends one in fp32; those to servers on the same host do not use a link.
    """
    each = on.node if candidate.has_islands and on.node else 1
    senders = [count // each for count in on.on_host]
    hosts = on.hosts if candidate.spread else 1
    places = Counter(server % hosts for server in range(candidate.servers))
    for host, (link, own) in enumerate(zip(on.links, senders, strict=True)):
        share = places[host] / candidate.servers
        seconds = on.megabytes * 1e6 / link
        yield share * (sum(senders) - own) * seconds, (1 - share) * own * seconds


MANY = 128
"""Number of workers above which a smaller cluster represents a larger one."""
ROUNDED = 0.3
"""Largest relative error of the number of servers on the smaller cluster."""


@dataclass(frozen=True)
class ReducedCluster:
    """A smaller cluster with a part of the hosts, which represents a larger one.

    Attributes:
        request: on the smaller cluster, whose traits are ``ground``.
        whole: traits of the larger cluster.
        stands_for: for each host of the larger cluster, the host that represents it.
    """

    request: AdviceRequest
    ground: ClusterTraits
    whole: ClusterTraits
    stands_for: Sequence[int]

    def candidate(self, candidate: Candidate) -> Candidate | None:
        """Return the candidate with its part of the servers; None if they are not divisible."""
        wanted = candidate.servers * self.ground.hosts / self.whole.hosts
        servers = round(wanted)
        if abs(servers - wanted) > ROUNDED * wanted:
            return None
        return replace(candidate, servers=servers, spread=candidate.spread and servers > 1)

    def growth(self, candidate: Candidate) -> float:
        """Return the factor by which the larger cluster has more messages per step."""
        workers = self.whole.workers / self.ground.workers
        return workers * (self.whole.hosts / self.ground.hosts if candidate.servers else 1.0)

    def scaled(self, candidate: Candidate, timed: TimedRun) -> TimedRun:
        """Convert the figures of a run to the larger cluster."""
        ratio = self.whole.ideal / self.ground.ideal
        if ALGORITHMS[candidate.algorithm].lockstep:
            ratio = self.whole.in_step / self.ground.in_step
        used = {(link.host, link.way): link.used for link in timed.links}
        links = [
            LinkUse(host, way, used[place, way])
            for way in ("out", "in")
            for host, place in enumerate(self.stands_for)
            if (place, way) in used
        ]
        return replace(timed, rate=timed.rate * ratio, links=busiest_first(links))


def smaller(request: AdviceRequest, on: ClusterTraits) -> ReducedCluster | None:
    """Return a part of the cluster with hosts of all kinds; None if it is small or too diverse."""
    options = request.simulated({"compute": "timed"})
    if on.workers <= MANY or not _is_regular(options, on):
        return None
    parts = -(-on.workers // MANY)
    stands_for = _stand_ins(_kinds(on), parts)
    hosts = sorted(set(stands_for.values()))
    if not 2 <= len(hosts) <= 1.5 * on.hosts / parts:
        return None
    places = [hosts.index(stands_for[host]) for host in range(on.hosts)]
    part = request.on(_fields(options, on, hosts))
    return ReducedCluster(part, ground(part, on.megabytes), on, places)


def _is_regular(options: SimulateOptions, on: ClusterTraits) -> bool:
    """Return whether all hosts have the same number of workers, numbered host by host."""
    cluster, each = options.cluster, on.on_host[0]
    blocks = tuple(worker // each for worker in range(on.workers)) if each else ()
    return (
        len(set(on.on_host)) == 1
        and not (cluster.failures or cluster.pauses)
        and cluster.worker_hosts in ((), blocks)
    )


def _kinds(on: ClusterTraits) -> list[list[int]]:
    """Return groups of similar hosts, by bandwidth and slowdown to one decimal."""
    each = on.on_host[0]
    kinds: dict[Any, list[int]] = {}
    for host in range(on.hosts):
        slow = on.slowdowns[host * each : (host + 1) * each]
        kind = f"{on.links[host]:.1e}", tuple(round(factor, 1) for factor in slow)
        kinds.setdefault(kind, []).append(host)
    return list(kinds.values())


def _stand_ins(kinds: Sequence[Sequence[int]], parts: int) -> dict[int, int]:
    """Return the representative of each host: an even sample of each kind, at least one."""
    representatives: dict[int, int] = {}
    for hosts in kinds:
        count = max(1, round(len(hosts) / parts))
        kept = [hosts[number * len(hosts) // count] for number in range(count)]
        representatives |= {host: kept[n * count // len(hosts)] for n, host in enumerate(hosts)}
    return representatives


def _fields(options: SimulateOptions, on: ClusterTraits, hosts: Sequence[int]) -> dict[str, Any]:
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
