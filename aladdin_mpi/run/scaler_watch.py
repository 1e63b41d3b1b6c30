"""Notices torch's GradScaler in a training loop: the gradients would be sent scaled."""

from __future__ import annotations

from functools import wraps
from typing import Any, ClassVar

from torch.amp import GradScaler

from aladdin_mpi.errors import UserError

COUNTS = "counts_for_aladdin_mpi"
"""An attribute of ``GradScaler.scale`` that counts."""


class ScalerWatch:
    """Counts how often a loss is scaled by an enabled ``GradScaler``, in this process."""

    _scaled: ClassVar[int] = 0

    def __init__(self) -> None:
        if not hasattr(GradScaler.scale, COUNTS):
            GradScaler.scale = _counting(GradScaler.scale)  # type: ignore[method-assign]
        self._before = 0

    def begin(self) -> None:
        """A batch is handed out."""
        self._before = ScalerWatch._scaled

    def end(self) -> None:
        """run.step() has been called.

        Raises:
            UserError: a loss was scaled in between.
        """
        if ScalerWatch._scaled != self._before:
            raise UserError(
                "training loop: a GradScaler has scaled the loss, and so the gradients; use "
                "run.scale(loss).backward() in its place, or autocast with bfloat16, which needs "
                "no scale"
            )


def _counting(scale: Any) -> Any:
    """Return ``scale`` with a count of its calls; it stays in place when the run has ended."""

    @wraps(scale)
    def counted(scaler: GradScaler, outputs: Any) -> Any:
        ScalerWatch._scaled += scaler.is_enabled()
        return scale(scaler, outputs)

    setattr(counted, COUNTS, True)
    return counted
