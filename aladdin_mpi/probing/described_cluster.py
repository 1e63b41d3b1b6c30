"""A described cluster as a file's sections, and in words."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.reader import shown
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing import cluster_file
from aladdin_mpi.probing.cluster_file import FileEntry, Section, check, check_free, rendered, write
from aladdin_mpi.probing.options import ProbeOptions

UNKNOWN = "not said; the default is"
LINKS = "Gbit/s of the links of hosts, counted from 0, that have another rate."
SLOW = "Workers, counted from 0, that are slower by a factor."
NETWORK = {
    "bandwidth_gbit": "Gbit/s of each host's link, each way",
    "latency_us": "microseconds between two hosts",
    "local_bandwidth_gbit": "Gbit/s of the path inside a host",
    "local_latency_us": "microseconds inside a host",
    "memory_gbyte": "GB/s that one process moves in memory",
}


def sections(options: ProbeOptions) -> list[Section]:
    """What the file says of the cluster that the options describe; ``nodes`` is given."""
    network = [_figure(options, name, about) for name, about in NETWORK.items()]
    if options.links:
        network.append(FileEntry("links", options.links, LINKS))
    return [
        Section("hosts and workers", _hosts(options)),
        Section("network", network),
        Section("steps", _steps(options)),
    ]


def _hosts(options: ProbeOptions) -> list[FileEntry]:
    assert options.nodes is not None
    each = options.gpus_per_node or 1
    return [
        FileEntry("hosts", options.nodes, "counted from 0"),
        FileEntry("workers", options.nodes * each, f"{each} on each host"),
        FileEntry(
            "placement", "workers", "one host after the other; servers are on host 0 as well"
        ),
    ]


def _figure(options: ProbeOptions, name: str, about: str) -> FileEntry:
    value = getattr(options, name)
    key = name.replace("_", "-")
    if value is None:
        default = shown(Cluster.model_fields[name].default)
        return FileEntry(key, None, f"{UNKNOWN} {default} ({about})")
    return FileEntry(key, value, about)


def _steps(options: ProbeOptions) -> list[FileEntry]:
    step = options.step_seconds
    default = shown(SimulateOptions.model_fields["compute_time"].default)
    found = [
        FileEntry("compute-time", step, "seconds of a step of a worker that is not slow")
        if step is not None
        else FileEntry("compute-time", None, f"{UNKNOWN} {default} (seconds of a step)"),
        FileEntry("jitter", options.jitter, "relative standard deviation of a step's time")
        if options.jitter is not None
        else FileEntry(
            "jitter", None, f"{UNKNOWN} 0 (relative standard deviation of a step's time)"
        ),
    ]
    slow = slow_workers(options)
    if slow:
        found.append(FileEntry("slowdown", slow, SLOW))
    return found


def slow_workers(options: ProbeOptions) -> dict[int, float]:
    """The factor of each slow worker: its host's times its own."""
    each = options.gpus_per_node or 1
    factors = {
        host * each + place: factor
        for host, factor in options.node_slowdown.items()
        for place in range(each)
    }
    for worker, factor in options.slowdown.items():
        factors[worker] = factors.get(worker, 1.0) * factor
    return factors


def understood(options: ProbeOptions) -> Sequence[str]:
    """What the file will say, in words; one line for each fact."""
    assert options.nodes is not None
    each = options.gpus_per_node or 1
    lines = [
        f"{options.nodes} host{_s(options.nodes)} with {each} worker{_s(each)} each, "
        f"{options.nodes * each} in all"
    ]
    for name, about in NETWORK.items():
        value = getattr(options, name)
        if value is not None:
            lines.append(f"{shown(value)} {about}")
    lines += [
        f"host {host}: a link of {shown(gbit)} Gbit/s" for host, gbit in options.links.items()
    ]
    if options.step_seconds is not None:
        lines.append(f"{shown(options.step_seconds)} s for a step")
    if options.jitter is not None:
        lines.append(f"a jitter of {options.jitter:.2%}")
    for host, factor in options.node_slowdown.items():
        last = (host + 1) * each - 1
        named = f"worker {last}" if each == 1 else f"workers {host * each} to {last}"
        lines.append(f"host {host} ({named}): {shown(factor)} times slower")
    for worker, factor in options.slowdown.items():
        lines.append(f"worker {worker} (host {worker // each}): {shown(factor)} times slower")
    return lines


def left_out(options: ProbeOptions) -> list[str]:
    """What was not said, and is left to the simulation's defaults."""
    entries = [entry for section in sections(options) for entry in section.entries]
    return [
        f"{entry.key} ({entry.comment.removeprefix(UNKNOWN).split()[0]})"
        for entry in entries
        if entry.value is None
    ]


def _s(count: int) -> str:
    return "s" * (count != 1)


def describe(options: ProbeOptions) -> None:
    """Write the file of a described cluster, and print what was understood.

    Raises:
        UserError: the file is there already, or cannot be written.
    """
    check_free(options.out, options.overwrite)
    source = "Described" + (f': "{options.describe}"' if options.describe else " by options") + "."
    text = rendered(source, sections(options))
    check(text, str(options.out))
    print("understood:")
    for line in understood(options):
        print(f"    {line}")
    unsaid = left_out(options)
    if unsaid:
        print(f"not said, so left to the defaults: {', '.join(unsaid)}")
    tell_written(write(options.out, text, options.overwrite), options)


def tell_written(path: object, options: ProbeOptions) -> None:
    """Say where the file is, and how to go on."""
    if path != options.out:
        print(f"{options.out} has come from elsewhere meanwhile, and is left as it is")
    print(f"wrote {path}; to use it: {cluster_file.command(str(path))}")
