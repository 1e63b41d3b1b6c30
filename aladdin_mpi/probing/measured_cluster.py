"""A measured cluster as a file's sections, and what the command prints of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial

from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.errors import LostError, WaitTimeoutError
from aladdin_mpi.probing.cluster_file import (
    Figure,
    FileEntry,
    Section,
    check,
    check_free,
    figure,
    rendered,
    rounded,
    short,
    write,
)
from aladdin_mpi.probing.described_cluster import LINKS, SLOW, tell_written
from aladdin_mpi.probing.links import NetworkFigures
from aladdin_mpi.probing.measure import Measured, measure
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.probing.steps import ProbeTask, make_task, time_steps
from aladdin_mpi.process.console import percent
from aladdin_mpi.run.job import choose_device
from aladdin_mpi.run.placement import tell_placement
from aladdin_mpi.transport.base import Transport

ONE_HOST = "not measured: all ranks are on one host; start the probe on several"
ONE_EACH = "not measured: no host has two ranks; start several on each"
LEAST_JITTER = 1e-3
SHARED = 0.8
"""All hosts at once have less than this share of a pair's rate: the network is shared."""


def sections(found: Measured) -> list[Section]:
    """What the file says of it."""
    return [
        Section("hosts and workers", _hosts(found), _named(found)),
        Section("network", [*_between(found.network), *_inside(found.network), *_server(found)]),
        Section("steps", _steps(found), _failures(found)),
        Section("also measured; a simulation does not ask for it", notes=_also(found)),
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


def _between(network: NetworkFigures) -> list[FileEntry]:
    unit = "Gbit/s of a host's link, each way"
    entries = [_figure("bandwidth-gbit", network.usual_rate(), unit, ONE_HOST, "hosts")]
    others = {host: rounded(rate) for host, rate in network.other_links().items()}
    if others:
        entries.append(FileEntry("links", others, LINKS))
    latency = network.latency
    if latency is not None and network.overhead is not None:
        value = rounded(max(0.0, latency.value - network.overhead))
        unit = "microseconds between two hosts"
        entries.append(FileEntry("latency-us", value, f"{unit}; {latency.spread}"))
        entries.append(_overhead(network.overhead))
    else:
        entries.append(
            FileEntry("latency-us", None, f"{ONE_HOST} (microseconds between two hosts)")
        )
    return entries


def _overhead(overhead: float) -> FileEntry:
    unit = "microseconds of a link for each message"
    found = "; too little to be measured" if overhead == 0 else ""
    return FileEntry("message-overhead-us", rounded(overhead), unit + found)


def _inside(network: NetworkFigures) -> list[FileEntry]:
    rate, latency = network.local_rate, network.local_latency
    return [
        _figure("local-bandwidth-gbit", rate, "Gbit/s of the path inside a host", ONE_EACH),
        _figure("local-latency-us", latency, "microseconds inside a host", ONE_EACH),
    ]


def _server(found: Measured) -> list[FileEntry]:
    memory = "GB/s of one process"
    message = "microseconds of a server for each message"
    return [
        _figure("memory-gbyte", found.memory, memory, "not measured: no memory for two vectors"),
        _figure("handling-us", found.message, message, "not measured"),
    ]


# -- steps
def _steps(found: Measured) -> list[FileEntry]:
    alike = found.alike()
    if not alike:
        return [
            FileEntry("compute-time", None, "not measured: no rank could take a step (seconds)")
        ]
    times = figure([steps.seconds.value for steps in alike])
    jitters = figure([steps.jitter for steps in alike])
    forwards = figure([steps.forward for steps in alike])
    shape = [list(point) for point in alike[0].backward]
    entries = [
        _figure("compute-time", times, "seconds of a step", "", "ranks"),
        FileEntry(
            "jitter", _jitter(jitters.value), f"of its logarithm; {jitters.spread_of('ranks')}"
        ),
        _figure("forward-share", forwards, "of a step, forward", "", "ranks"),
        FileEntry("backward-shape", shape, "share of the gradient, by when in backward"),
    ]
    slow = {rank: max(1.0, rounded(factor)) for rank, factor in found.stragglers().items()}
    if slow:
        entries.append(FileEntry("slowdown", slow, "\n".join([SLOW, *stragglers(found)])))
    return entries


def _jitter(value: float) -> float:
    """Less is of no effect, and would only make runs differ."""
    return rounded(value) if value >= LEAST_JITTER else 0.0


def _failures(found: Measured) -> list[str]:
    return [
        f"rank {rank} on {_host(found, rank)} took no step: {why}"
        for rank, why in found.failures.items()
    ]


def stragglers(found: Measured) -> list[str]:
    """A line for each slow rank."""
    return [
        f"rank {rank} on {_host(found, rank)}: {short(factor)} times slower, "
        f"{short(found.steps[rank].seconds.value)} s a step"
        for rank, factor in found.stragglers().items()
    ]


def _host(found: Measured, rank: int) -> str:
    return found.names[found.hosts[rank]]


# -- what no option holds
def _also(found: Measured) -> list[str]:
    network = found.network
    lines = []
    crowded = network.crowded()
    if network.together is not None:
        lines.append(f"both directions at once: {percent(network.together.value)} of each alone")
    if crowded is not None:
        lines.append(f"all hosts at once: {percent(crowded.value)} of what a pair has alone")
        if crowded.value < SHARED:
            lines.append("so the network between hosts is shared, or the hosts lack cores:")
            lines.append("where training fills all links, so much less for bandwidth-gbit is true")
    unseen = sorted(set(range(network.hosts)) - network.host_rates().keys())
    if network.hosts > 1 and unseen:
        lines.append(f"links of hosts {_listed(unseen)} were not measured for want of time")
    if network.skipped:
        lines.append(f"{network.skipped} pairs of hosts were left out for want of time")
    if network.hosts == 2:
        lines.append("two hosts show only the slower of their two links")
    lines.append(_beside(found))
    if found.spare is not None:
        spare, cores = found.spare
        lines.append(f"cores of rank 0's host that no rank's threads need: {spare} of {cores}")
    return lines


def _beside(found: Measured) -> str:
    if found.overlap is None:
        return "messages beside computing: not measured, as there is one rank alone"
    moved, slower = percent(found.overlap.moved), percent(found.overlap.slower)
    return f"messages that move while a rank computes: {moved}, which takes {slower} of computing"


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
    tell_placement(transport, task.device, 0, quiet=True, was_chosen=was_chosen)
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
    for line in told(found):
        print(line)
    tell_written(write(options.out, text, options.overwrite), options)


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
