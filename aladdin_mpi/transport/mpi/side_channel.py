"""Messages between excluded ranks and the others, by which an excluded rank can return.

No receive is posted ahead: an excluded rank may be silent for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

from aladdin_mpi.transport.mpi import world  # before MPI, whose start and end it configures

# isort: split
from mpi4py import MPI

TAG = world.EXIT_TAG + 1


class MpiSideChannel:
    """See :class:`.SideChannel`.

    Args:
        channel: a communicator in which no other message has this tag.
        lock: held while a message is probed and received.
        readmit: ends an exclusion in the transport.
    """

    def __init__(self, channel: MPI.Intracomm, lock: Lock, readmit: Callable[[int], None]) -> None:
        self._channel = channel
        self._lock = lock
        self._sends: list[MPI.Request] = []
        self.readmit = readmit

    def post(self, message: bytes, dest: int) -> None:
        """Send a message, unless MPI knows that the rank has failed."""
        with self._lock:
            self._sends = [send for send in self._sends if not world.has_ended(send)]
            if dest not in world.failed_ranks():
                with suppress(MPI.Exception):
                    self._sends.append(self._channel.Isend(bytearray(message), dest, TAG))

    def read(self, source: int) -> bytes | None:
        """Return the next message that has arrived from a rank, or None."""
        status = MPI.Status()
        with self._lock, suppress(MPI.Exception):
            if self._channel.Iprobe(source, TAG, status):
                message = bytearray(status.Get_count(MPI.BYTE))
                self._channel.Recv(message, source, TAG)
                return bytes(message)
        return None

    def failed(self) -> set[int]:
        """Return the ranks that MPI knows to have failed."""
        return world.failed_ranks()
