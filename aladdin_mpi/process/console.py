"""Console output: whole lines, numbers with units, and the terminal of the live line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Protocol, TextIO


def number(value: float, digits: int = 4) -> str:
    """Whole numbers in full, ``9,410``, others with as many digits: ``0.03125``, ``1.2e-06``."""
    if isinstance(value, int) or (isfinite(value) and abs(value) >= 10**digits):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def percent(share: float) -> str:
    """A share from 0 to 1: ``28 %``, ``2.8 %``, ``0.028 %``; ``0 %`` if it is less."""
    value = 100 * share
    if abs(value) < 0.01:
        return "0 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.2g} %"


def throughput(samples_per_second: float) -> str:
    """``9,410 samples/s``."""
    return f"{number(samples_per_second)} samples/s"


def duration(seconds: float) -> str:
    """``45 s``, ``3:20 min`` or ``2:05:00 h``."""
    whole = round(seconds)
    text = clock(whole)
    return f"{whole} s" if whole < 60 else f"{text} {'h' if whole >= 3600 else 'min'}"


def clock(seconds: float) -> str:
    """``0:45``, ``3:20`` or ``2:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun"})
"""Pass on, to their own stderr, what ranks print."""
HELPERS = frozenset({"prted", "orted", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"})
"""Pass it on to a launcher, which may be on another host. Linux cuts names to 15 characters."""
SRUN = "slurmstepd"
"""With ``srun --pty`` the rank has a terminal of its own."""
STDOUT, STDERR = 1, 2
COLUMNS = 80
"""Where nobody says how wide the terminal is."""


@dataclass(frozen=True)
class Terminal:
    """A terminal, or what is to be written to as if it were one.

    Attributes:
        stream: leads there.
        descriptor: tells its width; None: nothing does.
    """

    stream: TextIO
    descriptor: int | None

    @property
    def columns(self) -> int:
        """Its width now; if it does not say, that in the environment's ``COLUMNS``, or 80."""
        columns = 0
        if self.descriptor is not None:
            try:
                columns = os.get_terminal_size(self.descriptor).columns
            except OSError:  # it has been closed
                columns = 0
        given = os.environ.get("COLUMNS", "")
        return columns or (int(given) if given.isdecimal() else 0) or COLUMNS


def find_terminal(stream: TextIO) -> Terminal | None:
    """The terminal on which ``stream`` is seen; None: none, or nobody can say."""
    if os.environ.get("TERM") == "dumb":
        return None
    try:
        own = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a program catches what is printed
        return None
    above = list(_forwarders())
    if all(process.name == SRUN for process in above):
        return Terminal(stream, own) if os.isatty(own) else None
    launcher = above[-1]
    if launcher.name not in LAUNCHERS or not any(process.reads(own) for process in above):
        return None
    return launcher.terminal()


@dataclass(frozen=True)
class _Process:
    pid: int
    name: str
    parent: int

    def reads(self, own: int) -> bool:
        """Whether it has the other end of a pipe of ours."""
        pipe = _target(Path(f"/proc/self/fd/{own}"))
        try:
            held = [_target(entry) for entry in Path(f"/proc/{self.pid}/fd").iterdir()]
        except OSError:  # it belongs to somebody else
            return False
        return pipe.startswith("pipe:") and pipe in held

    def terminal(self) -> Terminal | None:
        """The terminal that its stdout and stderr are."""
        out, err = (Path(f"/proc/{self.pid}/fd/{number}") for number in (STDOUT, STDERR))
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK
        try:
            if not (err.is_char_device() and out.samefile(err)):
                return None
            descriptor = os.open(err, flags)
        except OSError:
            return None
        if os.isatty(descriptor):
            return Terminal(_DirectWriter(descriptor), descriptor)
        os.close(descriptor)
        return None


class _DirectWriter(StringIO):
    """Writes to somebody else's terminal, and never waits for it: what it does not take is lost.

    It is no failure either: the terminal may be gone.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        # After ``stty tostop`` it would stop this process, which is in the background.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        with suppress(OSError):
            os.write(self._descriptor, text.encode())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return len(text)


def _forwarders() -> Iterator[_Process]:
    """What passes on what this process prints: helpers, and the launcher, if it is on this host.

    Nothing where there is no /proc.
    """
    pid = os.getppid()
    while pid > 1 and (process := _look_at(pid)) is not None:
        if process.name in LAUNCHERS | HELPERS:
            yield process
        if process.name in LAUNCHERS:
            return
        pid = process.parent


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # it has just been closed
        return ""


def _look_at(pid: int) -> _Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # pid (name) state parent ...; the name may hold anything.
    head, _, tail = stat.rpartition(")")
    return _Process(pid, head.partition("(")[2], int(tail.split()[1]))


class Display(Protocol):
    """What is on the screen and is redrawn."""

    def aside(self) -> AbstractContextManager[None]:
        """For printing: the display is away meanwhile."""

    def close(self) -> None:
        """Leave its last state on the screen, for good; may be called again."""


_display: Display | None = None


def show(display: Display) -> None:
    """From now on lines are printed beside this display."""
    global _display
    _display = display


def close() -> None:
    """End the display, if there is one: what is printed now is the end."""
    global _display
    display, _display = _display, None
    if display is not None:
        display.close()


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines, on stderr unless told otherwise.

    In one piece: the lines of several ranks meet in one file, and without a buffer ``print``
    would write a line and its end apart.
    """
    with nullcontext() if _display is None else _display.aside():
        file = sys.stderr if stream is None else stream
        file.write(text + "\n")
        file.flush()
