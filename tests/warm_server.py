"""Wait for programs to run, and fork a process for each; see ``warm.py``."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

IMPORTED = (
    "numpy",
    "torch.utils.data",
    "torch._dynamo",  # imported by some optimizers of torch
    "torch.utils.tensorboard",
    "matplotlib.pyplot",
    "aladdin_mpi.options.reader",
    "aladdin_mpi.run.trainer",
    "aladdin_mpi.run.resumption",
)
"""Modules that are slow to import, some of this project, but neither MPI nor a command."""
LONGEST_SILENCE = 5.0
"""Interval in seconds at which the server checks whether the tests still run."""


@dataclass(frozen=True)
class Task:
    """A program to run, and the standard streams of its client."""

    args: list[str]
    env: dict[str, str]
    folder: str
    cores: list[int]
    python: str
    pid: int
    streams: list[int]


class Server:
    """Accepts requests, and monitors the forked processes."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ)
        self._children: dict[int, socket.socket] = {}

    def wait_for_task(self, parent: int) -> Task | None:
        """Return the task in a process forked for it; in the server None after ``parent`` ended."""
        while os.getppid() == parent:
            for key, _ in self._selector.select(LONGEST_SILENCE):
                if key.fileobj is self._listening:
                    task = self._accept()
                    if task is not None:
                        return task
                elif key.data in self._children:
                    self._end(key)
        return None

    def _accept(self) -> Task | None:
        """Return the task in the process forked for it."""
        connection, _ = self._listening.accept()
        task = read_task(connection)
        if task is None:
            connection.close()
            return None
        pid = os.fork()
        if not pid:
            self._selector.close()
            for each in (self._listening, connection, *self._children.values()):
                each.close()
            return task
        for stream in task.streams:
            os.close(stream)
        self._children[pid] = connection
        with suppress(OSError):  # the client may have ended already; then the child is ended
            connection.sendall(struct.pack("i", pid))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        self._selector.register(connection, selectors.EVENT_READ, pid)
        return None

    def _end(self, key: selectors.SelectorKey) -> None:
        """Handle the end of a child, or of its client."""
        pid = key.data
        connection = self._children[pid]
        if key.fileobj is connection:
            self._selector.unregister(connection)
            os.kill(pid, signal.SIGKILL)  # its event follows
            return
        _, status = os.waitpid(pid, 0)
        del self._children[pid]
        self._selector.unregister(key.fileobj)
        os.close(key.fd)
        with suppress(KeyError):
            self._selector.unregister(connection)
        with suppress(OSError):  # the client has ended
            connection.sendall(struct.pack("i", status))
        connection.close()


def read_task(connection: socket.socket) -> Task | None:
    """Return the client's request, or None if the client ended before sending it."""
    head, streams, _, _ = socket.recv_fds(connection, 4, 3)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("I", head)
    data = connection.recv(size, socket.MSG_WAITALL)
    return Task(**json.loads(data), streams=list(streams)) if len(data) == size else None


def take_place(task: Task, paths: list[str]) -> None:
    """Make this process equal to the start of ``python *args``."""
    os.setpgid(0, 0)
    for target, stream in enumerate(task.streams):
        os.dup2(stream, target)
        os.close(stream)
    for printed in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, printed).reconfigure(line_buffering=True, write_through=True)
    faulthandler.enable()
    os.chdir(task.folder)
    os.sched_setaffinity(0, task.cores)
    for namespace in ("net", "uts"):
        enter(namespace, task.pid)
    sys.executable = task.python
    os.environ.clear()
    os.environ.update(task.env)
    program = task.args[0]
    script_folder = task.folder if program == "-m" else str(Path(program).resolve().parent)
    given = filter(None, task.env.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [script_folder, *given, *paths]


def enter(namespace: str, pid: int) -> None:
    """Enter the namespaces of process ``pid``, on a host of a network lab (benchmarks/netns.py)."""
    theirs = f"/proc/{pid}/ns/{namespace}"
    if os.readlink(theirs) == os.readlink(f"/proc/self/ns/{namespace}"):
        return
    file = os.open(theirs, os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(file, 0):
        raise OSError(ctypes.get_errno(), f"setns: {theirs}")
    os.close(file)


def run(args: list[str], main: dict[str, Any]) -> None:
    """Run a module, or a file, as ``__main__``, whose names are ``main``."""
    program, *rest = args
    sys.orig_argv[:] = [sys.executable, *args]
    if program == "-m":
        sys.argv[:] = args[:1] + rest[1:]
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        return
    sys.argv[:] = args
    code = compile(Path(program).read_bytes(), program, "exec")
    main.clear()
    main.update(__name__="__main__", __file__=program, __builtins__=__builtins__, __doc__=None)
    exec(code, main)


def end(code: int) -> NoReturn:
    """Exit as Python does, but without tearing down modules, which takes a third of a second.

    Tearing them down would copy all pages shared with the server.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for printed in (sys.stdout, sys.stderr):
        printed.flush()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI, rc

        if rc.finalize is not False and MPI.Is_initialized() and not MPI.Is_finalized():
            MPI.Finalize()  # as at the end of an interpreter
    os._exit(code)


def serve() -> None:
    """Serve until the tests end; also returns in a process that has run its program."""
    for name in IMPORTED:
        importlib.import_module(name)
    # Drawing the curves takes longer than most of the runs.
    vars(sys.modules["aladdin_mpi.run.summary"])["draw_curves"] = lambda *_: None
    gc.collect()
    gc.freeze()  # otherwise garbage collection in the processes would copy all of it
    listening, parent = map(int, sys.argv[1:])
    task = Server(socket.socket(fileno=listening)).wait_for_task(parent)
    if task is not None:
        take_place(task, sys.path[1:])
        try:
            run(task.args, sys.modules["__main__"].__dict__)
        except SystemExit as ended:
            if isinstance(ended.code, str):
                raise  # to be printed
            end(int(ended.code or 0))
        end(0)


if __name__ == "__main__":
    # In a separate module, because the program replaces all of __main__.
    from tests.warm_server import serve as served

    served()
