"""Console output: whole lines, numbers with units, and the terminal of the live line."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from typing import Protocol, TextIO


def number(value: float, digits: int = 4) -> str:
    """Return whole numbers in full, ``9,410``, others rounded: ``0.03125``, ``1.2e-06``."""
    if isinstance(value, int) or (isfinite(value) and abs(value) >= 10**digits):
        return f"{value:,.0f}"
    return f"{value:,.{digits}g}"


def percent(share: float) -> str:
    """Return a share from 0 to 1 as ``28 %``, ``2.8 %``, ``0.028 %``; ``0 %`` if it is less."""
    value = 100 * share
    if abs(value) < 0.01:
        return "0 %"
    return f"{value:.0f} %" if abs(value) >= 9.95 else f"{value:.2g} %"


def throughput(samples_per_second: float) -> str:
    """Return ``9,410 samples/s``."""
    return f"{number(samples_per_second)} samples/s"


def duration(seconds: float) -> str:
    """Return ``45 s``, ``3:20 min`` or ``2:05:00 h``."""
    whole = round(seconds)
    return f"{whole} s" if whole < 60 else f"{clock(whole)} {'h' if whole >= 3600 else 'min'}"


def clock(seconds: float) -> str:
    """Return ``0:45``, ``3:20`` or ``2:05:00``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


LAUNCHERS = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "prterun", "orterun"})
"""Programs that forward the output of ranks to their own stderr."""
HELPERS = frozenset({"prted", "orted", "hydra_pmi_proxy", "hydra_bstrap_pr", "slurmstepd"})
"""Programs that forward output to a launcher, with names as Linux truncates them."""
SRUN = "slurmstepd"
"""With ``srun --pty``, the rank itself has a terminal."""
STDOUT, STDERR = 1, 2
COLUMNS = 80
"""Width of a terminal if it is unknown."""


@dataclass(frozen=True)
class Terminal:
    """A terminal, or a stream that is used like one.

    ``descriptor`` is for querying the width; None if it is unknown.
    """

    stream: TextIO
    descriptor: int | None

    @property
    def columns(self) -> int:
        """The present width, or else the environment's ``COLUMNS``, or 80."""
        columns = 0
        if self.descriptor is not None:
            with suppress(OSError):  # the terminal has been closed
                columns = os.get_terminal_size(self.descriptor).columns
        given = os.environ.get("COLUMNS", "")
        return columns or (int(given) if given.isdecimal() else 0) or COLUMNS


def find_terminal(stream: TextIO) -> Terminal | None:
    """Return the terminal that displays ``stream``; None if there is none or it is unknown."""
    if os.environ.get("TERM") == "dumb":
        return None
    try:
        own = stream.fileno()
    except (OSError, ValueError, AttributeError):  # no file: a program captures the output
        return None
    above = list(_forwarders())
    if all(name == SRUN for _, name in above):
        return Terminal(stream, own) if os.isatty(own) else None
    launcher, name = above[-1]
    if name not in LAUNCHERS or not any(_reads(pid, own) for pid, _ in above):
        return None
    return _terminal_of(launcher)


def _forwarders() -> Iterator[tuple[int, str]]:
    """Yield pid and name of the processes that forward this one's output.

    These are helpers, and the launcher if it is on this host. Without /proc, none are known.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        # pid (name) state parent ...; the name may contain any characters.
        head, _, tail = stat.rpartition(")")
        name = head.partition("(")[2]
        if name in LAUNCHERS | HELPERS:
            yield pid, name
        if name in LAUNCHERS:
            return
        pid = int(tail.split()[1])


def _reads(pid: int, own: int) -> bool:
    """Return whether a process has the other end of this one's pipe ``own``."""
    pipe = _target(Path(f"/proc/self/fd/{own}"))
    try:
        held = [_target(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:  # the process belongs to another user
        return False
    return pipe.startswith("pipe:") and pipe in held


def _target(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:  # the descriptor has just been closed
        return ""


def _terminal_of(pid: int) -> Terminal | None:
    """Return a process's terminal, if that is both its stdout and its stderr."""
    out, err = (Path(f"/proc/{pid}/fd/{number}") for number in (STDOUT, STDERR))
    try:
        if not (err.is_char_device() and out.samefile(err)):
            return None
        descriptor = os.open(err, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:
        return None
    if os.isatty(descriptor):
        return Terminal(_DirectWriter(descriptor), descriptor)
    os.close(descriptor)
    return None


class _DirectWriter(StringIO):
    """A writer to another process's terminal that never waits; output may be lost."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        # After ``stty tostop``, writing would stop this background process.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        with suppress(OSError):
            os.write(self._descriptor, text.encode())
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return len(text)


def command_line(words: Sequence[str]) -> str:
    """Return a command for a shell, in one line without control characters."""
    return " ".join(shlex.quote(word) if word.isprintable() else _escaped(word) for word in words)


def _escaped(word: str) -> str:
    """Return a word in the quotes of Bash that contain escape sequences."""
    content = word.encode("unicode_escape").decode().replace("'", "\\'")
    return f"$'{content}'"


class Display(Protocol):
    """A display that is redrawn."""

    def aside(self) -> AbstractContextManager[None]:
        """Hide the display within a block, for printing."""

    def close(self) -> None:
        """Leave the last state on the screen; may be called again."""


_display: Display | None = None


def show(display: Display) -> None:
    """Coordinate printed lines with this display from now on."""
    global _display
    _display = display


def close() -> None:
    """Close the display, if any."""
    global _display
    display, _display = _display, None
    if display is not None:
        display.close()


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines, by default on stderr.

    They are written in one piece: several ranks write to one file, and an unbuffered ``print``
    would separate a line from its end. A closed stream, or a full disk, does not end the run.
    """
    with nullcontext() if _display is None else _display.aside():
        file = sys.stderr if stream is None else stream
        with suppress(OSError, ValueError, AttributeError):
            file.write(text + "\n")
            file.flush()


def flush() -> None:
    """Write what is buffered, if that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
