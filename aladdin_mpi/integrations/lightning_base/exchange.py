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
    """

    def __init__(self, run: DataParallel) -> None:
        self._run = run

    def gather(self, purpose: str, value: Tensor) -> Tensor:
        """Return the values of all surviving workers, stacked in their order, in float64.

        Raises:
            UserError: another worker exchanges something else.
        """
        code = zlib.crc32(purpose.encode()) + 1
        heads = self._run.gather(torch.tensor([code, value.numel()], dtype=torch.float64))
        if (heads != heads[0]).any():
            raise UserError(
                f"{purpose}: the workers called different methods, or with values of different "
                "sizes. In validation, log the same figures on every worker; pass "
                "rank_zero_only=True to self.log() for a figure of one rank."
            )
        return self._run.gather(value)

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
