"""The smallest number of workers with which a run continues."""

from __future__ import annotations

from aladdin_mpi.session.coordinator import Coordinator, RunHook
from aladdin_mpi.transport.base import Transport


class Quorum(RunHook):
    """A hook that suspends the run if fewer than ``least`` workers remain."""

    def __init__(self, transport: Transport, least: int) -> None:
        self._transport = transport
        self._least = least

    def on_begin(self, run: Coordinator) -> None:
        """Check a group that has taken over from another."""
        self._check(run)

    def on_failure(self, run: Coordinator, rank: int) -> None:
        """Check a group that continues without the rank; otherwise spare ranks may replace it."""
        if not self._transport.is_revoked(without=rank):
            self._check(run)

    def _check(self, run: Coordinator) -> None:
        workers = run.failures.surviving_workers
        if workers < self._least:
            run.suspend(
                f"the failure of workers ({workers} {'remain' if workers > 1 else 'remains'}, "
                f"--min-workers {self._least})"
            )
