"""Python processes that have already imported torch, for the programs that tests start.

The import of torch takes a rank one to two seconds of a core, and the imports of this project half
as much again. One server (``warm_server.py``) per test run performs the slow imports and waits.
For each program it forks a process, which then runs as ``python ARGS`` would: in ``__main__``,
with the arguments, environment, folder, cores, network, host name, standard streams and exit
status of the client (``warm_client.py``, which mpirun starts in place of Python). Neither MPI nor
a command is imported before the fork, nor anything that reads the environment at import. Runs draw
no curves.

Tests must not depend on what such a process shares with its server: the parent process,
``/proc/PID/environ``, and settings read at process startup, such as those of the C library and of
hashes. Tests of these and of the order of imports start Python directly. A test that kills a rank
has to kill the warm process, not the client (``process_of``).
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
"""Environment variable with the address of the server, for the client."""
SHARED = "ALADDIN_MPI_TESTS_WARM_PYTHON"
"""Environment variable with the path of the :func:`python` that a test run's processes share."""


@cache
def python() -> str:
    """Return a program that replaces Python: modules and files run in warm processes.

    Python itself runs everything else, such as ``-c``. In a warm process it is ``sys.executable``.
    """
    if SHARED in os.environ:
        return os.environ[SHARED]
    address = _serving()
    program = Path(address).with_name("python")
    mpirun = Path(sys.executable).with_name("mpirun")  # a wheel installs it next to Python
    client = [sys.executable, "-I", "-S", str(CLIENT)]
    _write(program, f"{ADDRESS}={shlex.quote(address)} exec {shlex.join(client)}")
    _write(program.with_name("mpirun"), f"exec {shlex.quote(str(mpirun))}")
    return str(program)


def _write(program: Path, command: str) -> None:
    program.write_text(f'#!/bin/sh\n{command} "$@"\n')
    program.chmod(0o755)


def process_of(pid: int, environment: Collection[bytes]) -> int | None:
    """Return the warm process of client ``pid``, ``pid`` if it is no client, None if unknown yet.

    Args:
        pid: process id of a client, or of Python itself.
        environment: the environment that it was started with, ``NAME=value``.
    """
    start = f"{ADDRESS}=".encode()
    for variable in environment:
        if variable.startswith(start):
            link = Path(f"{variable.removeprefix(start).decode()}.{pid}")
            return int(link.readlink().name) if link.is_symlink() else None
    return pid


@cache
def _serving() -> str:
    """Return the address of this process's server, which is started."""
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
