"""A collective of the virtual engine, which moves on as its messages do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from aladdin_mpi.transport.collectives import Steps
from aladdin_mpi.transport.request import Request
from aladdin_mpi.transport.virtual.message import Operation


class Collective(Request):
    """The ``number``-th collective of one rank, under way.

    ``resume`` is called to have the engine call :meth:`advance`, ``finish`` at the end.
    """

    __slots__ = ("_finish", "_missing", "_resume", "_steps", "number", "pending")

    waiter = None

    def __init__(
        self,
        what: str,
        number: int,
        steps: Steps,
        resume: Callable[[Collective], None],
        finish: Callable[[Collective], None],
    ) -> None:
        super().__init__(what)
        self.number = number
        self._steps = steps
        self._resume = resume
        self._finish = finish
        self._missing = 0
        self.pending: Sequence[Operation] = ()

    def advance(self) -> None:
        """Go on as far as no operation is awaited."""
        if self.done:
            return
        for operations in self._steps:
            pending = [cast(Operation, each) for each in operations if not each.done]
            if pending:
                self.pending = pending
                self._missing = len(pending)
                for operation in pending:
                    operation.waiter = self
                return
        self._finish(self)

    def operation_done(self, operation: Request) -> None:
        """Note that an operation that this collective waits for is done."""
        self._missing -= 1
        if not self._missing:
            self._resume(self)

    def abandon(self) -> None:
        """Stop for good."""
        self._steps = iter(())
