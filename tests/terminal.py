"""Run programs on a pseudo-terminal of a given width."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CTRL_C = b"\x03"


@dataclass(frozen=True)
class Seen:
    """Output of a program on a terminal.

    Attributes:
        text: all of it, including carriage returns.
        status: exit status of the program; negative: the signal that ended it.
    """

    text: str
    status: int

    def redrawn(self, columns: int) -> list[str]:
        """Return the states of a progress line, each of which has to fill the terminal's width.

        Output of other programs after it starts on the next line, as a terminal shows it.
        """
        states = re.findall(r"\r( *\d+ %[^\r\n]*)", self.text)
        alone = [each for each in states if len(each) <= columns]
        assert alone and {len(each) for each in alone} == {columns}, self.text
        return [each[:columns] for each in states]

    @property
    def lines(self) -> list[str]:
        """Return the visible lines at the end, for lines that are not wider than the terminal."""
        return [_overwritten(line) for line in self.text.replace("\r\n", "\n").split("\n")]


def _overwritten(line: str) -> str:
    """Return a line after applying its carriage returns."""
    shown = ""
    for part in line.split("\r"):
        shown = part + shown[len(part) :]
    return shown.rstrip()


def run_on_terminal(
    command: Sequence[str],
    columns: int,
    env: Mapping[str, str],
    cwd: Path,
    timeout: float = 60,
    type_when: Callable[[str], bytes | None] = lambda text: None,
) -> Seen:
    """Run a program on a terminal to its end; it is killed after ``timeout`` seconds.

    Args:
        columns: width of the terminal.
        type_when: receives all output so far, and returns the input to type, once.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        command,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**env, "TERM": "xterm"},
        cwd=cwd,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(slave)
    seen, has_typed, end = b"", False, time.monotonic() + timeout
    try:
        while time.monotonic() < end:
            if select.select([master], [], [], 0.2)[0]:
                try:
                    seen += os.read(master, 1 << 16)
                except OSError:  # no process uses the terminal any more
                    break
            elif process.poll() is not None:
                break
            if not has_typed and (typed := type_when(seen.decode(errors="replace"))):
                os.write(master, typed)
                has_typed = True
        status = process.wait(max(0.1, end - time.monotonic()))
        return Seen(seen.decode(errors="replace"), status)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not ended within {timeout} s:\n{seen.decode()}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(master)
