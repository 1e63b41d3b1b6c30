"""Stands in for ``python ARGS``: has a warm process run them, and ends as that one does.

See ``warm.py``. Started without site packages: it has to be there in no time.
"""

import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the process, pass signals on, wait for its end."""
    env = dict(os.environ)
    server = socket.socket(socket.AF_UNIX)
    server.connect(env.pop("ALADDIN_MPI_TESTS_WARM"))
    task = json.dumps({"args": sys.argv[1:], "env": env, "folder": os.getcwd()}).encode()
    socket.send_fds(server, [struct.pack("I", len(task))], [0, 1, 2])
    server.sendall(task)
    pid = read(server)
    for number in FORWARDED:
        signal.signal(number, lambda number, frame: pass_on(pid, number))
    status = read(server)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def pass_on(pid: int, number: int) -> None:
    """Send a signal on, unless the process has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def read(server: socket.socket) -> int:
    """A number that the server says; its end is an error."""
    data = server.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        sys.exit("the server of warm processes has ended")
    return int(struct.unpack("i", data)[0])


main()
