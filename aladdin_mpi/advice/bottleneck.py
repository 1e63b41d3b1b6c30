"""What holds a run up, in words, and the change that would show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aladdin_mpi.advice.candidate_search import FULL, NOTED
from aladdin_mpi.advice.candidates import Candidate, ClusterTraits
from aladdin_mpi.advice.timed_run import LinkUse, TimedRun
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.process.console import percent

REACHED = 0.97
"""Share of the ideal from which nothing holds a run up."""
AMONG = 0.9
"""Links that have so much of the busiest one's share are named with it."""
Kind = Literal["links", "slowest", "waiting", "computing"]


@dataclass(frozen=True)
class Bottleneck:
    """What decides how fast a run is.

    Attributes:
        text: in a sentence.
        relief: fields of a simulation's options with twice of what there is too little of; none
            where there is nothing to double.
        change: that change in words.
    """

    kind: Kind
    text: str
    relief: dict[str, Any]
    change: str


def find(candidate: Candidate, timed: TimedRun, on: ClusterTraits, options: Any) -> Bottleneck:
    """The bottleneck of a timed run with ``options``."""
    slowest = max(on.slowdowns)
    if timed.rate * on.step >= REACHED * on.ideal * options.batch_size:
        return _nothing(timed)
    computing = 1 - timed.waiting
    busiest = timed.links[0] if timed.links else None
    if busiest is not None and busiest.used >= FULL:
        return _links(timed.links, candidate, options)
    waits = ALGORITHMS[candidate.algorithm].lockstep or candidate.has_nodes
    if waits and slowest > 1 + NOTED:
        return _slowest(on, slowest)
    if timed.waiting > NOTED:
        return _waiting(timed, busiest, options)
    text = f"workers compute {percent(computing)} of the time, and nothing holds them up"
    return Bottleneck("computing", text, {}, "")


def _nothing(timed: TimedRun) -> Bottleneck:
    """It is as fast as can be; what sends as much as there is room for fills links all the same."""
    text = "nothing: workers compute all the time"
    if timed.links and timed.links[0].used >= FULL:
        text += f", though the link of host {timed.links[0].host} has no room for more"
    return Bottleneck("computing", text, {}, "")


def _links(links: Sequence[LinkUse], candidate: Candidate, options: Any) -> Bottleneck:
    most = links[0].used
    full = [link for link in links if link.used >= AMONG * most]
    hosts = sorted({link.host for link in full})
    ways = {link.way for link in full}
    way = "both ways" if len(ways) == 2 else {"in": "inwards", "out": "outwards"}[links[0].way]
    cluster = options.cluster
    everyone = len(hosts) == cluster.hosts
    which = "the links of all hosts are" if everyone else _named(hosts)
    text = f"{which} full {way}, {percent(most)} of the time"
    if candidate.servers and not everyone and set(hosts) <= {0}:
        text += ", where the servers are"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * cluster.bandwidth_gbit}
    if cluster.links or not everyone:
        named = hosts if not everyone else range(cluster.hosts)
        doubled = {host: 2 * cluster.link_gbit(host) for host in named}
        relief = {"cluster.links": {**cluster.links, **doubled}}
    change = f"twice the bandwidth of {'all hosts' if everyone else _names(hosts)}"
    return Bottleneck("links", text, relief, change)


def _names(hosts: Sequence[int]) -> str:
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = [str(host) for host in hosts[:4]] + (["..."] if len(hosts) > 4 else [])
    return f"hosts {', '.join(shown[:-1])} and {shown[-1]}"


def _named(hosts: Sequence[int]) -> str:
    if len(hosts) == 1:
        return f"the link of {_names(hosts)} is"
    return f"the links of {_names(hosts)} are"


def _slowest(on: ClusterTraits, slowest: float) -> Bottleneck:
    workers = [worker for worker, slow in enumerate(on.slowdowns) if slow == slowest]
    who = f"worker {workers[0]}" if len(workers) == 1 else f"workers {workers[0]} to {workers[-1]}"
    pace = "sets" if len(workers) == 1 else "set"
    text = f"{who}, {slowest:g} times slower, {pace} the pace of all"
    even = {worker: slow for worker, slow in enumerate(on.slowdowns) if 1 < slow < slowest}
    return Bottleneck("slowest", text, {"slowdown": even}, f"{who} as fast as the others")


def _waiting(timed: TimedRun, busiest: LinkUse | None, options: Any) -> Bottleneck:
    used = (
        f", though no link is used more than {percent(busiest.used)} of the time" if busiest else ""
    )
    text = f"workers wait {percent(timed.waiting)} of the time for messages{used}"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * options.cluster.bandwidth_gbit}
    links = {host: 2 * rate for host, rate in options.cluster.links.items()}
    if links:
        relief["cluster.links"] = links
    return Bottleneck("waiting", text, relief, "twice the bandwidth of all hosts")
