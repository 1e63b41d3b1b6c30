"""Sums over all workers in the middle of a training loop; no worker waits for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import LostError, PeerFailedError, UserError, WaitTimeoutError
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.run.takeover import LoopProgress
from aladdin_mpi.transport.base import Request, Transport, wait_ended
from aladdin_mpi.worker.worker import Worker

START, END = -1.0, inf
"""Replace the sample of a place at the start and at the end of an epoch."""
NOT_CALLED = -1
"""Replaces the number of values: the worker has passed that place without a call."""


class Place(NamedTuple):
    """A place in a worker's loop. A worker passes places in increasing order.

    Attributes:
        epoch: number of the epoch; inf after the loop.
        sample: first sample of the present step's round, or `START` or `END`.
        part: twice the number of the batch in its step, and 1 more after its ``run.step()``; inf
            for a worker without a batch in this round.
    """

    epoch: float = 0
    sample: float = START
    part: float = 0

    @property
    def is_within_epoch(self) -> bool:
        """Whether batches of the epoch have been handed out and others may follow."""
        return START < self.sample < END

    def __str__(self) -> str:
        if self.epoch == inf:
            return "after its loop"
        if not self.is_within_epoch:
            return f"at the {'start' if self.sample == START else 'end'} of epoch {self.epoch:.0f}"
        where = f"sample {self.sample:.0f} of the run"
        if self.part == inf:
            return f"without a batch at {where}"
        return f"{'after' if self.part % 2 else 'before'} the run.step() of {where}"


AFTER_LOOP = Place(inf, END)


class _Call(NamedTuple):
    """A worker's call, as it is sent to the others.

    ``number`` counts the worker's calls from 1; ``length`` is the number of its values, or
    `NOT_CALLED`. If there is one value, it is ``value``.
    """

    number: float
    epoch: float
    sample: float
    part: float
    length: float
    value: float = 0.0

    @property
    def place(self) -> Place:
        return Place(self.epoch, self.sample, self.part)


class Reductions:
    """One worker's side of ``run.reduce()`` and ``run.gather()``, in one group after another.

    Each worker sends its place and value to all others, and adds the values in the order of the
    workers, so that the sums are bit-identical. (An MPI collective would require the servers
    too.) A worker that receives a call for a place that it has passed reports that, so that the
    caller raises an error instead of waiting.
    """

    def __init__(self, progress: LoopProgress) -> None:
        self._progress = progress
        self._place = Place()
        self._transport: Transport
        self._method = ""
        self._rank = self._first = 0
        self._arrived: dict[int, deque[_Call]] = {}
        self._mine: _Call | None = None
        """This worker's present call, until it can be completed."""
        self._is_awake = True

    def connect(self, worker: Worker, algorithm: Algorithm, assist: Callable[[], None]) -> None:
        """Continue in a group of ranks.

        ``assist`` takes part in what ranks that a failure has interrupted may wait for.
        """
        self._algorithm, self._assist = algorithm, assist
        self._rank, self._first = worker.whole.rank, worker.servers
        self._mine, self._place, self._is_awake = None, Place(self._place.epoch), True
        transport = self._transport = worker.whole
        workers = range(worker.servers, transport.size)
        self._arrived = {rank: deque() for rank in workers if rank != transport.rank}
        if self._arrived:
            nbytes = 8 * len(_Call._fields)
            transport.on_message(Tag.AMONG_WORKERS, nbytes, self._arrive, as_numbers=True)
            transport.on_failure(lambda rank: self._wake_after_failure())

    # -- the worker's place in its loop ---------------------------------------------------------
    def move(self, place: Place) -> None:
        """Note that the loop has reached ``place``, unless it has passed it."""
        if place <= self._place:
            return
        self._place = place
        if any(self._arrived.values()):
            with self._transport.atomic():
                self._report_passed()

    def move_within(self, sample: float, part: float) -> None:
        """Note that the loop has reached a place within its present epoch."""
        self.move(Place(self._place.epoch, sample, part))

    def end_epoch(self) -> None:
        """Note that the present epoch has ended, or was left by ``break``."""
        self.move(Place(self._place.epoch, END))

    def _report_passed(self) -> None:
        """Report calls for which others would wait for ever, each once."""
        for rank, calls in self._arrived.items():
            is_new = calls and calls[0].number > self._progress.reductions
            if is_new and calls[0].place < self._place:
                report = _Call(calls.popleft().number, *self._place, NOT_CALLED)
                self._transport.isend(report, rank, Tag.AMONG_WORKERS)

    # -- calls ------------------------------------------------------------------------------------
    def sum(self, value: float | Tensor) -> tuple[Tensor, int]:
        """Return the sum of ``value`` over all surviving workers, in fp64, and their number.

        Raises:
            UserError: not all workers can make this call, or they have not made the same one.
            LostError: the group is revoked. The workers that wait here cannot continue in the
                next one, where other workers may need steps from them before they reach this call.
        """
        rows = self.rows(value, "run.reduce()")
        shape = value.shape if isinstance(value, Tensor) else ()
        return rows.sum(0).reshape(shape), len(rows)

    def rows(self, value: float | Tensor, method: str) -> Tensor:
        """Return a row of fp64 values for each surviving worker, in their order.

        Args:
            value: of this worker.
            method: of the run, which the user has called.

        Raises:
            UserError, LostError: as :meth:`sum`.
        """
        mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1).contiguous()
        self._progress.reductions += 1
        self._method = method
        values = self._gather(mine) if self._arrived else {self._rank: mine}
        return torch.stack([values[rank] for rank in sorted(values)])

    def _gather(self, mine: Tensor) -> dict[int, Tensor]:
        """Return the values of all surviving workers, by rank."""
        self._check_algorithm()
        transport = self._transport
        call = _Call(self._progress.reductions, *self._place, len(mine), float(mine[:1].sum()))
        with transport.atomic():
            self._mine = call
            for rank in set(self._arrived) - transport.failed:
                transport.isend(call, rank, Tag.AMONG_WORKERS)
        self._await_others()
        calls = {rank: each.popleft() for rank, each in self._arrived.items() if each}
        self._check(call, calls)
        if len(mine) == 1:
            values = {
                rank: torch.tensor([each.value], dtype=torch.float64)
                for rank, each in calls.items()
            }
        else:
            values = self._exchange(mine, calls)
        return {**values, self._rank: mine}

    def _await_others(self) -> None:
        """Wait until all surviving workers have made this call.

        After a failure, some may first have to repeat a step, for which they need this worker.
        """
        transport, failed = self._transport, 0
        while self._mine is not None:
            ready = transport.irecv(_nothing(), self._rank, Tag.SUM_READY)
            with transport.atomic():
                self._is_awake = False
                self._wake_if_complete()
                # The last call may have arrived, or a rank may have failed, since the last wait.
                if self._mine is None or len(transport.failed) > failed:
                    self._wake()
            self._wait(ready)
            failed = len(transport.failed)
            self._assist()
            self._check_revoked()

    def _wait(self, ready: Request) -> None:
        try:
            self._transport.wait(ready)
        except WaitTimeoutError as error:
            missing = [rank - self._first for rank, calls in self._arrived.items() if not calls]
            raise WaitTimeoutError(
                f"{self._method}: workers {missing} have not called it in time ({error})"
            ) from error
        self._check_revoked()

    def _exchange(self, mine: Tensor, others: Iterable[int]) -> dict[int, Tensor]:
        """Return the tensors of the others that survive, by rank."""
        transport = self._transport
        received = {rank: torch.empty_like(mine) for rank in others}
        receives = {
            rank: transport.irecv(buffer, rank, Tag.SUMMANDS) for rank, buffer in received.items()
        }
        sends = [transport.isend(mine, rank, Tag.SUMMANDS) for rank in received]
        for rank, request in receives.items():
            try:
                transport.wait(request)
            except PeerFailedError:
                del received[rank]
        self._check_revoked()
        wait_ended(transport, sends)
        return received

    def _arrive(self, source: int, numbers: list[float]) -> None:
        """Take another worker's call or report, as a message handler."""
        self._arrived[source].append(_Call(*numbers))
        self._report_passed()
        self._wake_if_complete()

    def _wake_if_complete(self) -> None:
        """Let this worker's call continue if all others have made it, or one never will."""
        mine, transport = self._mine, self._transport
        if mine is None:
            return
        first = [calls[0] for calls in self._arrived.values() if calls]
        missing = [rank for rank, calls in self._arrived.items() if not calls]
        if transport.failed.issuperset(missing) or any(not _agree(mine, each) for each in first):
            self._mine = None
            self._wake()

    def _wake_after_failure(self) -> None:
        self._wake_if_complete()
        if self._mine is not None:
            self._wake()

    def _wake(self) -> None:
        """End the present wait: handlers cannot wake a waiting thread, but a message can."""
        if not self._is_awake:
            self._is_awake = True
            self._transport.isend(_nothing(), self._transport.rank, Tag.SUM_READY)

    # -- refusals -----------------------------------------------------------------------------
    def _check_algorithm(self) -> None:
        """Refuse calls by which workers could wait for each other for ever."""
        name = self._algorithm.name
        if self._algorithm.bounds_staleness:
            raise UserError(
                f"training loop: {self._method} cannot be combined with {name}: a worker that is "
                f"as far ahead as allowed waits for one that waits in {self._method}. Use another "
                "algorithm; or log figures by run.log(), and pass evaluate= to evaluate."
            )
        if self._place.is_within_epoch and not self._algorithm.lockstep:
            raise UserError(
                f"training loop: {self._method} between two batches requires an algorithm whose "
                f"workers all make the same number of steps, such as ar-sgd or bsp. With {name}, "
                "call it at the ends of run.epochs(), or log figures by run.log()."
            )

    def _check(self, mine: _Call, others: dict[int, _Call]) -> None:
        """Check that all workers have made the same call."""
        for rank, each in others.items():
            if _agree(mine, each):
                continue
            worker = rank - self._first
            if each.place == mine.place:
                raise UserError(
                    f"training loop: {self._method} was called with {mine.length:.0f} values, and "
                    f"on worker {worker} with {each.length:.0f}. Pass tensors of one shape."
                )
            does = "has not called it and is" if each.length == NOT_CALLED else "called it"
            raise UserError(
                f"training loop: {self._method} was called {mine.place}, but worker {worker} "
                f"{does} {each.place}. Every worker must call it equally often and at the same "
                "places, not under a condition that differs between workers, such as run.is_first "
                "(docs/your-script.md)."
            )

    def _check_revoked(self) -> None:
        if self._transport.is_revoked():
            raise LostError(f"a rank failed while workers waited for each other in {self._method}")


def _agree(call: _Call, other: _Call) -> bool:
    """Return whether two workers' calls are the same one, in each worker's loop."""
    return (call.place, call.length) == (other.place, other.length)


def _nothing() -> Tensor:
    return torch.empty(0, dtype=torch.uint8)
