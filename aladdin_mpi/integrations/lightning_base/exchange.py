"""Exchanges among the workers of a run, which all of them have to make in the same order."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.run.data_parallel import DataParallel

OPERATIONS = {"mean": torch.mean, "avg": torch.mean, "sum": torch.sum}
EXTREMES = {"max": torch.amax, "min": torch.amin}


class WorkerExchange:
    """Exchange of tensors among the workers of a run, between two of their batches.

    Args:
        run: has begun.
        number: of this worker.
    """

    def __init__(self, run: DataParallel, number: int) -> None:
        self._run = run
        self._number = number
        self._workers = run.workers

    def gather(self, purpose: str, value: Tensor) -> Tensor:
        """Return the values of all surviving workers, stacked in their order, in float64.

        Raises:
            UserError: another worker exchanges something else.
        """
        mine = value.detach().to("cpu", torch.float64).reshape(-1)
        code = zlib.crc32(purpose.encode()) + 1
        heads = self._rows(torch.tensor([code, mine.numel()], dtype=torch.float64))
        if (heads != heads[0]).any():
            raise UserError(
                f"{purpose}: the workers called different methods, or with values of different "
                "sizes. In validation, log the same figures on every worker; pass "
                "rank_zero_only=True to self.log() for a figure of one rank."
            )
        return self._rows(mine).reshape(-1, *value.shape)

    def _rows(self, values: Tensor) -> Tensor:
        """Return one row for each surviving worker."""
        rows = torch.zeros(self._workers, 1 + values.numel(), dtype=torch.float64)
        rows[self._number, 0] = 1
        rows[self._number, 1:] = values
        total = self._run.reduce(rows, "sum")
        return total[total[:, 0] > 0, 1:]

    def reduce(self, purpose: str, value: Tensor, operation: str) -> Tensor:
        """Return the mean, sum, maximum or minimum over the workers, with the type of ``value``.

        Raises:
            UserError: another operation.
        """
        known = OPERATIONS | EXTREMES
        if operation not in known:
            raise UserError(
                f"{purpose}: expected one of {', '.join(known)} as reduce_op, got {operation}; "
                "use self.all_gather() for others"
            )
        return known[operation](self.gather(purpose, value), dim=0).to(value)
