"""The file of a cluster, and the cluster that options describe.

The file's keys are in an order for reading, each with what is known of it next to it. It is written
at once when all is known, never over another one unless that is asked for, and only after it has
been read back as :mod:`aladdin_mpi.simulate` will.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import tomli_w

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.reader import build, kebab, parse_part, shown
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.process.files import write_new, write_whole

DIGITS = 4
"""That are written of a measured figure; more would be noise."""


@dataclass(frozen=True)
class Figure:
    """The median of ``count`` measurements, and the range of their middle half."""

    value: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Figure:
        """The same in another unit."""
        return Figure(self.value * factor, self.low * factor, self.high * factor, self.count)

    def spread_of(self, what: str = "") -> str:
        """As it stands next to the figure: ``half of 12 hosts between 0.95 and 0.97``."""
        if self.count == 1:
            return f"of one {what.removesuffix('s')}" if what else "measured once"
        counted = f"{self.count} {what}".strip()
        return f"half of {counted} between {short(self.low)} and {short(self.high)}"


def figure(samples: Sequence[float]) -> Figure:
    """Of at least one measurement."""
    if len(samples) == 1:
        return Figure(samples[0], samples[0], samples[0], 1)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Figure(median(samples), low, high, len(samples))


def rounded(value: float) -> float:
    """To as many digits as mean something."""
    return float(f"{value:.{DIGITS}g}")


def short(value: float) -> str:
    """:func:`rounded` as text."""
    return f"{rounded(value):g}"


# -- the file -----------------------------------------------------------------------------
KEY_WIDTH = 32
COMMAND = "THIS-COMMAND"
"""What stands in a text for the command, until the file's name is known."""
HINT = "Edit what is wrong. What is left out is left to the options of aladdin_mpi.simulate."


@dataclass(frozen=True)
class FileEntry:
    """A line of the file.

    Attributes:
        key: as the file spells it, such as ``bandwidth-gbit``.
        value: None: it is left out, and ``comment`` says why.
        comment: unit, spread, where it is from.
    """

    key: str
    value: Any
    comment: str


@dataclass(frozen=True)
class Section:
    """Lines that belong together, and facts that are no option of a simulation."""

    title: str
    entries: Sequence[FileEntry] = ()
    notes: Sequence[str] = ()


def _command(path: object) -> str:
    """The command line that uses the file."""
    return shlex.join(["python", "-m", "aladdin_mpi.simulate", "--cluster", str(path)])


def rendered(source: str, sections: Sequence[Section]) -> str:
    """The file's text; ``source`` says in a line where the figures are from."""
    lines = [f"# A cluster, for: {COMMAND}", *_comments(source), f"# {HINT}"]
    tables: list[str] = []  # after all else: what follows a table's head belongs to it
    for section in sections:
        lines += ["", f"# -- {section.title}"]
        for entry in section.entries:
            if isinstance(entry.value, dict):
                tables += ["", *_comments(entry.comment), f"[{entry.key}]"]
                tables += [f"{key} = {value!r}" for key, value in sorted(entry.value.items())]
            else:
                lines.append(_line(entry))
        lines += [line for note in section.notes for line in _comments(note)]
    return "\n".join([*lines, *tables]) + "\n"


def _line(entry: FileEntry) -> str:
    if entry.value is None:
        return f"# {entry.key}: {entry.comment}"
    text = f"{entry.key} = {_value(entry.value)}"
    if len(text) < KEY_WIDTH:
        return f"{text:{KEY_WIDTH}}# {entry.comment}"
    return f"# {entry.comment}\n{text}"


def _value(value: Any) -> str:
    """In one line, which a writer of TOML would break."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).strip().removeprefix("x = ")


def _comments(text: str) -> list[str]:
    """Without control characters, which TOML has no comments of."""
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())
    return [f"# {line}" for line in lines]


def check(text: str, name: str) -> SimulateOptions:
    """The options of a simulation that the text of a file gives.

    Raises:
        UserError: there is something in it that a simulation refuses.
    """
    return build(SimulateOptions, parse_part(SimulateOptions, "cluster", text, name))


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse before anything is measured what would be refused in the end.

    Raises:
        UserError: the file exists, or its folder does not.
    """
    if not path.parent.is_dir():
        raise UserError(
            f"--out {path}: expected an existing folder, got {str(path.parent)!r}; create it "
            "first, or name another"
        )
    if path.is_dir():
        raise UserError(f"--out {path}: expected a file, got a folder; name a file in it")
    if path.exists() and not overwrite:
        raise UserError(
            f"--out {path}: expected a new file, got one that exists; name another, or add "
            "--overwrite"
        )


def write(path: Path, text: str, overwrite: bool) -> Path:
    """Write the file, whole or not at all; returns where to.

    If another one has come in the meantime, and it is not to be replaced, a similar name is taken,
    so that what has been measured is not lost.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if not overwrite:
            return _write_beside(path, text)
        write_whole(path, text.replace(COMMAND, _command(path.name)))
        return path
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot write it ({error.strerror}); name another folder. It would have "
            f"been:\n{text}"
        ) from error


def _write_beside(path: Path, text: str) -> Path:
    name = path
    for number in count(2):
        try:
            write_new(name, text.replace(COMMAND, _command(name.name)))
            break
        except FileExistsError:
            name = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return name


def write_and_tell(text: str, options: ProbeOptions) -> None:
    """Write the file, and say where it is and how to use it. Raises as :func:`write`."""
    path = write(options.out, text, options.overwrite)
    if path != options.out:
        print(
            f"{options.out} was created by another process in the meantime, and is left unchanged"
        )
    print(f"wrote {path}; to use it: {_command(path)}")


# -- a described cluster ------------------------------------------------------------------
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


def describe(options: ProbeOptions) -> None:
    """Write the file of a described cluster, and print what was understood.

    Raises:
        UserError: the file exists already, or cannot be written.
    """
    check_free(options.out, options.overwrite)
    source = "Described" + (f': "{options.describe}"' if options.describe else " by options") + "."
    sections = described_sections(options)
    text = rendered(source, sections)
    check(text, str(options.out))
    print("understood:", *understood(options), sep="\n    ")
    unsaid = [
        f"{entry.key} ({entry.comment.removeprefix(UNKNOWN).split()[0]})"
        for section in sections
        for entry in section.entries
        if entry.value is None
    ]
    if unsaid:
        print(f"not said, so left to the defaults: {', '.join(unsaid)}")
    write_and_tell(text, options)


def described_sections(options: ProbeOptions) -> list[Section]:
    """What the file says of the cluster that the options describe; ``nodes`` is given."""
    assert options.nodes is not None
    each = options.gpus_per_node or 1
    hosts = [
        FileEntry("hosts", options.nodes, "counted from 0"),
        FileEntry("workers", options.nodes * each, f"{each} on each host"),
        FileEntry(
            "placement", "workers", "one host after the other; servers are on host 0 as well"
        ),
    ]
    network = [
        _entry(name, getattr(options, name), Cluster.model_fields[name].default, about)
        for name, about in NETWORK.items()
    ]
    if options.links:
        network.append(FileEntry("links", options.links, LINKS))
    step, default = options.step_seconds, SimulateOptions.model_fields["compute_time"].default
    about = "seconds of a step" + ("" if step is None else " of a worker that is not slow")
    steps = [
        _entry("compute_time", step, default, about),
        _entry("jitter", options.jitter, 0, "relative standard deviation of a step's time"),
    ]
    if slow := _slow_workers(options):
        steps.append(FileEntry("slowdown", slow, SLOW))
    return [
        Section("hosts and workers", hosts),
        Section("network", network),
        Section("steps", steps),
    ]


def _entry(name: str, value: float | None, default: Any, about: str) -> FileEntry:
    comment = f"{UNKNOWN} {shown(default)} ({about})" if value is None else about
    return FileEntry(kebab(name), value, comment)


def _slow_workers(options: ProbeOptions) -> dict[int, float]:
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


def understood(options: ProbeOptions) -> Iterator[str]:
    """What the file will say, in words; one line for each fact."""
    nodes, each = options.nodes or 0, options.gpus_per_node or 1
    yield (
        f"{nodes} host{'s' * (nodes != 1)} with {each} worker{'s' * (each != 1)} each, "
        f"{nodes * each} in all"
    )
    for name, about in NETWORK.items():
        if (value := getattr(options, name)) is not None:
            yield f"{shown(value)} {about}"
    for host, gbit in options.links.items():
        yield f"host {host}: a link of {shown(gbit)} Gbit/s"
    if options.step_seconds is not None:
        yield f"{shown(options.step_seconds)} s for a step"
    if options.jitter is not None:
        yield f"a jitter of {options.jitter:.2%}"
    for host, factor in options.node_slowdown.items():
        last = (host + 1) * each - 1
        named = f"worker {last}" if each == 1 else f"workers {host * each} to {last}"
        yield f"host {host} ({named}): {shown(factor)} times slower"
    for worker, factor in options.slowdown.items():
        yield f"worker {worker} (host {worker // each}): {shown(factor)} times slower"
