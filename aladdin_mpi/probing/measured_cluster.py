"""Measurement of a cluster by all ranks of a job, and its output as sections of a file.

The order of measurements: steps, with all ranks computing at once; rank 0 alone; the network;
messages while ranks compute. Figures that cannot be measured are left out, with the reason. Rank 0
has the results.
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
    write_and_report,
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
"""Shares of the time for steps, the network between hosts, inside a host, and memory."""
ENOUGH = 0.85
"""Share of the time after which no further pair of hosts is measured."""
STRAGGLES = 1.2
"""Factor over the median rank's step time from which a rank is slow. The middle halves of their
steps must be disjoint too, as medians also differ on a busy machine."""
QUARTILES = 1.349
"""Standard deviations between the quartiles of a normal distribution."""

TimeSteps = Callable[[float], StepTimes]
"""Takes steps for a number of seconds; an error concerns only this rank."""


@dataclass(frozen=True)
class RankSteps:
    """One rank's steps: their seconds, jitter and shape."""

    seconds: Figure
    jitter: float
    forward: float
    backward: Points


@dataclass
class Measured:
    """All measurements; complete at rank 0.

    Attributes:
        hosts: the host of each rank.
        names: of the hosts.
        steps: of the ranks whose steps could be timed.
        failures: errors of the other ranks.
        memory: GB/s of one process; None if not measured.
        message: microseconds of a process per message.
        spare: unused and total number of cores of rank 0's host.
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
        """The step time of the median rank in seconds; None if no rank could be timed."""
        times = sorted((steps.seconds for steps in self.steps.values()), key=lambda t: t.value)
        return times[(len(times) - 1) // 2] if times else None

    def alike(self) -> list[RankSteps]:
        """Return the steps of the ranks that are not slow."""
        slow = self.stragglers()
        return [steps for rank, steps in self.steps.items() if rank not in slow]

    def stragglers(self) -> dict[int, float]:
        """Return the slowdown factors of the slow ranks."""
        usual = self.usual_step
        times = {rank: steps.seconds for rank, steps in self.steps.items()}
        return {
            rank: seconds.value / usual.value
            for rank, seconds in times.items()
            if usual and seconds.value > STRAGGLES * usual.value and seconds.low > usual.high
        }


def measure(transport: Transport, time_steps: TimeSteps, seconds: float, cores: int) -> Measured:
    """Measure the cluster; all ranks call it.

    Args:
        transport: over MPI, or virtual.
        time_steps: times steps of this rank.
        seconds: approximate total time; long steps may exceed it, as a few are needed.
        cores: number of cores of this rank's host.

    Raises:
        WaitTimeoutError: a rank does not answer.
    """
    start, hosts = transport.now(), max(transport.hosts) + 1
    names = [transport.host_names[transport.hosts.index(host)] for host in range(hosts)]
    measured = Measured(transport.hosts, names, NetworkFigures(hosts))
    _print(transport, f"timing steps of {transport.size} rank{'s' * (transport.size > 1)}")
    _measure_steps(transport, measured, time_steps, STEPS * seconds)
    _measure_own(transport, measured, MEMORY * seconds, cores)
    _print(transport, f"timing messages, {hosts} host{'s' * (hosts > 1)}")
    measured.network = measure_network(
        transport,
        (NETWORK if hosts > 1 else INSIDE) * seconds,
        lambda: transport.now() - start < ENOUGH * seconds,
    )
    _measure_overlap(transport, measured)
    return measured


def _print(transport: Transport, text: str) -> None:
    if transport.rank == 0:
        console.say(f"aladdin_mpi: {text}")


def _measure_steps(
    transport: Transport, measured: Measured, time_steps: TimeSteps, seconds: float
) -> None:
    barrier(transport)
    for rank, result in enumerate(gather(transport, _attempt(time_steps, seconds))):
        if isinstance(result, str):
            measured.failures[rank] = result
        else:
            times, forward, backward = result
            logarithms = figure([math.log(each) for each in times])
            jitter = (logarithms.high - logarithms.low) / QUARTILES
            shape = [(share, moment) for share, moment in backward]
            measured.steps[rank] = RankSteps(figure(times), jitter, forward, shape)


def _attempt(time_steps: TimeSteps, seconds: float) -> Any:
    """Return the times of steps, or a description of the error."""
    try:
        times = time_steps(seconds)
    except Exception as error:  # a user's model may raise any
        first = next(iter(str(error).splitlines()), "")
        return f"{type(error).__name__}: {first}"
    return times.seconds, times.forward, times.backward


def _measure_own(transport: Transport, measured: Measured, seconds: float, cores: int) -> None:
    """Measure at rank 0 alone, while the others wait."""
    measured.spare = spare_cores(transport, cores)
    if transport.rank == 0:
        measured.message = message_cost(transport)
        try:
            measured.memory = memory_bandwidth(seconds)
        except RuntimeError:
            measured.memory = None  # insufficient memory for two vectors
    barrier(transport)


def _measure_overlap(transport: Transport, measured: Measured) -> None:
    """Measure overlap between the first ranks of two hosts, or between two ranks of one."""
    if transport.size == 1:
        return
    hosts, network = transport.hosts, measured.network
    pair = (hosts.index(0), hosts.index(1)) if max(hosts) > 0 else (0, 1)
    rate = network.alone.get((0, 1), network.local_rate)
    known = broadcast(transport, rate.value / 8e-9 if rate is not None else None)
    if known is not None:
        measured.overlap = measure_overlap(transport, pair, known)


# -- as a file's sections -----------------------------------------------------------------
ONE_HOST = "not measured: all ranks are on one host; start the probe on several hosts"
ONE_EACH = "not measured: no host has two ranks; start several ranks per host"
LEAST_JITTER = 1e-3
SHARED = 0.8
"""Share of a pair's rate for all hosts at once below which the network counts as shared."""


def sections(measured: Measured) -> list[Section]:
    """Return the sections of the file."""
    return [
        Section("hosts and workers", _hosts(measured), _named(measured)),
        Section("network", _network(measured)),
        Section("steps", _steps(measured), _failures(measured)),
        Section("also measured; not used by simulations", notes=[*_also(measured)]),
    ]


# -- hosts
def _hosts(measured: Measured) -> list[FileEntry]:
    hosts, size = len(measured.names), len(measured.hosts)
    each = -(-size // hosts)
    entries = [FileEntry("hosts", hosts, "counted from 0"), FileEntry("workers", size, "the ranks")]
    if list(measured.hosts) == [rank // each for rank in range(size)]:
        about = f"{each} on each host, one host after the other; servers on host 0"
        return [*entries, FileEntry("placement", "workers", about)]
    return [*entries, FileEntry("worker-hosts", list(measured.hosts), "the host of each worker")]


def _named(measured: Measured) -> list[str]:
    """Return a line with the name and the ranks of each host."""
    lines = []
    for host, name in enumerate(measured.names):
        ranks = [rank for rank, other in enumerate(measured.hosts) if other == host]
        lines.append(f"host {host}: {name}, rank{'s' * (len(ranks) > 1)} {_listed(ranks)}")
    return lines


def _listed(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) > 1 and list(numbers) == list(range(first, last + 1)):
        return f"{first} to {last}"
    return ", ".join(map(str, numbers))


# -- network
def _figure(key: str, measured: Figure | None, unit: str, why: str, of: str = "") -> FileEntry:
    if measured is None:
        return FileEntry(key, None, f"{why} ({unit})")
    return FileEntry(key, rounded(measured.value), f"{unit}; {measured.spread_of(of)}")


def _network(measured: Measured) -> list[FileEntry]:
    """Return the entries on links, memory and message handling."""
    network = measured.network
    unit = "Gbit/s of a host's link in each direction"
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
        little = "; too small to be measured" if overhead == 0 else ""
        about = f"microseconds of a link per message{little}"
        entries.append(FileEntry("message-overhead-us", rounded(overhead), about))
    no_memory = "not measured: insufficient memory for two vectors"
    about = "microseconds of a server per message"
    rate, inside = network.local_rate, "Gbit/s of the path inside a host"
    return [
        *entries,
        _figure("local-bandwidth-gbit", rate, inside, ONE_EACH),
        _figure("local-latency-us", network.local_latency, "microseconds inside a host", ONE_EACH),
        _figure("memory-gbyte", measured.memory, "GB/s of one process", no_memory),
        _figure("handling-us", measured.message, about, "not measured"),
    ]


# -- steps
def _steps(measured: Measured) -> list[FileEntry]:
    alike = measured.alike()
    if not alike:
        why = "not measured: no rank completed a step (seconds)"
        return [FileEntry("compute-time", None, why)]
    times = figure([steps.seconds.value for steps in alike])
    jitters = figure([steps.jitter for steps in alike])
    forwards = figure([steps.forward for steps in alike])
    # A smaller jitter has no effect, except that runs would differ.
    jitter = rounded(jitters.value) if jitters.value >= LEAST_JITTER else 0.0
    shape = [list(point) for point in alike[0].backward]
    entries = [
        _figure("compute-time", times, "seconds of a step", "", "ranks"),
        FileEntry("jitter", jitter, f"of its logarithm; {jitters.spread_of('ranks')}"),
        _figure("forward-share", forwards, "of a step, forward", "", "ranks"),
        FileEntry("backward-shape", shape, "share of the gradient by share of backward's time"),
    ]
    slow = {rank: max(1.0, rounded(factor)) for rank, factor in measured.stragglers().items()}
    if slow:
        entries.append(FileEntry("slowdown", slow, "\n".join([SLOW, *stragglers(measured)])))
    return entries


def _failures(measured: Measured) -> list[str]:
    return [
        f"rank {rank} on {measured.names[measured.hosts[rank]]} completed no step: {why}"
        for rank, why in measured.failures.items()
    ]


def stragglers(measured: Measured) -> list[str]:
    """Return a line for each slow rank."""
    return [
        f"rank {rank} on {measured.names[measured.hosts[rank]]}: slowdown factor {short(factor)}, "
        f"{short(measured.steps[rank].seconds.value)} s per step"
        for rank, factor in measured.stragglers().items()
    ]


# -- facts without an option
def _also(measured: Measured) -> Iterator[str]:
    network, overlap = measured.network, measured.overlap
    crowded = network.crowded()
    if network.together is not None:
        yield f"both directions at once: {percent(network.together.value)} of the rate of one alone"
    if crowded is not None:
        yield f"all hosts at once: {percent(crowded.value)} of the rate of a pair alone"
        if crowded.value < SHARED:
            yield "so the network between hosts is shared, or the hosts lack cores;"
            yield "if training saturates all links, reduce bandwidth-gbit by this share"
    unseen = sorted(set(range(network.hosts)) - network.host_rates().keys())
    if network.hosts > 1 and unseen:
        yield f"links of hosts {_listed(unseen)} were not measured for lack of time"
    if network.skipped:
        yield f"{network.skipped} pairs of hosts were not measured for lack of time"
    if network.hosts == 2:
        yield "two hosts show only the slower of their two links"
    if overlap is None:
        yield "messages during computation: not measured, because there is only one rank"
    else:
        moved, slower = percent(overlap.moved), percent(overlap.slower)
        yield f"bytes transferred while a rank computes: {moved}; computing slows down by {slower}"
    if measured.spare is not None:
        spare, cores = measured.spare
        yield f"unused cores of rank 0's host: {spare} of {cores}"


def lines_of(measured: Measured) -> list[str]:
    """Return the printed lines: every figure with its unit, and missing ones with the reason."""
    lines = []
    for section in sections(measured):
        for entry in section.entries:
            value = "-" if entry.value is None else _shown(entry.value)
            first = entry.comment.splitlines()[0]
            lines.append(f"{entry.key:<22} {value:<12} {first}")
        lines += section.notes
    return [*lines, *stragglers(measured)]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={item:g}" for key, item in value.items())
    if isinstance(value, list):
        parts = [":".join(f"{part:g}" for part in each) for each in value if isinstance(each, list)]
        return " ".join(parts) or ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def measure_cluster(options: ProbeOptions, transport: Transport, cores: int) -> None:
    """Measure the cluster, print the figures, and write the file.

    Args:
        options: of the command.
        transport: over MPI; all ranks call it.
        cores: number of cores of this rank's host.

    Raises:
        UserError: at rank 0, if the file exists already, or the model is unknown.
        RefusedError: at the other ranks in these cases.
        LostError: a rank does not answer.
    """
    task = all_or_none(transport, lambda: _prepare(options, transport))
    was_chosen = options.device != "auto"
    print_placement(transport, task.device, 0, quiet=True, was_chosen=was_chosen)
    steps = partial(time_steps, transport, task)
    try:
        measured = measure(transport, steps, options.seconds, cores)
    except WaitTimeoutError as error:
        raise _lost(error, transport) from None
    if transport.rank:
        return
    ranks = f"{transport.size} rank{'s' * (transport.size > 1)}"
    day = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    model = f"{options.model}, batches of {options.batch_size}, {options.precision}"
    model += f" on {task.device.type}"
    text = rendered(f"Measured by {ranks} with {model}, {day}.", sections(measured))
    check(text, str(options.out))
    print(*lines_of(measured), sep="\n")
    write_and_report(text, options)


def _prepare(options: ProbeOptions, transport: Transport) -> ProbeTask:
    if transport.rank == 0:
        check_free(options.out, options.overwrite)
    return make_task(options, choose_device(options.device, transport, 0))


def _lost(error: WaitTimeoutError, transport: Transport) -> LostError:
    """Return the error with the rank that does not answer, and its host."""
    waited, _, _ = str(error).partition(": that rank")
    named = re.search(r"rank (\d+), tag", waited)
    where = f" on host {transport.host_names[int(named[1])]}" if named else ""
    return LostError(
        f"{waited}{where}: that rank hangs, has failed, or its step takes very long; start the "
        "probe without its host, or allow more time with --seconds"
    )
