"""The file of a cluster: its keys in an order for reading, each with what is known of it beside it.

A file is written at once when all is known, never over another one unless that is asked for, and
not before it has been read back as :mod:`aladdin_mpi.simulate` will.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import tomli_w

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.reader import build, parse_part
from aladdin_mpi.options.run import SimulateOptions
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

    @property
    def spread(self) -> str:
        """As it stands beside the figure: ``half of 12 between 0.95 and 0.97``."""
        return self.spread_of("")

    def spread_of(self, what: str) -> str:
        """The same with the name of what was measured, such as ``hosts``."""
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
    """As text."""
    return f"{rounded(value):g}"


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


def command(path: str) -> str:
    """The command line that uses the file."""
    return shlex.join(["python", "-m", "aladdin_mpi.simulate", "--cluster", path])


def rendered(source: str, sections: Sequence[Section]) -> str:
    """The file's text; ``source`` says in a line where the figures are from."""
    lines = [f"# A cluster, for: {COMMAND}", *_comments(source), f"# {HINT}"]
    tables: list[str] = []
    for section in sections:
        lines += ["", f"# -- {section.title}"]
        for entry in section.entries:
            if isinstance(entry.value, dict):
                tables += _table(entry)
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


def _table(entry: FileEntry) -> list[str]:
    """After all else: what follows a table's head belongs to it."""
    rows = [f"{key} = {value!r}" for key, value in sorted(entry.value.items())]
    return ["", *_comments(entry.comment), f"[{entry.key}]", *rows]


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
        UserError: the file is there, or its folder is not.
    """
    if not path.parent.is_dir():
        raise UserError(
            f"--out {path}: expected a folder that is there, got {str(path.parent)!r}; make it "
            "first, or name another"
        )
    if path.is_dir():
        raise UserError(f"--out {path}: expected a file, got a folder; name a file in it")
    if path.exists() and not overwrite:
        raise UserError(
            f"--out {path}: expected a new file, got one that is there; name another, or add "
            "--overwrite"
        )


def write(path: Path, text: str, overwrite: bool) -> Path:
    """Write the file, whole or not at all; returns where to.

    Where another one has come in the meantime, and it is not to be replaced, a name beside it is
    taken, so that what has been measured is not lost.

    Raises:
        UserError: it cannot be written.
    """
    try:
        if overwrite:
            write_whole(path, text.replace(COMMAND, command(path.name)))
            return path
        return _write_beside(path, text)
    except OSError as error:
        raise UserError(
            f"--out {path}: cannot write it ({error.strerror}); name another folder. It would have "
            f"been:\n{text}"
        ) from error


def _write_beside(path: Path, text: str) -> Path:
    name, number = path, 1
    while True:
        try:
            write_new(name, text.replace(COMMAND, command(name.name)))
            return name
        except FileExistsError:
            number += 1
            name = path.with_name(f"{path.stem}-{number}{path.suffix}")
