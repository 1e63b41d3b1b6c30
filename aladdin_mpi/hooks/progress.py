"""The progress display of a run: a line that is redrawn on a terminal, or lines in a file."""

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
"""Placeholder of the bar in :func:`in_columns`; other braces are doubled, as in format strings."""
LEAST_BAR = 12
"""Width of the shortest bar in columns, with the space after it."""
SHORT_DIGITS = 3
NAMES = {"test_accuracy": ("accuracy", "acc"), "test_loss": ("test loss", "test loss")}
"""Display names of figures, in full and short, if they differ from the key."""
UNITS = ("bits", "rounds")
"""Last words of an algorithm's figures that are units."""
Style = Literal["auto", "live", "lines"]


# -- the line -----------------------------------------------------------------------------
class _Part(NamedTuple):
    """A part of the line; the lower its ``rank``, the later it is dropped on a narrow terminal."""

    rank: int
    full: str
    short: str
    name: str = ""
    """Parts with the same name are aligned in a file."""


def in_full(state: State, widths: MutableMapping[str, int] | None = None) -> str:
    """Return the full line for a file.

    Args:
        state: of the run.
        widths: width of each part in earlier lines, for alignment; updated here.
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
    """Return the line for a terminal, exactly ``columns`` wide, as a format string with a bar.

    If it does not fit, words are abbreviated, and then the least important parts are dropped. The
    bar takes the remaining columns.
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
    """Return the short forms of the most important parts that fit, in order."""
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
    """Yield the parts of the line, in order."""
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
    if state.surviving != state.workers:
        full = f"{state.surviving} of {state.workers} workers surviving"
        short = f"{state.surviving}/{state.workers} workers"
    yield _Part(5, full, short, "workers")
    if state.left is not None and state.samples < state.total:
        full = f"{console.duration(state.left)} left"
        yield _Part(4, full, f"{console.clock(state.left)} left", "left")


def _figure(rank: int, full: str, short: str, value: float, unit: str = "") -> _Part:
    long, brief = console.number(value), console.number(value, SHORT_DIGITS)
    return _Part(rank, f"{full} {long}{unit}", f"{short} {brief}{unit}", full)


# -- rate and loss ------------------------------------------------------------------------
RECENT_SECONDS = 10.0
"""Rate and loss are averages over this many seconds, ..."""
RECENT_SHARE = 0.02
"""... or over this share of the run, if that is less."""


class _Moment(NamedTuple):
    at: float
    """On this process's clock."""
    seconds: float
    """Training time, which is simulated time in a simulation."""
    completed: int
    """Samples whose step is complete."""
    loss: float
    """Sum over ``measured`` samples since the start."""
    measured: int


class Recent:
    """The recent rate and loss.

    Args:
        total: samples of the run.
        seconds: training time so far.
        step: samples of a step of all workers, which may report it at the same time.
    """

    def __init__(self, total: int, seconds: float, step: int = 1) -> None:
        self._total, self._step = total, step
        self._completed, self._loss, self._measured = 0, 0.0, 0
        self._moments = deque([_Moment(time.monotonic(), seconds, 0, 0.0, 0)])

    def add(self, loss: float, samples: int) -> None:
        """Add a completed step with its mean loss, NaN if unknown, and its number of samples."""
        self._completed += samples
        if isfinite(loss):
            self._loss += loss * samples
            self._measured += samples

    def mark(self, seconds: float) -> tuple[float | None, float | None]:
        """Return the present samples per second and loss; None if unknown."""
        now = _Moment(time.monotonic(), seconds, self._completed, self._loss, self._measured)
        self._moments.append(now)
        while len(self._moments) > 2 and self._is_long(self._moments[1], now):
            self._moments.popleft()
        then = self._moments[0]
        elapsed, measured = now.seconds - then.seconds, now.measured - then.measured
        completed = now.completed - then.completed
        rate = completed / elapsed if elapsed > 0 and completed else None
        return rate, (now.loss - then.loss) / measured if measured else None

    def _is_long(self, then: _Moment, now: _Moment) -> bool:
        completed, is_old = now.completed - then.completed, now.at - then.at >= RECENT_SECONDS
        is_far = completed >= RECENT_SHARE * self._total
        is_enough = completed >= self._step and now.seconds > then.seconds
        return is_enough and (is_old or is_far)


# -- the display --------------------------------------------------------------------------
REDRAW_SECONDS = 0.25
LINE_SECONDS = 10.0
"""Without a terminal, a line is printed after at most this many seconds, ..."""
LINE_SHARE = 0.1
"""... and after every such share of the run."""
PATIENCE = 1.0
"""Seconds after which the display is given up because the thread that draws it hangs."""


class Progress:
    """The progress display: a line that is redrawn on a terminal, or lines in a file or log.

    Args:
        total: samples of the run.
        step: samples of a step of all workers.
        samples: number drawn so far.
        seconds: training time so far.
        get_state: returns the state of the run, without rate, loss and remaining time.
        style: "live" or "lines"; "auto" selects by the output.
        quiet: display nothing.
    """

    def __init__(
        self,
        total: int,
        step: int,
        samples: int,
        seconds: float,
        get_state: Callable[[], State],
        style: Style = "auto",
        quiet: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self._total = total
        self._get_state = get_state
        self._recent = Recent(total, seconds, step)
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
            self._output = Live(get_state(), terminal)
            console.show(self._output)

    def report(self, drawn: int, seconds: float, loss: float, samples: int) -> None:
        """Report a worker's completed step over ``samples`` samples; its mean loss may be NaN."""
        if self._output is None:
            return
        self._recent.add(loss, samples)
        if self._begun is None:
            self._begun = time.monotonic(), drawn
        if self._output.is_due(drawn):
            self._draw(self._output, drawn, seconds)

    def _draw(self, output: Live | Lines, drawn: int, seconds: float) -> None:
        rate, loss = self._recent.mark(seconds)
        output.draw(replace(self._get_state(), rate=rate, loss=loss, left=self._remaining(drawn)))

    def _remaining(self, drawn: int) -> float | None:
        """Return the remaining seconds on this process's clock, also in a simulation."""
        at, before = self._begun or (0.0, drawn)
        new = drawn - before
        return (time.monotonic() - at) / new * (self._total - drawn) if new > 0 else None

    def give_up(self) -> None:
        """End this display, as another one follows on a separate line."""
        if isinstance(self._output, Live):
            console.close()
        self._output = None

    def close(self) -> None:
        """End the display, and leave the last state on the screen."""
        if isinstance(self._output, Live):
            state = self._get_state()
            self._draw(self._output, state.samples, state.seconds)
            console.close()


class Lines:
    """Progress lines, printed to ``stream`` at intervals during a run of ``total`` samples."""

    def __init__(self, total: int, samples: int, stream: TextIO) -> None:
        self._total = total
        self._stream = stream
        self._widths: dict[str, int] = {}
        self._printed, self._printed_at = samples, time.monotonic()

    def is_due(self, samples: int) -> bool:
        """Return whether to print a line."""
        return (
            (samples - self._printed) / self._total >= LINE_SHARE
            or time.monotonic() - self._printed_at >= LINE_SECONDS
            or samples >= self._total > self._printed
        )

    def draw(self, state: State) -> None:
        """Print a line."""
        self._printed, self._printed_at = state.samples, time.monotonic()
        console.say(in_full(state, self._widths), self._stream)


class _Bar(tqdm):
    """A tqdm bar without its monitoring thread and its lock among processes."""

    monitor_interval = 0
    _lock = threading.RLock()


class Live:
    """One line on a terminal, which is redrawn.

    It is as wide as the terminal, so that other output (of another rank or a library) starts on a
    new line, and the next drawing is below it. It uses no other terminal features: the terminal
    needs no reset when a process is killed.
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
        """Return whether to redraw the line."""
        return time.monotonic() - self._drawn_at >= REDRAW_SECONDS

    def draw(self, state: State) -> None:
        """Redraw the line."""
        self._drawn_at = time.monotonic()
        columns = self._terminal.columns
        with self._bar.get_lock():
            if columns != self._columns:  # tqdm would blank the full length of the previous line
                self._bar.sp = self._bar.status_printer(self._bar.fp)
            self._bar.ncols = self._columns = columns
            self._bar.bar_format = in_columns(state, columns)
            self._bar.n = state.samples
            self._bar.refresh()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Remove the line while other text is printed.

        It is not redrawn at once, because the text may reach the terminal later than the line.
        """
        with self._locked() as is_ours:
            if is_ours:
                self._bar.clear()
            yield
            self._drawn_at = time.monotonic()

    def close(self) -> None:
        """Leave the line on the screen permanently."""
        with self._locked() as is_ours:
            if is_ours:
                self._bar.close()

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Prevent other threads from drawing; yield False if one hangs while drawing."""
        is_ours = self._bar.get_lock().acquire(timeout=PATIENCE)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._bar.get_lock().release()
