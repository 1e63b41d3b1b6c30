"""How far a worker has come, and what waits for it."""

from __future__ import annotations

from collections.abc import Callable

from aladdin_mpi.transport.base import Transport


class Reached:
    """All steps of the run's samples before ``samples`` are done.

    For message handlers, where workers go in rounds.
    """

    def __init__(self, transport: Transport) -> None:
        self.samples = 0
        self._transport = transport
        self._is_stepping = False
        self._waiting: list[tuple[int, Callable[[], None]]] = []

    def when(self, samples: int, action: Callable[[], None]) -> None:
        """Call ``action`` when all steps of samples before ``samples`` are done.

        It is called between two steps, as a handler: at the first of these moments, or at once
        if the segment's last step is done.
        """
        if not self._is_stepping and self.samples >= samples:
            action()
        else:
            self._waiting.append((samples, action))

    def advance(self, samples: int, is_stepping: bool) -> None:
        """All steps before ``samples`` are done; the next one follows, or none."""
        with self._transport.atomic():
            self.samples, self._is_stepping = samples, is_stepping
            waiting, self._waiting = self._waiting, []
            for least, action in waiting:
                if samples >= least:
                    action()
                else:
                    self._waiting.append((least, action))
