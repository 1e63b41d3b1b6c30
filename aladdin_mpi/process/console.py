"""What a process prints: whole lines, also beside a display that is redrawn in place."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TextIO


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
