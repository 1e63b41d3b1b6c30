"""The cluster file, and the cluster that options describe.

Each key has a comment with its unit and origin. The file is written at once when all figures are
known, after it has been parsed as by :mod:`aladdin_mpi.simulate`. It replaces an existing file only
with ``--overwrite``.
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
from aladdin_mpi.options.fields import kebab, shown
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.settings import build
from aladdin_mpi.options.toml_file import parse_part
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.process.files import write_new, write_whole

DIGITS = 4
"""Significant digits of measured figures; more would be noise."""


@dataclass(frozen=True)
class Figure:
    """The median of ``count`` measurements, and the range of their middle half."""

    value: float
    low: float
    high: float
    count: int

    def scaled(self, factor: float) -> Figure:
        """Return the figure in another unit."""
        return Figure(self.value * factor, self.low * factor, self.high * factor, self.count)

    def spread_of(self, what: str = "") -> str:
        """Return the spread as text: ``half of 12 hosts between 0.95 and 0.97``."""
        if self.count == 1:
            return f"of one {what.removesuffix('s')}" if what else "measured once"
        counted = f"{self.count} {what}".strip()
        return f"half of {counted} between {short(self.low)} and {short(self.high)}"


def figure(samples: Sequence[float]) -> Figure:
    """Return the median and quartiles of at least one measurement."""
    if len(samples) == 1:
        return Figure(samples[0], samples[0], samples[0], 1)
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Figure(median(samples), low, high, len(samples))


def rounded(value: float) -> float:
    """Return a value rounded to :data:`DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")


def short(value: float) -> str:
    """Return a rounded value as text."""
    return f"{rounded(value):g}"


# -- the file -----------------------------------------------------------------------------
KEY_WIDTH = 32
COMMAND = "THIS-COMMAND"
"""Placeholder of the command in a text, until the file's name is known."""
HINT = "Edit as needed. Missing keys have the defaults of aladdin_mpi.simulate's options."


@dataclass(frozen=True)
class FileEntry:
    """A line of the file.

    Attributes:
        key: spelled as in the file, such as ``bandwidth-gbit``.
        value: None if it is left out, for the reason in ``comment``.
        comment: unit, spread and origin.
    """

    key: str
    value: Any
    comment: str


@dataclass(frozen=True)
class Section:
    """A group of lines, and notes on facts that are not options of a simulation."""

    title: str
    entries: Sequence[FileEntry] = ()
    notes: Sequence[str] = ()


def _command(path: object) -> str:
    """Return the command line that uses the file."""
    return shlex.join(["python", "-m", "aladdin_mpi.simulate", "--cluster", str(path)])


def rendered(source: str, sections: Sequence[Section]) -> str:
    """Return the file's text; ``source`` is a line on the origin of the figures."""
    lines = [f"# A cluster, for: {COMMAND}", *_comments(source), f"# {HINT}"]
    tables: list[str] = []  # at the end: all lines after a table's head belong to the table
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
    """Return a value as TOML in one line; the writer would break long lists."""
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return tomli_w.dumps({"x": value}).strip().removeprefix("x = ")


def _comments(text: str) -> list[str]:
    """Return comment lines without control characters, which TOML does not allow."""
    lines = ("".join(c if c.isprintable() else " " for c in line) for line in text.splitlines())
    return [f"# {line}" for line in lines]


def check(text: str, name: str) -> SimulateOptions:
    """Return the options of a simulation with the text of a file.

    Raises:
        UserError: a simulation would refuse it.
    """
    return build(SimulateOptions, parse_part(SimulateOptions, "cluster", text, name))


def check_free(path: Path, overwrite: bool) -> None:
    """Check, before measuring, that the file can be written.

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
    """Write the file atomically and return its path.

    If the file has been created in the meantime and must not be overwritten, a similar name is
    used, so that the measurements are not lost.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if not overwrite:
            return _write_new(path, text)
        write_whole(path, text.replace(COMMAND, _command(path.name)))
        return path
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot write it ({error.strerror}); name another folder. It would have "
            f"been:\n{text}"
        ) from error


def _write_new(path: Path, text: str) -> Path:
    name = path
    for number in count(2):
        try:
            write_new(name, text.replace(COMMAND, _command(name.name)))
            break
        except FileExistsError:
            name = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return name


def write_and_report(text: str, options: ProbeOptions) -> None:
    """Write the file, and print its path and how to use it. Raises UserError like :func:`write`."""
    path = write(options.out, text, options.overwrite)
    if path != options.out:
        print(
            f"{options.out} was created by another process in the meantime, and is left unchanged"
        )
    print(f"wrote {path}; to use it: {_command(path)}")


# -- a described cluster ------------------------------------------------------------------
UNKNOWN = "not specified; the default is"
LINKS = "Gbit/s of links with a different bandwidth, by host, counted from 0."
SLOW = "Slowdown factors by worker, counted from 0."
NETWORK = {
    "bandwidth_gbit": "Gbit/s of each host's link in each direction",
    "latency_us": "microseconds of latency between two hosts",
    "local_bandwidth_gbit": "Gbit/s of the path inside a host",
    "local_latency_us": "microseconds of latency inside a host",
    "memory_gbyte": "GB/s of memory bandwidth of one process",
}


def describe(options: ProbeOptions) -> None:
    """Write the file of a described cluster, and print its interpretation.

    Raises:
        UserError: the file exists already, or cannot be written.
    """
    check_free(options.out, options.overwrite)
    source = "Described" + (f': "{options.describe}"' if options.describe else " by options") + "."
    sections = described_sections(options)
    text = rendered(source, sections)
    check(text, str(options.out))
    print("cluster:", *interpretation(options), sep="\n    ")
    missing = [
        f"{entry.key} ({entry.comment.removeprefix(UNKNOWN).split()[0]})"
        for section in sections
        for entry in section.entries
        if entry.value is None
    ]
    if missing:
        print(f"not specified, with defaults: {', '.join(missing)}")
    write_and_report(text, options)


def described_sections(options: ProbeOptions) -> list[Section]:
    """Return the sections of the file for the described cluster; ``nodes`` must be set."""
    assert options.nodes is not None
    each = options.gpus_per_node or 1
    hosts = [
        FileEntry("hosts", options.nodes, "counted from 0"),
        FileEntry("workers", options.nodes * each, f"{each} on each host"),
        FileEntry("placement", "workers", "one host after the other; servers are also on host 0"),
    ]
    network = [
        _entry(name, getattr(options, name), Cluster.model_fields[name].default, about)
        for name, about in NETWORK.items()
    ]
    if options.links:
        network.append(FileEntry("links", options.links, LINKS))
    step, default = options.step_seconds, SimulateOptions.model_fields["compute_time"].default
    about = "seconds of a step" + ("" if step is None else " without slowdown")
    steps = [
        _entry("compute_time", step, default, about),
        _entry("jitter", options.jitter, 0, "standard deviation of the logarithm of a step's time"),
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
    """Return the factor of each slow worker: its host's times its own."""
    each = options.gpus_per_node or 1
    factors = {
        host * each + place: factor
        for host, factor in options.node_slowdown.items()
        for place in range(each)
    }
    for worker, factor in options.slowdown.items():
        factors[worker] = factors.get(worker, 1.0) * factor
    return factors


def interpretation(options: ProbeOptions) -> Iterator[str]:
    """Yield the facts about the cluster in words, a line each."""
    nodes, each = options.nodes or 0, options.gpus_per_node or 1
    yield (
        f"{nodes} host{'s' * (nodes != 1)} with {each} worker{'s' * (each != 1)} each, "
        f"{nodes * each} in total"
    )
    for name, about in NETWORK.items():
        if (value := getattr(options, name)) is not None:
            yield f"{shown(value)} {about}"
    for host, gbit in options.links.items():
        yield f"host {host}: link of {shown(gbit)} Gbit/s"
    if options.step_seconds is not None:
        yield f"{shown(options.step_seconds)} s per step"
    if options.jitter is not None:
        yield f"jitter {options.jitter:.2%}"
    for host, factor in options.node_slowdown.items():
        last = (host + 1) * each - 1
        named = f"worker {last}" if each == 1 else f"workers {host * each} to {last}"
        yield f"host {host} ({named}): slowdown factor {shown(factor)}"
    for worker, factor in options.slowdown.items():
        yield f"worker {worker} (host {worker // each}): slowdown factor {shown(factor)}"
