"""Refuses torch's GradScaler in a training loop: the gradients would be sent scaled."""

from __future__ import annotations

from typing import Any, ClassVar

from torch.amp import GradScaler

from aladdin_mpi.errors import UserError


class ScalerGuard:
    """While one is open, an enabled ``GradScaler`` raises an error when it scales a loss.

    Raises:
        UserError: in ``GradScaler.scale()``.
    """

    _open: ClassVar[int] = 0
    _plain: ClassVar[Any] = GradScaler.scale

    def __init__(self) -> None:
        if not ScalerGuard._open:
            ScalerGuard._plain = GradScaler.scale
            GradScaler.scale = _scale  # type: ignore[method-assign,assignment]
        ScalerGuard._open += 1

    def close(self) -> None:
        """Let scalers scale again, unless another guard is open."""
        ScalerGuard._open -= 1
        if not ScalerGuard._open:
            GradScaler.scale = ScalerGuard._plain  # type: ignore[method-assign]


def _scale(scaler: GradScaler, outputs: Any) -> Any:
    if scaler.is_enabled():
        raise UserError(
            "training loop: a GradScaler has scaled the loss, and so the gradients; use "
            "run.scale(loss).backward() in its place, or autocast with bfloat16, which needs "
            "no scale"
        )
    return ScalerGuard._plain(scaler, outputs)
