"""Replacement for ``python ARGS``: runs them in a warm process, and exits with its status.

See ``warm.py``. The client is started without site packages, because it has to start fast. A link
next to the server's address, named after this process's id, points to the warm process. Python
itself runs anything that is neither a module nor a file.
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
    """Request the process, forward signals, and wait for its end."""
    program = sys.argv[1] if len(sys.argv) > 1 else ""
    if program != "-m" and not program.endswith(".py"):
        del os.environ["ALADDIN_MPI_TESTS_WARM"]
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until the target of the signals is known
    env = dict(os.environ)
    server = socket.socket(socket.AF_UNIX)
    address = env.pop("ALADDIN_MPI_TESTS_WARM")
    server.connect(address)
    task = json.dumps(
        {
            "args": sys.argv[1:],
            "env": env,
            "folder": os.getcwd(),
            "cores": list(os.sched_getaffinity(0)),
            "python": os.path.join(os.path.dirname(address), "python"),
            "pid": os.getpid(),
        }
    ).encode()
    socket.send_fds(server, [struct.pack("I", len(task))], [0, 1, 2])
    server.sendall(task)
    pid = read(server)
    link = f"{address}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(link)  # of a previous process with the same id
    os.symlink(str(pid), link)
    # A Python handler would not run if its signal arrived just before a read blocks.
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
    """Forward a signal, unless the process has just ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def read(server: socket.socket) -> int:
    """Read a number sent by the server; raise an error if the connection ends."""
    data = server.recv(4, socket.MSG_WAITALL)
    if len(data) < 4:
        sys.exit("the server of warm processes has ended")
    return int(struct.unpack("i", data)[0])


main()
