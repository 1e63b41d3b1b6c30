"""Processes of this host, which may have to be killed later, when another has the same id."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process of this host for as long as the host runs."""

    namespace: int
    """The namespace of process ids: containers on one host have different ones."""
    pid: int
    start: int
    """Time of its start after the host's, in clock ticks."""

    @classmethod
    def own(cls) -> ProcessIdentity | None:
        """Return the identity of this process; None on systems without ``/proc``."""
        try:
            return cls(_namespace(), os.getpid(), int(stat_fields(os.getpid())[_START]))
        except OSError:
            return None

    def is_stopped(self) -> bool:
        """Return whether the process is stopped by a signal."""
        fields = self._fields()
        return bool(fields) and fields[0] == "T"

    def kill(self) -> None:
        """Kill the process, also if it is stopped."""
        if self._fields():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)

    def _fields(self) -> list[str]:
        """Return the process's fields; none if it has ended or cannot be seen from here."""
        try:
            fields = stat_fields(self.pid)
            is_same = (self.namespace, self.start) == (_namespace(), int(fields[_START]))
        except OSError:
            return []
        return fields if is_same else []


_START = 19


def _namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def stat_fields(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on.

    Raises:
        OSError: the process has ended, or there is no ``/proc``.
    """
    # They follow the id and the name, which may contain any bytes.
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()
