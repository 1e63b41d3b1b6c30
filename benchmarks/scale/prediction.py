"""Predict how far an algorithm scales, from its bytes and the links' rates alone.

The prediction sums the bytes that cross the busiest host's link in one step of all workers. Two
bounds follow: all of this traffic overlaps with computing, or none of it does. Measured values
should lie between them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from statistics import NormalDist

from benchmarks.scale.cases import HOST_FIRST, JITTER, WORKERS_PER_HOST, Curve

KNEE = 0.8
"""Share of the ideal speedup that defines the knee."""
_PI, _EASGD_TAU, _LOCAL_STEPS, _GOSGD_P = 4, 2, 8, 0.01
_POINTS_PER_OCTAVE = 64

UP_DOWN = {
    "aladdin": (1.0, 1 / _PI),
    "bsp": (1.0, 1.0),
    "asp": (1.0, 1.0),
    "shat": (1.0, 1.0),
    "ssp": (1.0, 1.0),
    "easgd": (1 / _EASGD_TAU, 1 / _EASGD_TAU),
    "eamsgd": (1 / _EASGD_TAU, 1 / _EASGD_TAU),
}
"""Traffic of a worker to and from the servers in a step, in models. `ashl` and `adsp` choose how
often they exchange, so nothing is predicted for them."""
BARRIERS = {"bsp": 1, HOST_FIRST: 1, "ar-sgd": 1, "multistep": 1, "local-sgd": _LOCAL_STEPS}
"""Number of steps after which all workers wait for the slowest."""


@dataclass(frozen=True)
class Load:
    """The busiest host's traffic in one step of every worker, in models."""

    into: float
    out: float


def load(curve: Curve, workers: float) -> Load | None:
    """Return the load of a step; None if an algorithm decides itself how much it sends."""
    hosts = max(1.0, workers / WORKERS_PER_HOST)
    if hosts == 1:
        return Load(0.0, 0.0)
    if curve.algorithm in UP_DOWN:
        up, down = UP_DOWN[curve.algorithm]
        return _of_servers(workers, WORKERS_PER_HOST, min(curve.servers, hosts), up, down)
    if curve.algorithm == HOST_FIRST:
        return _of_servers(hosts, 1, min(curve.servers, hosts), 1.0, 1.0)
    one_way = _of_peers(curve.algorithm, workers, hosts)
    return None if one_way is None else Load(one_way, one_way)


def _of_servers(senders: float, here: int, servers: float, up: float, down: float) -> Load:
    """Return the load of a server's host with ``here`` senders, which also use other servers."""
    share, elsewhere = (senders - here) / servers, here * (servers - 1) / servers
    return Load(up * share + down * elsewhere, down * share + up * elsewhere)


def _of_peers(algorithm: str, workers: float, hosts: float) -> float | None:
    """Return the load with equal traffic in both directions; neighbours share a host."""
    abroad = WORKERS_PER_HOST * (workers - WORKERS_PER_HOST) / (workers - 1)
    one_way: dict[str, Callable[[], float]] = {
        "ar-sgd": lambda: 2 * (hosts - 1) / hosts,
        "local-sgd": lambda: 2 * (hosts - 1) / hosts / _LOCAL_STEPS,
        "multistep": lambda: WORKERS_PER_HOST * (1 - 1 / hosts) + 1,
        "sgp": lambda: _exponential(workers),
        "osgp": lambda: _exponential(workers),
        "gosgd": lambda: _GOSGD_P * abroad,
        "ad-psgd": lambda: abroad,
    }
    return one_way[algorithm]() if algorithm in one_way else None


def _exponential(workers: float) -> float:
    """Return the mean load over the hops 1, 2, 4, ... of eight neighbours on a host."""
    inside = int(log2(WORKERS_PER_HOST))
    hops = max(log2(workers), inside + 1e-9)
    return (WORKERS_PER_HOST - 1 + WORKERS_PER_HOST * (hops - inside)) / hops


def efficiency(curve: Curve, workers: float, overlapped: bool) -> float | None:
    """Return the share of the ideal speedup that the links allow, with full or no overlap."""
    found = load(curve, workers)
    if found is None:
        return None
    steps = BARRIERS.get(curve.algorithm)
    seconds = curve.model.seconds * (slowest(workers, steps) if steps else 1.0)
    second_per_model = curve.model.megabytes * 8e-3 / curve.gbit
    if overlapped:
        step = max(seconds, max(found.into, found.out) * second_per_model)
    else:
        step = seconds + (found.into + found.out) * second_per_model
    share = curve.model.seconds / step
    if curve.servers == 1 and not steps:
        # Workers whose server is on their host do not use the link and do not wait.
        return (WORKERS_PER_HOST + (workers - WORKERS_PER_HOST) * share) / workers
    return share


def slowest(workers: float, steps: int) -> float:
    """Return the slowest worker's time for these steps relative to the mean (Blom's formula)."""
    place = NormalDist().inv_cdf((workers - 0.375) / (workers + 0.25))
    return 1 + JITTER / steps**0.5 * place


def predicted_knee(curve: Curve, overlapped: bool) -> Knee | None:
    """Return the knee by :func:`efficiency`; None: nothing is predicted."""
    first, last = log2(min(curve.workers)), log2(max(curve.workers))
    count = round((last - first) * _POINTS_PER_OCTAVE)
    numbers = [2 ** (first + i / _POINTS_PER_OCTAVE) for i in range(count + 1)]
    points = [(n, efficiency(curve, n, overlapped)) for n in numbers]
    sure = [(n, value) for n, value in points if value is not None]
    return knee(sure) if len(sure) == len(points) else None


@dataclass(frozen=True)
class Knee:
    """A number of workers, or a bound: the knee is ``beyond`` it (1) or before it (-1)."""

    workers: float
    beyond: int = 0

    def __str__(self) -> str:
        return f"{('', '> ', '< ')[self.beyond]}{self.workers:.0f}"


def knee(points: list[tuple[float, float]]) -> Knee:
    """Return where the efficiency first falls below :data:`KNEE`, interpolated over log2.

    Args:
        points: workers, ascending, and share of the ideal speedup.
    """
    before, above = points[0]
    if above < KNEE:
        return Knee(before, -1)
    for workers, value in points[1:]:
        if value < KNEE:
            part = (above - KNEE) / (above - value)
            return Knee(before * (workers / before) ** part)
        before, above = workers, value
    return Knee(before, 1)
