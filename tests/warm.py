"""Python processes that have imported torch already, for the programs that tests start.

That import takes a rank two seconds of a core, those of this project and of what it draws with
another half. A server (``warm_server.py``), one for each process of the tests, imports what is
slow and no more, and waits; for each program it forks a process, which then runs as ``python ARGS``
would: in ``__main__``, with the arguments, environment, folder, standard streams and exit status of
whoever asked for it (``warm_client.py``, which mpirun starts in the place of Python). Neither MPI
nor a command is imported before the fork, nor anything that reads the environment while it is.

What such a process has in common with its server is no test's: its parent, ``/proc/PID/environ``
and what is read when a process begins, as by the C library and for hashes. Tests of these, of the
order of imports, and of processes that are hurt, start Python itself.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SERVER = "tests.warm_server"
CLIENT = Path(__file__).with_name("warm_client.py")
ADDRESS = "ALADDIN_MPI_TESTS_WARM"
"""The variable that tells the client where the server is."""


def command(args: Sequence[str], env: dict[str, str]) -> list[str]:
    """The command for ``python *args`` in a warm process; ``env`` is told where the server is."""
    env[ADDRESS] = _serving()
    return [sys.executable, "-I", "-S", str(CLIENT), *args]


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
