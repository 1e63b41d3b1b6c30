"""The bottleneck of a run, its description, and the change that would remove it."""

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
"""Share of the ideal speedup above which a run has no bottleneck but computation."""
AMONG = 0.9
"""Links with at least this fraction of the busiest link's load are named with it."""
Kind = Literal["links", "slowest", "waiting", "computing"]


@dataclass(frozen=True)
class Bottleneck:
    """The limit on a run's throughput.

    Attributes:
        text: its description.
        relief: fields of a simulation's options that double the scarce resource; empty if no
            resource is scarce.
        change: description of that change.
    """

    kind: Kind
    text: str
    relief: dict[str, Any]
    change: str


def classify(
    candidate: Candidate, timed: TimedRun, on: ClusterTraits, batch_size: int
) -> tuple[Kind, str]:
    """Return the kind of a timed run's bottleneck, and a short label for a table."""
    if timed.rate * on.step >= REACHED * on.ideal * batch_size:
        return "computing", "computation"
    if timed.load >= FULL:
        return "links", f"network, {percent(timed.load)}"
    waits = ALGORITHMS[candidate.algorithm].lockstep or candidate.has_islands
    if waits and max(on.slowdowns) > 1 + NOTED:
        return "slowest", "slowest worker"
    if timed.waiting > NOTED:
        return "waiting", f"waiting, {percent(timed.waiting)}"
    return "computing", "computation"


def find(candidate: Candidate, timed: TimedRun, on: ClusterTraits, options: Any) -> Bottleneck:
    """Return the bottleneck of a timed run with ``options``."""
    kind, _ = classify(candidate, timed, on, options.batch_size)
    if kind == "links":
        return _links(timed.links, candidate, options)
    if kind == "slowest":
        return _slowest(on)
    if kind == "waiting":
        return _waiting(timed, options)
    text = f"computation; workers compute {percent(1 - timed.waiting)} of the time"
    if timed.load >= FULL:  # by an algorithm that adapts its messages to the bandwidth
        text = f"computation, although the link of host {timed.links[0].host} has no headroom"
    return Bottleneck("computing", text, {}, "")


def _links(links: Sequence[LinkUse], candidate: Candidate, options: Any) -> Bottleneck:
    most = links[0].used
    full = [link for link in links if link.used >= AMONG * most]
    hosts = sorted({link.host for link in full})
    is_both = len({link.way for link in full}) == 2
    way = "in both directions" if is_both else {"in": "inbound", "out": "outbound"}[links[0].way]
    cluster = options.cluster
    are_all = len(hosts) == cluster.hosts
    names = "all hosts" if are_all else _names(hosts)
    subject = f"the links of {names} are" if len(hosts) > 1 else f"the link of {names} is"
    text = f"{subject} saturated {way} (busy {percent(most)} of the time)"
    if candidate.servers and not candidate.spread and hosts == [0] and not are_all:
        text += ", as all servers are there"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * cluster.bandwidth_gbit}
    if cluster.links or not are_all:
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
    names, verb = f"worker {workers[0]}", "limits"
    if len(workers) > 1:
        names, verb = f"workers {workers[0]} to {workers[-1]}", "limit"
    text = f"{names}, slower by a factor of {slowest:g}, {verb} all workers"
    even = {worker: slow for worker, slow in enumerate(on.slowdowns) if 1 < slow < slowest}
    return Bottleneck("slowest", text, {"slowdown": even}, f"{names} as fast as the others")


def _waiting(timed: TimedRun, options: Any) -> Bottleneck:
    text = f"workers wait {percent(timed.waiting)} of the time for messages"
    if timed.links:
        text += f", although no link is busy for more than {percent(timed.load)} of it"
    relief: dict[str, Any] = {"cluster.bandwidth_gbit": 2 * options.cluster.bandwidth_gbit}
    if options.cluster.links:
        relief["cluster.links"] = {h: 2 * rate for h, rate in options.cluster.links.items()}
    return Bottleneck("waiting", text, relief, "twice the bandwidth of all hosts")
