"""Measure how busy the machine's cores are while something runs (Linux, from /proc/stat)."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from statistics import mean, median
from types import TracebackType

_STAT = Path("/proc/stat")
TOGETHER = 10
"""Seconds over which stolen time is averaged."""
_TICKS = os.sysconf("SC_CLK_TCK")


class BusyCores:
    """Context manager that measures the machine's cores in use, by any process, as `cores`.

    The value is the median over the seconds of the block, so that start and end do not count.
    `stolen` is the largest share of all cores that a virtual machine's host withheld over ten
    seconds. Both are None if they cannot be measured.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        self.stolen: float | None = None
        self._samples: list[float] = []
        self._stolen: list[float] = []
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
        if self._samples:
            self.cores = median(self._samples)
            self.stolen = _most(self._stolen, TOGETHER) / (os.cpu_count() or 1)

    def _watch(self) -> None:
        (used, stolen), moment = _seconds(), time.monotonic()
        while not self._end.wait(1.0):
            (now_used, now_stolen), now = _seconds(), time.monotonic()
            self._samples.append((now_used - used) / (now - moment))
            self._stolen.append((now_stolen - stolen) / (now - moment))
            used, stolen, moment = now_used, now_stolen, now


def _most(samples: list[float], together: int) -> float:
    """Return the largest mean of that many consecutive samples, or of all if there are fewer."""
    whole = range(max(1, len(samples) - together + 1))
    return max(mean(samples[start : start + together]) for start in whole)


def _seconds() -> tuple[float, float]:
    """Return CPU seconds of all cores so far: programs, kernel and network; and stolen."""
    words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, words[1:9])
    return (user + nice + system + irq + softirq) / _TICKS, stolen / _TICKS
