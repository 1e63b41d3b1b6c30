"""Python processes that have imported torch already, for the programs that tests start.

That import takes a rank one to two seconds of a core, those of this project and of what it draws
with another half. A server (``warm_server.py``), one for a test run, imports what is slow and no
more, and waits; for each program it forks a process, which then runs as ``python ARGS``
would: in ``__main__``, with the arguments, environment, folder, cores, network and host name,
standard streams and exit status of whoever asked for it (``warm_client.py``, which mpirun starts in
the place of Python). Neither MPI nor a command is imported before the fork, nor anything that reads
the environment while it is.

What such a process has in common with its server is no test's: its parent, ``/proc/PID/environ``
and what is read when a process begins, as by the C library and for hashes. Tests of these and of
the order of imports start Python itself. Who hurts a rank has to hurt the warm process, not the
client (``process_of``).
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection
from functools import cache
from pathlib import Path

SERVER = "tests.warm_server"
CLIENT = Path(__file__).with_name("warm_client.py")
ADDRESS = "ALADDIN_MPI_TESTS_WARM"
"""The variable that tells the client where the server is."""
SHARED = "ALADDIN_MPI_TESTS_WARM_PYTHON"
"""The variable that tells the processes of a test run which :func:`python` they share."""


@cache
def python() -> str:
    """A program that stands in for Python: modules and files run in warm processes.

    Everything else, such as ``-c``, is Python's own. In a warm process it is ``sys.executable``.
    """
    if SHARED in os.environ:
        return os.environ[SHARED]
    address = _serving()
    program = Path(address).with_name("python")
    mpirun = Path(sys.executable).with_name("mpirun")  # a wheel's lies beside Python
    client = [sys.executable, "-I", "-S", str(CLIENT)]
    _write(program, f"{ADDRESS}={shlex.quote(address)} exec {shlex.join(client)}")
    _write(program.with_name("mpirun"), f"exec {shlex.quote(str(mpirun))}")
    return str(program)


def _write(program: Path, command: str) -> None:
    program.write_text(f'#!/bin/sh\n{command} "$@"\n')
    program.chmod(0o755)


def process_of(pid: int, environment: Collection[bytes]) -> int | None:
    """The warm process that client ``pid`` stands for; ``pid`` if it is none; None: not yet.

    Args:
        pid: of a client, or of Python itself.
        environment: what it was started with, ``NAME=value``.
    """
    start = f"{ADDRESS}=".encode()
    for variable in environment:
        if variable.startswith(start):
            link = Path(f"{variable.removeprefix(start).decode()}.{pid}")
            return int(link.readlink().name) if link.is_symlink() else None
    return pid


@cache
def _serving() -> str:
    """The address of this process's server, which is started."""
    folder = tempfile.mkdtemp(prefix="aladdin_mpi-warm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address = str(Path(folder) / "socket")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(address)
        listening.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", SERVER, str(listening.fileno()), str(os.getpid())],
            cwd=CLIENT.parents[1],
            env=env,
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return address
