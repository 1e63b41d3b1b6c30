"""The bottleneck of a run, in words, and the change that would show it."""

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
        relief: fields of a simulation's options with twice of what there is too little of; none
            if there is nothing to double.
        change: that change in words.
    """

    kind: Kind
    text: str
    relief: dict[str, Any]
    change: str


def find(candidate: Candidate, timed: TimedRun, on: ClusterTraits, options: Any) -> Bottleneck:
    """The bottleneck of a timed run with ``options``."""
    is_full = bool(timed.links) and timed.links[0].used >= FULL
    if timed.rate * on.step >= REACHED * on.ideal * options.batch_size:
        text = "nothing: workers compute all the time"
        if is_full:  # by what sends as much as there is room for
            text += f", though the link of host {timed.links[0].host} has no room for more"
        return Bottleneck("computing", text, {}, "")
    if is_full:
        return _links(timed.links, candidate, options)
    waits = ALGORITHMS[candidate.algorithm].lockstep or candidate.has_nodes
    if waits and max(on.slowdowns) > 1 + NOTED:
        return _slowest(on)
    if timed.waiting > NOTED:
        return _waiting(timed, options)
    computing = percent(1 - timed.waiting)
    text = f"workers compute {computing} of the time, and nothing holds them up"
    return Bottleneck("computing", text, {}, "")


def _links(links: Sequence[LinkUse], candidate: Candidate, options: Any) -> Bottleneck:
    most = links[0].used
    full = [link for link in links if link.used >= AMONG * most]
    hosts = sorted({link.host for link in full})
    is_both = len({link.way for link in full}) == 2
    way = "both ways" if is_both else {"in": "inwards", "out": "outwards"}[links[0].way]
    cluster = options.cluster
    everyone = len(hosts) == cluster.hosts
    names = "all hosts" if everyone else _names(hosts)
    which = f"link of {names} is" if names == f"host {hosts[0]}" else f"links of {names} are"
    text = f"the {which} full {way}, {percent(most)} of the time"
    if candidate.servers and hosts == [0] and not everyone:
        text += ", where the servers are"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * cluster.bandwidth_gbit}
    if cluster.links or not everyone:
        doubled = {host: 2 * cluster.link_gbit(host) for host in hosts}
        relief = {"cluster.links": {**cluster.links, **doubled}}
    return Bottleneck("links", text, relief, f"twice the bandwidth of {names}")


def _names(hosts: Sequence[int]) -> str:
    if len(hosts) == 1:
        return f"host {hosts[0]}"
    shown = [str(host) for host in hosts[:4]] + (["..."] if len(hosts) > 4 else [])
    return f"hosts {', '.join(shown[:-1])} and {shown[-1]}"


def _slowest(on: ClusterTraits) -> Bottleneck:
    slowest = max(on.slowdowns)
    workers = [worker for worker, slow in enumerate(on.slowdowns) if slow == slowest]
    who, sets = f"worker {workers[0]}", "sets"
    if len(workers) > 1:
        who, sets = f"workers {workers[0]} to {workers[-1]}", "set"
    text = f"{who}, {slowest:g} times slower, {sets} the pace of all"
    even = {worker: slow for worker, slow in enumerate(on.slowdowns) if 1 < slow < slowest}
    return Bottleneck("slowest", text, {"slowdown": even}, f"{who} as fast as the others")


def _waiting(timed: TimedRun, options: Any) -> Bottleneck:
    text = f"workers wait {percent(timed.waiting)} of the time for messages"
    if timed.links:
        text += f", though no link is used more than {percent(timed.links[0].used)} of the time"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * options.cluster.bandwidth_gbit}
    if options.cluster.links:
        relief["cluster.links"] = {h: 2 * rate for h, rate in options.cluster.links.items()}
    return Bottleneck("waiting", text, relief, "twice the bandwidth of all hosts")
