"""SIGUSR1 and SIGUSR2: batch systems send them before a time limit, to have a run saved.

A handler does no more than to remember the signal. ``run/session.py`` looks.
"""

from __future__ import annotations

import atexit
import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)

_received: list[signal.Signals] = []


def install() -> None:
    """Remember these signals from now on; a handler of the program's own stays."""
    if threading.current_thread() is not threading.main_thread():
        return
    for number in SIGNALS:
        # Anew where it is ours: some MPIs put theirs in its place when they start.
        if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, None, _remember):
            signal.signal(number, _remember)
    atexit.unregister(_ignore)
    atexit.register(_ignore)


def _ignore() -> None:
    """While Python ends it would give these signals back their default, which is to kill."""
    for number in SIGNALS:
        if signal.getsignal(number) is _remember:
            signal.signal(number, signal.SIG_IGN)


def _remember(number: int, frame: FrameType | None) -> None:
    _received.append(signal.Signals(number))


def received() -> signal.Signals | None:
    """The first that has come to this process."""
    return _received[0] if _received else None
