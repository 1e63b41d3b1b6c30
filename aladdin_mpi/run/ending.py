"""The end of a run: after its last step, after a loop that was left, or by closing it."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar

from torch import nn

from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.errors import SUSPENDED_STATUS, ClosedError, SuspendedError, UserError
from aladdin_mpi.flat.gradients import Hooks
from aladdin_mpi.process import guard
from aladdin_mpi.run.elastic_runner import ElasticRunner
from aladdin_mpi.run.loop import Loop
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.script import SimulatedRank
from aladdin_mpi.session.coordinator import RunHook
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.worker import Worker


class Ending(RunHook):
    """The end of a run, which releases what it holds in its process and in the user's model.

    As a hook of this rank in each group, it repeats the worker's request to end the run.

    Args:
        error_wording: a context that words errors for the user.

    Attributes:
        has_ended: everything is released.
        was_closed: the run ended before its loop did.
        is_concluding: the algorithm has ended on this rank, and the run is being completed.
        batches: of the user's loop.
        end_loop: ends a loop that an integration keeps open for the script; else None.
    """

    _open: ClassVar[Ending | None] = None
    """The run over MPI that has not ended."""

    def __init__(self, error_wording: Callable[[], AbstractContextManager[None]]) -> None:
        self._error_wording = error_wording
        self.has_ended = self.was_closed = self.is_concluding = False
        self.summary: dict[str, Any] = {}
        self.batches: Generator[Any, None, None] | None = None
        self.end_loop: Callable[[], None] | None = None
        self._transport: Transport | None = None
        self._simulated: SimulatedRank | None = None
        self._module: nn.Module
        self._loop: Loop
        self._runner: ElasticRunner | None = None
        self._is_left = False
        self._hooks = Hooks()
        self._request: Callable[[Worker], None] | None = None
        """By which this worker has requested the end of the run."""

    # -- from the start ---------------------------------------------------------------------
    def simulate(self, rank: SimulatedRank) -> None:
        """Note a simulated rank, whose script must complete this run."""
        self._simulated = rank
        rank.unended.append(self)

    def own(self, transport: Transport) -> None:
        """Close ``transport`` when the run ends; no other run may begin before that."""
        self._transport = transport
        Ending._open = self
        atexit.register(self._at_exit)

    def of(self, module: nn.Module, loop: Loop, runner: ElasticRunner) -> None:
        """Note the components of a run that is ready for its loop."""
        self._module, self._loop, self._runner = module, loop, runner

    def fail(self) -> None:
        """Give up a run that could not be built."""
        if self._transport is not None and self._transport.size > 1:
            # Errors that the ranks agree on have closed the transport. After any other error the
            # other ranks wait, and this one must not wait for them.
            self._transport = None
            atexit.unregister(self._at_exit)
        self.release()

    def release(self) -> None:
        """Note the end of the run: close the transport, and let another run begin."""
        self._end()
        if self._transport is not None:
            rank = self._rank
            (self._transport if rank is None else rank.context.transport).close()
            atexit.unregister(self._at_exit)  # which would keep all vectors in memory until then

    def _end(self) -> None:
        """Let another run begin."""
        self.has_ended = True
        if self._simulated is not None:
            self._simulated.unended.remove(self)
            self._simulated = None
        if Ending._open is self:
            Ending._open = None

    @property
    def _rank(self) -> Rank | None:
        """This rank's part in the run; None before it has one."""
        return self._runner.rank if self._runner is not None else None

    # -- the end ----------------------------------------------------------------------------
    def request_end(self, request: Callable[[Worker], None]) -> None:
        """Request the end of the run from rank 0, and from each rank that replaces it."""
        self._request = request
        self.on_start()

    def on_start(self) -> None:
        """Repeat the request in a new group: a rank 0 that has failed may not have passed it on."""
        rank = self._rank
        if self._request is not None and rank is not None and not rank.context.is_server:
            self._request(rank.worker)

    def conclude(self) -> None:
        """Complete the run after its algorithm has ended on this rank.

        Raises:
            SuspendedError: it was suspended, and saved.
            ClosedError: a rank has closed it.
        """
        self.is_concluding = True
        runner = self._runner
        assert runner is not None and runner.rank is not None
        session = runner.rank.session
        if session.closed_by is not None:
            runner.end()
            self._give_up()
            raise ClosedError(runner.rank.context.transport.original_ranks[session.closed_by])
        if session.suspended:
            runner.end()
            runner.rank.suspend()
            self._end()
            raise SuspendedError
        self.summary = runner.complete()
        runner.end()
        self.release()

    def check_open(self) -> None:
        """Check that the run was not closed.

        Raises:
            UserError: the run was closed.
        """
        if self.was_closed:
            raise UserError(
                "training loop: the run was closed before its loop ended, by run.close(), an error "
                "inside `with DataParallel(...)`, another rank, or a second DataParallel in the "
                "same process. Make another DataParallel to train again. To end a run early and "
                "keep its results, leave the loop by break and do not call close()."
            )

    # -- loops that are left ------------------------------------------------------------------
    def note_left(self) -> None:
        """Note that the loop was left: the next use of model or summary completes the run."""
        rank = self._rank
        if self.has_ended or self._is_left or rank is None or rank.context.is_server:
            return
        self._is_left = True
        module = self._module
        for register in (
            module.register_forward_pre_hook,
            module.register_state_dict_pre_hook,
            module.register_load_state_dict_pre_hook,
        ):
            self._hooks.add(
                module, register, lambda *_: self.finish_left(), before_copy=self.finish_left
            )

    def finish_left(self) -> None:
        """Complete a run whose loop has been left, or has made its last step."""
        if self._is_left or self.is_due:
            self._finish()

    def finish_with_script(self) -> None:
        """Complete the run, if its loop allows it, when the script has ended."""
        if self.end_loop is not None:
            self.end_loop()
        self.finish_left()

    def finish(self) -> None:
        """Complete the run as ``break`` does; close it if its loop has not begun."""
        if not self.has_ended and self._can_drain:
            self._finish()
        self.close()

    def _finish(self) -> None:
        self._forget_left()
        assert self._rank is not None
        with self._error_wording():
            self._loop.note_resumed()
        if not self.is_due:
            self.request_end(Worker.stop)
        self._drain()

    def _drain(self) -> None:
        """Run the algorithm to its end without computing its remaining leases."""
        assert self.batches is not None
        self.batches.close()
        self._loop.drain()
        with self._error_wording():
            self.conclude()

    def _forget_left(self) -> None:
        self._is_left = False
        self._hooks.remove()

    @property
    def _can_drain(self) -> bool:
        """Whether the algorithm waits for the user's loop, or has ended after its last step."""
        if self._runner is None:
            return False
        return self._loop.is_active or (self._loop.has_finished and not self.is_concluding)

    @property
    def is_due(self) -> bool:
        """Whether this worker has made the last step of the run, which can be completed."""
        rank = self._rank
        if rank is None or not self._can_drain or rank.session.is_interrupted:
            return False
        lease = self._loop.lease
        is_past = lease is None or (lease.size == 0 and lease.start >= rank.session.plan.total)
        return is_past or not self._loop.is_active

    # -- runs that are closed -------------------------------------------------------------------
    def close(self) -> None:
        """End the run before its loop does; see :meth:`DataParallel.close`."""
        if self.has_ended:
            return
        rank = self._rank
        if rank is None:
            self.was_closed = True
            self.release()
        elif self._is_alone:
            if self.batches is not None:
                self.batches.close()
            self._loop.abandon()
            self._give_up()
        elif self._can_drain:
            self._forget_left()
            if self._loop.is_active:  # otherwise the other ranks complete the run
                self.request_end(Worker.close_run)
            with suppress(ClosedError):
                self._drain()
        else:
            raise UserError(
                "run.close(): the run has failed on this rank while other ranks wait for it, so "
                "they cannot close it together. Let the error end the program, which ends the "
                "job."
            )

    def _give_up(self) -> None:
        """Release this rank's part in the run, as all ranks do."""
        self._forget_left()
        assert self._rank is not None
        self.was_closed = True
        self._rank.abandon()
        self.release()

    def close_after(self, error: BaseException) -> None:
        """Close the run, if possible, after an error in ``with DataParallel(...)``.

        With several ranks it is not possible if this rank's algorithm has failed or has not begun.
        The error then propagates, and ends the job if it is not caught.
        """
        if self._is_alone or (isinstance(error, Exception) and self._can_drain):
            self.close()

    @property
    def _is_alone(self) -> bool:
        """Whether this is the only rank."""
        rank = self._rank
        transport = self._transport if rank is None else rank.context.transport
        return transport is not None and transport.size == 1

    def _at_exit(self) -> None:
        """Complete the run, or end the job, so that no rank waits for one that has exited."""
        rank = self._rank
        if rank is not None and rank.session.suspended and rank.evaluations.busy:
            # Python cannot exit cleanly while a thread computes.
            guard.leave(SUSPENDED_STATUS)
        try:
            self.finish_with_script()
        except Exception as error:  # Python would print it and end with status 0
            guard.end_job(error)
        if not self.has_ended:
            guard.end_job(
                UserError(
                    "training loop: the program ended before run.batches() did, and other ranks "
                    "are waiting. Let the loop end by itself, leave it by break, or call "
                    "run.close() (docs/troubleshooting.md)."
                )
            )


def complete_due_run() -> None:
    """Complete an earlier run in this process whose loop has made its last step."""
    if Ending._open is not None:
        Ending._open.finish_left()


def end_other_run() -> None:
    """Close an earlier run in this process: two runs at once would share one MPI.

    Raises:
        UserError: an earlier run has not ended, and has several ranks.
    """
    other = Ending._open
    if other is None:
        return
    assert other._transport is not None
    if other._transport.size == 1:
        other.close()
        guard.warn(
            [
                "the previous run had not ended and has been closed; to train several models "
                "together, put them into one module, such as nn.ModuleDict"
            ]
        )
        return
    if other.batches is None:
        all_or_none(other._transport, _refuse_second)
    _refuse_second()


def _refuse_second() -> None:
    raise UserError(
        "DataParallel: a second run was made before the loop of the first ended. After an error, "
        "close the first run on every rank by run.close(), or make it by `with DataParallel(...) "
        "as run:`, which does so. To train several models together, put them into one module, "
        "such as nn.ModuleDict."
    )
