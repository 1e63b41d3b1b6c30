"""Where a run is, in one line of text that fits its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tqdm.utils import disp_len

from aladdin_mpi.process import units

BAR = "{bar}"
"""Stands for a bar in :func:`in_columns`; braces of others are doubled, as in format strings."""
LEAST_BAR = 12
"""Columns of the shortest bar, with the space behind it."""
SHORT_DIGITS = 3
NAMES = {"test_accuracy": ("accuracy", "acc"), "test_loss": ("test loss", "test loss")}
"""Of figures, where there are better ones than their own: in full and short."""
UNITS = ("bits", "rounds")
"""The last words of an algorithm's figures that are their units."""


@dataclass(frozen=True)
class State:
    """What is known of a run at some moment.

    Attributes:
        samples: drawn by all workers, of ``total``.
        rate: samples per second of late.
        loss: mean of late.
        figures: what was measured, and what the user's loop has logged.
        waiting: share of their time that workers waited.
        staleness: mean, in gradients.
        others: further figures of the algorithm, by name.
        alive: workers that have not failed, of ``workers``.
        left: seconds to go.
    """

    samples: int
    total: int
    epoch: float
    workers: int
    alive: int
    rate: float | None = None
    loss: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    lr: float | None = None
    waiting: float | None = None
    staleness: float | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    left: float | None = None


class _Field(NamedTuple):
    """A part of the line; ``rank`` 0 stays longest where there is little room."""

    rank: int
    full: str
    short: str
    name: str


def in_full(state: State, widths: MutableMapping[str, int] | None = None) -> str:
    """For a file: everything.

    Args:
        state: of the run.
        widths: of each part of the lines before, which this one lines up with.
    """
    first, *others = _fields(state)
    total = units.number(state.total)
    done = f"{units.number(state.samples):>{len(total)}} of {total} samples"
    widths = {} if widths is None else widths
    for part in others:
        widths[part.name] = max(widths.get(part.name, 0), disp_len(part.full))
    columns = [_padded(part.full, widths[part.name]) for part in others]
    return "  ".join([first.full, done, *columns]).rstrip()


def in_columns(state: State, columns: int) -> str:
    """For a terminal: exactly ``columns`` wide, as a format string with a place for a bar.

    Where not everything fits, words are shortened, and then the least important left out, but
    nothing is cut. The bar takes what is left.
    """
    fields = list(_fields(state))
    for parts in ([f.full for f in fields], [f.short for f in fields]):
        text = "  ".join(parts[1:])
        room = columns - disp_len(parts[0]) - disp_len(text) - 3
        if room >= LEAST_BAR:
            return f"{parts[0]} {BAR}  {_escaped(text)}"
        if room >= -1:
            return _escaped(_padded(f"{parts[0]}  {text}", columns))
    return _escaped(_padded(" ".join(_most_important(fields, columns)), columns))


def _most_important(fields: list[_Field], columns: int) -> list[str]:
    """The short forms of as many as fit, in their order."""
    kept: set[int] = set()
    room = columns + 1
    for place, each in sorted(enumerate(fields), key=lambda item: item[1].rank):
        if disp_len(each.short) < room:
            room -= disp_len(each.short) + 1
            kept.add(place)
    return [each.short for place, each in enumerate(fields) if place in kept]


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - disp_len(text))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _fields(state: State) -> Iterator[_Field]:
    """What is there of it, in the order of the line."""
    # Rounded down: 100 % means that all samples have been drawn.
    share = f"{100 * state.samples // state.total:3d} %"
    yield _Field(0, share, share, "share")
    if state.rate is not None:
        text = units.throughput(state.rate)
        yield _Field(1, text, text, "rate")
    if state.loss is not None:
        yield _named(2, "loss", "loss", state.loss)
    for place, (name, value) in enumerate(state.figures.items()):
        full, short = NAMES.get(name, (name, name))
        yield _named(3 if place == 0 else 9, full, short, value)
    if state.lr is not None:
        yield _named(7, "learning rate", "lr", state.lr)
    if state.waiting is not None:
        text = units.percent(state.waiting)
        yield _Field(6, f"waiting {text}", f"wait {text}", "waiting")
    if state.staleness is not None:
        yield _named(8, "staleness", "stale", state.staleness)
    for name, value in state.others.items():
        words = name.split("_")
        unit = words.pop() if words[-1] in UNITS else ""
        yield _named(10, " ".join(words), " ".join(words), value, unit)
    yield _named(11, "epoch", "epoch", state.epoch)
    yield _workers(state)
    if state.left is not None and state.samples < state.total:
        full = f"{units.duration(state.left)} left"
        yield _Field(4, full, f"{units.clock(state.left)} left", "left")


def _named(rank: int, full: str, short: str, value: float, unit: str = "") -> _Field:
    long, brief = units.number(value), units.number(value, SHORT_DIGITS)
    behind = unit and f" {unit}"
    return _Field(rank, f"{full} {long}{behind}", f"{short} {brief}{behind}", full)


def _workers(state: State) -> _Field:
    if state.alive == state.workers:
        text = f"{state.workers} worker{'s' * (state.workers != 1)}"
        return _Field(5, text, text, "workers")
    return _Field(
        5,
        f"{state.alive} of {state.workers} workers alive",
        f"{state.alive}/{state.workers} workers",
        "workers",
    )
