"""How busy the machine's cores are while something runs: on Linux, from /proc/stat."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import median
from types import TracebackType

_STAT = Path("/proc/stat")
_TICKS = os.sysconf("SC_CLK_TCK")


class BusyCores:
    """A context manager; at its end `cores` are those in use, by whatever ran, of the machine.

    It is the median over the seconds of the block, so that a start that loads much, and an end
    at which little happens, do not count. None where it cannot be found out.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        self._samples: list[float] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> BusyCores:
        if _STAT.exists():
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()
        self.cores = median(self._samples) if self._samples else None

    def _watch(self) -> None:
        used, moment = _busy_seconds(), time.monotonic()
        while not self._end.wait(1.0):
            now_used, now = _busy_seconds(), time.monotonic()
            self._samples.append((now_used - used) / (now - moment))
            used, moment = now_used, now


def _busy_seconds() -> float:
    """CPU seconds of all cores so far, in programs, in the kernel and for the network."""
    words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[1:8])
    return (user + nice + system + irq + softirq) / _TICKS
