"""The progress of a run on the screen: one line that is redrawn, or lines in a file."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from typing import Any, Literal, NamedTuple, TextIO

from tqdm import tqdm
from tqdm.utils import disp_len

from aladdin_mpi.process import console
from aladdin_mpi.process.console import Terminal, find_terminal
from aladdin_mpi.session.coordinator import State

BAR = "{bar}"
"""Stands for a bar in :func:`in_columns`; braces of others are doubled, as in format strings."""
LEAST_BAR = 12
"""Columns of the shortest bar, with the space after it."""
SHORT_DIGITS = 3
NAMES = {"test_accuracy": ("accuracy", "acc"), "test_loss": ("test loss", "test loss")}
"""Of figures, if there are better ones than their own: in full and short."""
UNITS = ("bits", "rounds")
"""The last words of an algorithm's figures that are their units."""
Style = Literal["auto", "live", "lines"]


# -- the line -----------------------------------------------------------------------------
class _Part(NamedTuple):
    """A part of the line; ``rank`` 0 stays longest if there is little room."""

    rank: int
    full: str
    short: str
    name: str = ""
    """Parts of the same name line up in a file."""


def in_full(state: State, widths: MutableMapping[str, int] | None = None) -> str:
    """For a file: everything.

    Args:
        state: of the run.
        widths: of each part of the lines before, which this one lines up with.
    """
    first, *others = _parts(state)
    total = console.number(state.total)
    columns = [first.full, f"{console.number(state.samples):>{len(total)}} of {total} samples"]
    widths = {} if widths is None else widths
    for part in others:
        widths[part.name] = max(widths.get(part.name, 0), disp_len(part.full))
        columns.append(_padded(part.full, widths[part.name]))
    return "  ".join(columns).rstrip()


def in_columns(state: State, columns: int) -> str:
    """For a terminal: exactly ``columns`` wide, as a format string with a place for a bar.

    If not everything fits, words are shortened, and then the least important left out, but
    nothing is cut. The bar takes what is left.
    """
    parts = list(_parts(state))
    for first, *others in ([part.full for part in parts], [part.short for part in parts]):
        text = "  ".join(others)
        room = columns - disp_len(first) - disp_len(text) - 3
        if room >= LEAST_BAR:
            return f"{first} {BAR}  {_escaped(text)}"
        if room >= -1:
            return _escaped(_padded(f"{first}  {text}", columns))
    return _escaped(_padded(" ".join(_most_important(parts, columns)), columns))


def _most_important(parts: list[_Part], columns: int) -> list[str]:
    """The short forms of as many as fit, in their order."""
    kept: set[_Part] = set()
    room = columns + 1
    for part in sorted(parts, key=lambda part: part.rank):
        if disp_len(part.short) < room:
            room -= disp_len(part.short) + 1
            kept.add(part)
    return [part.short for part in parts if part in kept]


def _padded(text: str, columns: int) -> str:
    return text + " " * (columns - disp_len(text))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _parts(state: State) -> Iterator[_Part]:
    """The parts that there are, in the order of the line."""
    # Rounded down: 100 % means that all samples have been drawn.
    share = f"{100 * state.samples // state.total:3d} %"
    yield _Part(0, share, share)
    if state.rate is not None:
        text = console.throughput(state.rate)
        yield _Part(1, text, text, "rate")
    if state.loss is not None:
        yield _figure(2, "loss", "loss", state.loss)
    for place, (name, value) in enumerate(state.figures.items()):
        yield _figure(9 if place else 3, *NAMES.get(name, (name, name)), value)
    if state.lr is not None:
        yield _figure(7, "learning rate", "lr", state.lr)
    if state.waiting is not None:
        text = console.percent(state.waiting)
        yield _Part(6, f"waiting {text}", f"wait {text}", "waiting")
    if state.staleness is not None:
        yield _figure(8, "staleness", "stale", state.staleness)
    for name, value in state.others.items():
        words = name.split("_")
        unit = f" {words.pop()}" if words[-1] in UNITS else ""
        yield _figure(10, " ".join(words), " ".join(words), value, unit)
    yield _figure(11, "epoch", "epoch", state.epoch)
    full = short = f"{state.workers} worker{'s' * (state.workers != 1)}"
    if state.alive != state.workers:
        full = f"{state.alive} of {state.workers} workers alive"
        short = f"{state.alive}/{state.workers} workers"
    yield _Part(5, full, short, "workers")
    if state.left is not None and state.samples < state.total:
        full = f"{console.duration(state.left)} left"
        yield _Part(4, full, f"{console.clock(state.left)} left", "left")


def _figure(rank: int, full: str, short: str, value: float, unit: str = "") -> _Part:
    long, brief = console.number(value), console.number(value, SHORT_DIGITS)
    return _Part(rank, f"{full} {long}{unit}", f"{short} {brief}{unit}", full)


# -- rate and loss ------------------------------------------------------------------------
RECENT_SECONDS = 10.0
"""Rate and loss are those of so many seconds, ..."""
RECENT_SHARE = 0.02
"""... or of this share of the run, if that is less."""


class _Moment(NamedTuple):
    at: float
    """On this process's clock."""
    seconds: float
    """Of training, which in virtual time are others."""
    done: int
    """Samples whose step is over; workers hold others already."""
    loss: float
    """Summed over ``measured`` samples since the beginning."""
    measured: int


class Recent:
    """The rate and the loss of late.

    Args:
        total: samples of the run.
        seconds: of training already.
    """

    def __init__(self, total: int, seconds: float) -> None:
        self._total = total
        self._done, self._loss, self._measured = 0, 0.0, 0
        self._moments = deque([_Moment(time.monotonic(), seconds, 0, 0.0, 0)])

    def add(self, loss: float, samples: int) -> None:
        """A step over so many samples is complete; its mean loss is NaN if it is unknown."""
        self._done += samples
        if isfinite(loss):
            self._loss += loss * samples
            self._measured += samples

    def mark(self, seconds: float) -> tuple[float | None, float | None]:
        """The samples per second and the loss at this moment; None: nothing is known."""
        now = _Moment(time.monotonic(), seconds, self._done, self._loss, self._measured)
        self._moments.append(now)
        while len(self._moments) > 2 and self._is_long(self._moments[1], now):
            self._moments.popleft()
        then = self._moments[0]
        elapsed, measured = now.seconds - then.seconds, now.measured - then.measured
        done = now.done - then.done
        rate = done / elapsed if elapsed > 0 and done else None
        return rate, (now.loss - then.loss) / measured if measured else None

    def _is_long(self, then: _Moment, now: _Moment) -> bool:
        done, is_old = now.done - then.done, now.at - then.at >= RECENT_SECONDS
        is_far = done >= RECENT_SHARE * self._total
        return done > 0 and now.seconds > then.seconds and (is_old or is_far)


# -- the display --------------------------------------------------------------------------
REDRAW_SECONDS = 0.25
LINE_SECONDS = 10.0
"""Without a terminal, a line of progress is printed this often at least, ..."""
LINE_SHARE = 0.1
"""... and whenever this share of the run has passed."""
PATIENCE = 1.0
"""Seconds after which the display is given up: the thread that draws it is stuck."""


class Progress:
    """A line that is redrawn on a terminal; elsewhere, as in a batch job's log, lines.

    Args:
        total: samples of the run.
        samples: drawn already.
        seconds: of training already.
        look: returns the state of the run, without its rate, its loss and the time left.
        style: which of the two; "auto": by where the output goes.
        quiet: neither.
    """

    def __init__(
        self,
        total: int,
        samples: int,
        seconds: float,
        look: Callable[[], State],
        style: Style = "auto",
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._total = total
        self._look = look
        self._recent = Recent(total, seconds)
        self._begun: tuple[float, int] | None = None
        self._output: Live | Lines | None = None
        stream = stream or sys.stderr
        if quiet:
            return
        terminal = None if style == "lines" else find_terminal(stream)
        if terminal is None and style == "live":
            terminal = Terminal(stream, None)
        if terminal is None:
            self._output = Lines(total, samples, stream)
        else:
            self._output = Live(look(), terminal)
            console.show(self._output)

    def report(self, drawn: int, seconds: float, loss: float, samples: int) -> None:
        """A worker has completed a step over so many samples; its mean loss may be NaN."""
        if self._output is None:
            return
        self._recent.add(loss, samples)
        if self._begun is None:
            self._begun = time.monotonic(), drawn
        if self._output.is_due(drawn):
            self._draw(self._output, drawn, seconds)

    def _draw(self, output: Live | Lines, drawn: int, seconds: float) -> None:
        rate, loss = self._recent.mark(seconds)
        output.draw(replace(self._look(), rate=rate, loss=loss, left=self._left(drawn)))

    def _left(self, drawn: int) -> float | None:
        """Seconds on this process's clock: in virtual time those of the run say nothing."""
        at, before = self._begun or (0.0, drawn)
        done = drawn - before
        return (time.monotonic() - at) / done * (self._total - drawn) if done > 0 else None

    def give_up(self) -> None:
        """Another display follows, on a line of its own."""
        if isinstance(self._output, Live):
            console.close()
        self._output = None

    def close(self) -> None:
        """The run is over, or suspended: leave its last state on the screen."""
        if isinstance(self._output, Live):
            state = self._look()
            self._draw(self._output, state.samples, state.seconds)
            console.close()


class Lines:
    """A line now and then, on ``stream``, of a run of ``total`` samples."""

    def __init__(self, total: int, samples: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._widths: dict[str, int] = {}
        self._printed, self._printed_at = samples, time.monotonic()

    def is_due(self, samples: int) -> bool:
        """Whether to print one."""
        return (
            (samples - self._printed) / self._total >= LINE_SHARE
            or time.monotonic() - self._printed_at >= LINE_SECONDS
            or samples >= self._total > self._printed
        )

    def draw(self, state: State) -> None:
        """Print one."""
        self._printed, self._printed_at = state.samples, time.monotonic()
        console.say(in_full(state, self._widths), self._stream)


class _Bar(tqdm):
    """Of tqdm, without its thread and without its lock among processes."""

    monitor_interval = 0
    _lock = threading.RLock()


class Live:
    """One line on a terminal, redrawn.

    It is as wide as the terminal. So what others print next to it (another rank, a library)
    begins on a line of its own, and the next drawing is below that. Nothing else is asked of the
    terminal: when a process is killed it needs no repair.
    """

    def __init__(self, state: State, terminal: Terminal) -> None:
        self._terminal = terminal
        self._columns = columns = terminal.columns
        self._drawn_at = time.monotonic()
        # tqdm draws the bar, clears the line, and keeps threads apart.
        self._bar: tqdm[Any] = _Bar(
            total=state.total,
            initial=state.samples,
            file=terminal.stream,
            ncols=columns,
            ascii=True,
            bar_format=in_columns(state, columns),
        )

    def is_due(self, samples: int) -> bool:
        """Whether to redraw it."""
        return time.monotonic() - self._drawn_at >= REDRAW_SECONDS

    def draw(self, state: State) -> None:
        """Redraw it."""
        self._drawn_at = time.monotonic()
        columns = self._terminal.columns
        with self._bar.get_lock():
            if columns != self._columns:  # tqdm would blank the whole length of the last line
                self._bar.sp = self._bar.status_printer(self._bar.fp)
            self._bar.ncols = self._columns = columns
            self._bar.bar_format = in_columns(state, columns)
            self._bar.n = state.samples
            self._bar.refresh()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For printing: the line is away until it is redrawn.

        Not at once, since what is printed may take a longer way to the terminal than the line.
        """
        with self._locked() as is_ours:
            if is_ours:
                self._bar.clear()
            yield
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        """Leave it on the screen, for good."""
        with self._locked() as is_ours:
            if is_ours:
                self._bar.close()

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Keep other threads from drawing; False: one is stuck in that."""
        is_ours = self._bar.get_lock().acquire(timeout=PATIENCE)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._bar.get_lock().release()
