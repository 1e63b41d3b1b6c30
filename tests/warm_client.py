"""Stands in for ``python ARGS``: has a warm process run them, and ends as that one does.

See ``warm.py``. Started without site packages: it has to be there in no time.
"""

import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Ask for the process, pass signals on, wait for its end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until it is known to whom they go
    env = dict(os.environ)
    server = socket.socket(socket.AF_UNIX)
    server.connect(env.pop("ALADDIN_MPI_TESTS_WARM"))
    task = json.dumps({"args": sys.argv[1:], "env": env, "folder": os.getcwd()}).encode()
    socket.send_fds(server, [struct.pack("I", len(task))], [0, 1, 2])
    server.sendall(task)
    pid = read(server)
    # A handler in Python would not run if its signal came just before a read began to block.
    came, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    for number in FORWARDED:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while server.fileno() not in select.select([server.fileno(), came], [], [])[0]:
        for sent in os.read(came, 64):
            pass_on(pid, sent)
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
