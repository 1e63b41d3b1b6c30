"""A cluster measured by all ranks of a job, in a bounded time; the findings are rank 0's.

The order: steps, as all ranks compute at once; what rank 0 can do alone; the network; messages
beside computing. What cannot be measured is missing from the findings, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aladdin_mpi.control.exchange import barrier, broadcast, gather
from aladdin_mpi.probing.cluster_file import Figure, figure
from aladdin_mpi.probing.links import (
    Flow,
    NetworkFigures,
    measure_network,
    memory_bandwidth,
    message_cost,
    spare_cores,
)
from aladdin_mpi.probing.steps import Overlap, Points, StepTimes, measure_overlap
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport

STEPS, NETWORK, INSIDE, MEMORY = 0.35, 0.4, 0.15, 0.03
"""Shares of the time: of the steps, the network between hosts and inside one, and the memory."""
ENOUGH = 0.85
"""Of the time has passed: no further pair of hosts is begun."""
STRAGGLES = 1.2
"""Whose step takes longer by this factor than the median rank's is slow, if the middle halves of
their steps lie apart as well: a busy machine alone makes medians differ."""
QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal distribution."""

TimeSteps = Callable[[float], StepTimes]
"""Takes steps for so many seconds; an error is this rank's alone."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's steps: their seconds, their jitter, and their shape."""

    seconds: Figure
    jitter: float
    forward: float
    backward: Points


@dataclass
class Measured:
    """All that was found; complete at rank 0.

    Attributes:
        hosts: the host of each rank.
        names: of the hosts.
        steps: of the ranks whose steps could be timed.
        failures: why those of the others could not.
        memory: GB/s of one process; None: not measured.
        message: microseconds that a process needs for one.
        spare: cores of rank 0's host that are left over, and all.
    """

    hosts: Sequence[int]
    names: Sequence[str]
    network: NetworkFigures
    steps: dict[int, RankSteps] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    memory: Figure | None = None
    message: Figure | None = None
    overlap: Overlap | None = None
    spare: tuple[int, int] | None = None

    @property
    def usual_step(self) -> Figure | None:
        """Seconds of a step of the median rank; None: nobody's was timed."""
        times = sorted((steps.seconds for steps in self.steps.values()), key=lambda t: t.value)
        return times[(len(times) - 1) // 2] if times else None

    def alike(self) -> list[RankSteps]:
        """The steps of the ranks that are not slow."""
        slow = self.stragglers()
        return [steps for rank, steps in self.steps.items() if rank not in slow]

    def stragglers(self) -> dict[int, float]:
        """The slow ranks, with their factors."""
        usual = self.usual_step
        if usual is None:
            return {}
        times = {rank: steps.seconds for rank, steps in self.steps.items()}
        return {
            rank: seconds.value / usual.value
            for rank, seconds in times.items()
            if seconds.value > STRAGGLES * usual.value and seconds.low > usual.high
        }


def measure(transport: Transport, time_steps: TimeSteps, seconds: float, cores: int) -> Measured:
    """Measure in about so many seconds; all ranks call it.

    Args:
        transport: over MPI, or virtual.
        time_steps: of this rank.
        seconds: for all of it. Steps that take long may take longer: a few have to be seen.
        cores: of this rank's host.

    Raises:
        WaitTimeoutError: a rank does not answer.
    """
    start = transport.now()
    names = [
        transport.host_names[transport.hosts.index(h)] for h in range(max(transport.hosts) + 1)
    ]
    found = Measured(transport.hosts, names, NetworkFigures(len(names)))
    _tell(transport, f"timing steps of {transport.size} rank{'s' * (transport.size > 1)}")
    _measure_steps(transport, found, time_steps, STEPS * seconds)
    _measure_own(transport, found, MEMORY * seconds, cores)
    hosts = len(names)
    _tell(transport, f"timing messages, {hosts} host{'s' * (hosts > 1)}")
    found.network = measure_network(
        transport,
        (NETWORK if hosts > 1 else INSIDE) * seconds,
        lambda: transport.now() - start < ENOUGH * seconds,
    )
    _measure_beside(transport, found)
    return found


def _tell(transport: Transport, text: str) -> None:
    if transport.rank == 0:
        console.say(f"aladdin_mpi: {text}")


def _measure_steps(
    transport: Transport, found: Measured, time_steps: TimeSteps, seconds: float
) -> None:
    barrier(transport)
    for rank, told in enumerate(gather(transport, _attempt(time_steps, seconds))):
        if isinstance(told, str):
            found.failures[rank] = told
        else:
            found.steps[rank] = _summarised(told)


def _attempt(time_steps: TimeSteps, seconds: float) -> Any:
    """The steps' times, or why there are none."""
    try:
        times = time_steps(seconds)
    except Exception as error:  # whatever a user's model raises
        first = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first}"
    return times.seconds, times.forward, times.backward


def _summarised(told: Any) -> RankSteps:
    seconds, forward, backward = told
    logarithms = figure([math.log(each) for each in seconds])
    jitter = (logarithms.high - logarithms.low) / QUARTILES
    return RankSteps(figure(seconds), jitter, forward, [(g, t) for g, t in backward])


def _measure_own(transport: Transport, found: Measured, seconds: float, cores: int) -> None:
    """What rank 0 finds alone, while the others wait."""
    found.spare = spare_cores(transport, cores)
    if transport.rank == 0:
        found.message = message_cost(transport)
        try:
            found.memory = memory_bandwidth(seconds)
        except RuntimeError:
            found.memory = None  # there is no memory for two vectors
    barrier(transport)


def _measure_beside(transport: Transport, found: Measured) -> None:
    pair = _two_ranks(transport.hosts)
    if pair is None:
        return
    network = found.network
    rate = network.alone.get((0, 1), network.local_rate)
    known = broadcast(transport, rate.value / 8e-9 if rate is not None else None)
    if known is not None:
        found.overlap = measure_overlap(transport, pair, known)


def _two_ranks(hosts: Sequence[int]) -> Flow | None:
    """The first ranks of two hosts, else two ranks of one."""
    if max(hosts) > 0:
        return hosts.index(0), hosts.index(1)
    return (0, 1) if len(hosts) > 1 else None
