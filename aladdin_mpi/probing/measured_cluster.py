"""A cluster measured by all ranks of a job, as a file's sections, and what is printed of it.

The order of measuring: steps, as all ranks compute at once; what rank 0 can do alone; the network;
messages while ranks compute. What cannot be measured is left out, with the reason. The findings are
rank 0's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

from aladdin_mpi.control.exchange import all_or_none, barrier, broadcast, gather
from aladdin_mpi.errors import LostError, WaitTimeoutError
from aladdin_mpi.probing.cluster_file import (
    LINKS,
    SLOW,
    Figure,
    FileEntry,
    Section,
    check,
    check_free,
    figure,
    rendered,
    rounded,
    short,
    write_and_tell,
)
from aladdin_mpi.probing.links import (
    NetworkFigures,
    measure_network,
    memory_bandwidth,
    message_cost,
    spare_cores,
)
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.probing.steps import (
    Overlap,
    Points,
    ProbeTask,
    StepTimes,
    make_task,
    measure_overlap,
    time_steps,
)
from aladdin_mpi.process import console
from aladdin_mpi.process.console import percent
from aladdin_mpi.run.job import choose_device
from aladdin_mpi.run.placement import print_placement
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
    """One rank's steps: their seconds, jitter and shape."""

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
        spare: cores of rank 0's host that are left over, and all of them.
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
        """Seconds of a step of the median rank; None: no rank's was timed."""
        times = sorted((steps.seconds for steps in self.steps.values()), key=lambda t: t.value)
        return times[(len(times) - 1) // 2] if times else None

    def alike(self) -> list[RankSteps]:
        """The steps of the ranks that are not slow."""
        slow = self.stragglers()
        return [steps for rank, steps in self.steps.items() if rank not in slow]

    def stragglers(self) -> dict[int, float]:
        """The slow ranks, with their factors."""
        usual = self.usual_step
        times = {rank: steps.seconds for rank, steps in self.steps.items()}
        return {
            rank: seconds.value / usual.value
            for rank, seconds in times.items()
            if usual and seconds.value > STRAGGLES * usual.value and seconds.low > usual.high
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
    start, hosts = transport.now(), max(transport.hosts) + 1
    names = [transport.host_names[transport.hosts.index(host)] for host in range(hosts)]
    found = Measured(transport.hosts, names, NetworkFigures(hosts))
    _tell(transport, f"timing steps of {transport.size} rank{'s' * (transport.size > 1)}")
    _measure_steps(transport, found, time_steps, STEPS * seconds)
    _measure_own(transport, found, MEMORY * seconds, cores)
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
            times, forward, backward = told
            logarithms = figure([math.log(each) for each in times])
            jitter = (logarithms.high - logarithms.low) / QUARTILES
            shape = [(share, moment) for share, moment in backward]
            found.steps[rank] = RankSteps(figure(times), jitter, forward, shape)


def _attempt(time_steps: TimeSteps, seconds: float) -> Any:
    """The steps' times, or why there are none."""
    try:
        times = time_steps(seconds)
    except Exception as error:  # whatever a user's model raises
        first = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first}"
    return times.seconds, times.forward, times.backward


def _measure_own(transport: Transport, found: Measured, seconds: float, cores: int) -> None:
    """What rank 0 measures alone, while the others wait."""
    found.spare = spare_cores(transport, cores)
    if transport.rank == 0:
        found.message = message_cost(transport)
        try:
            found.memory = memory_bandwidth(seconds)
        except RuntimeError:
            found.memory = None  # there is no memory for two vectors
    barrier(transport)


def _measure_beside(transport: Transport, found: Measured) -> None:
    """Between the first ranks of two hosts, else between two ranks of one."""
    if transport.size == 1:
        return
    hosts, network = transport.hosts, found.network
    pair = (hosts.index(0), hosts.index(1)) if max(hosts) > 0 else (0, 1)
    rate = network.alone.get((0, 1), network.local_rate)
    known = broadcast(transport, rate.value / 8e-9 if rate is not None else None)
    if known is not None:
        found.overlap = measure_overlap(transport, pair, known)


# -- as a file's sections -----------------------------------------------------------------
ONE_HOST = "not measured: all ranks are on one host; start the probe on several"
ONE_EACH = "not measured: no host has two ranks; start several on each"
LEAST_JITTER = 1e-3
SHARED = 0.8
"""All hosts at once have less than this share of a pair's rate: the network is shared."""


def sections(found: Measured) -> list[Section]:
    """What the file says of it."""
    return [
        Section("hosts and workers", _hosts(found), _named(found)),
        Section("network", _network(found)),
        Section("steps", _steps(found), _failures(found)),
        Section("also measured; a simulation does not ask for it", notes=[*_also(found)]),
    ]


# -- hosts
def _hosts(found: Measured) -> list[FileEntry]:
    hosts, size = len(found.names), len(found.hosts)
    each = -(-size // hosts)
    entries = [FileEntry("hosts", hosts, "counted from 0"), FileEntry("workers", size, "the ranks")]
    if list(found.hosts) == [rank // each for rank in range(size)]:
        about = f"{each} on each host, one host after the other; servers on host 0"
        return [*entries, FileEntry("placement", "workers", about)]
    return [*entries, FileEntry("worker-hosts", list(found.hosts), "the host of each worker")]


def _named(found: Measured) -> list[str]:
    """Which host is which; equal neighbours are many."""
    lines = []
    for host, name in enumerate(found.names):
        ranks = [rank for rank, other in enumerate(found.hosts) if other == host]
        lines.append(f"host {host}: {name}, rank{'s' * (len(ranks) > 1)} {_listed(ranks)}")
    return lines


def _listed(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


# -- network
def _figure(key: str, found: Figure | None, unit: str, why: str, of: str = "") -> FileEntry:
    if found is None:
        return FileEntry(key, None, f"{why} ({unit})")
    return FileEntry(key, rounded(found.value), f"{unit}; {found.spread_of(of)}")


def _network(found: Measured) -> list[FileEntry]:
    """Between hosts, inside one, and of a server."""
    network = found.network
    unit = "Gbit/s of a host's link, each way"
    entries = [_figure("bandwidth-gbit", network.usual_rate(), unit, ONE_HOST, "hosts")]
    others = {host: rounded(rate) for host, rate in network.other_links().items()}
    if others:
        entries.append(FileEntry("links", others, LINKS))
    unit, latency, overhead = "microseconds between two hosts", network.latency, network.overhead
    if latency is None or overhead is None:
        entries.append(FileEntry("latency-us", None, f"{ONE_HOST} ({unit})"))
    else:
        value = rounded(max(0.0, latency.value - overhead))
        entries.append(FileEntry("latency-us", value, f"{unit}; {latency.spread_of()}"))
        little = "; too little to be measured" if overhead == 0 else ""
        about = f"microseconds of a link for each message{little}"
        entries.append(FileEntry("message-overhead-us", rounded(overhead), about))
    no_memory = "not measured: no memory for two vectors"
    about = "microseconds of a server for each message"
    rate, inside = network.local_rate, "Gbit/s of the path inside a host"
    return [
        *entries,
        _figure("local-bandwidth-gbit", rate, inside, ONE_EACH),
        _figure("local-latency-us", network.local_latency, "microseconds inside a host", ONE_EACH),
        _figure("memory-gbyte", found.memory, "GB/s of one process", no_memory),
        _figure("handling-us", found.message, about, "not measured"),
    ]


# -- steps
def _steps(found: Measured) -> list[FileEntry]:
    alike = found.alike()
    if not alike:
        why = "not measured: no rank could take a step (seconds)"
        return [FileEntry("compute-time", None, why)]
    times = figure([steps.seconds.value for steps in alike])
    jitters = figure([steps.jitter for steps in alike])
    forwards = figure([steps.forward for steps in alike])
    # A smaller jitter is of no effect, and would only make runs differ.
    jitter = rounded(jitters.value) if jitters.value >= LEAST_JITTER else 0.0
    shape = [list(point) for point in alike[0].backward]
    entries = [
        _figure("compute-time", times, "seconds of a step", "", "ranks"),
        FileEntry("jitter", jitter, f"of its logarithm; {jitters.spread_of('ranks')}"),
        _figure("forward-share", forwards, "of a step, forward", "", "ranks"),
        FileEntry("backward-shape", shape, "share of the gradient, by when in backward"),
    ]
    slow = {rank: max(1.0, rounded(factor)) for rank, factor in found.stragglers().items()}
    if slow:
        entries.append(FileEntry("slowdown", slow, "\n".join([SLOW, *stragglers(found)])))
    return entries


def _failures(found: Measured) -> list[str]:
    return [
        f"rank {rank} on {found.names[found.hosts[rank]]} took no step: {why}"
        for rank, why in found.failures.items()
    ]


def stragglers(found: Measured) -> list[str]:
    """A line for each slow rank."""
    return [
        f"rank {rank} on {found.names[found.hosts[rank]]}: {short(factor)} times slower, "
        f"{short(found.steps[rank].seconds.value)} s a step"
        for rank, factor in found.stragglers().items()
    ]


# -- what no option holds
def _also(found: Measured) -> Iterator[str]:
    network, overlap = found.network, found.overlap
    crowded = network.crowded()
    if network.together is not None:
        yield f"both directions at once: {percent(network.together.value)} of each alone"
    if crowded is not None:
        yield f"all hosts at once: {percent(crowded.value)} of what a pair has alone"
        if crowded.value < SHARED:
            yield "so the network between hosts is shared, or the hosts lack cores:"
            yield "where training fills all links, so much less for bandwidth-gbit is true"
    unseen = sorted(set(range(network.hosts)) - network.host_rates().keys())
    if network.hosts > 1 and unseen:
        yield f"links of hosts {_listed(unseen)} were not measured for want of time"
    if network.skipped:
        yield f"{network.skipped} pairs of hosts were left out for want of time"
    if network.hosts == 2:
        yield "two hosts show only the slower of their two links"
    if overlap is None:
        yield "messages beside computing: not measured, as there is one rank alone"
    else:
        moved, slower = percent(overlap.moved), percent(overlap.slower)
        yield (
            f"messages that move while a rank computes: {moved}, which takes {slower} of computing"
        )
    if found.spare is not None:
        spare, cores = found.spare
        yield f"cores of rank 0's host that no rank's threads need: {spare} of {cores}"


def told(found: Measured) -> list[str]:
    """What is printed: every figure with its unit, and what could not be measured."""
    lines = []
    for section in sections(found):
        for entry in section.entries:
            value = "-" if entry.value is None else _shown(entry.value)
            first = entry.comment.splitlines()[0]
            lines.append(f"{entry.key:<22} {value:<12} {first}")
        lines += section.notes
    return [*lines, *stragglers(found)]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item:g}" for key, item in value.items())
    if isinstance(value, list):
        parts = [":".join(f"{part:g}" for part in each) for each in value if isinstance(each, list)]
        return " ".join(parts) or ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def measure_cluster(options: ProbeOptions, transport: Transport, cores: int) -> None:
    """Measure the cluster, print what was found, and write its file at the end.

    Args:
        options: what was typed.
        transport: over MPI; all ranks call it.
        cores: of this rank's host.

    Raises:
        UserError: at rank 0: the file is there already, or there is no such model.
        RefusedError: at the other ranks, then.
        LostError: a rank does not answer.
    """
    task = all_or_none(transport, lambda: _prepare(options, transport))
    was_chosen = options.device != "auto"
    print_placement(transport, task.device, 0, quiet=True, was_chosen=was_chosen)
    steps = partial(time_steps, transport, task)
    try:
        found = measure(transport, steps, options.seconds, cores)
    except WaitTimeoutError as error:
        raise _lost(error, transport) from None
    if transport.rank:
        return
    ranks = f"{transport.size} rank{'s' * (transport.size > 1)}"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    model = f"{options.model}, batches of {options.batch_size}, {options.precision}"
    model += f" on {task.device.type}"
    text = rendered(f"Measured by {ranks} with {model}, {day}.", sections(found))
    check(text, str(options.out))
    print(*told(found), sep="\n")
    write_and_tell(text, options)


def _prepare(options: ProbeOptions, transport: Transport) -> ProbeTask:
    if transport.rank == 0:
        check_free(options.out, options.overwrite)
    return make_task(options, choose_device(options.device, transport, 0))


def _lost(error: WaitTimeoutError, transport: Transport) -> LostError:
    """Which rank keeps this one waiting, and on which host it is."""
    waited, _, _ = str(error).partition(": that rank")
    named = re.search(r"rank (\d+), tag", waited)
    where = f" on host {transport.host_names[int(named[1])]}" if named else ""
    return LostError(
        f"{waited}{where}: that rank hangs, has died, or its step takes very long; start the probe "
        "without its host, or give it more time with --seconds"
    )
