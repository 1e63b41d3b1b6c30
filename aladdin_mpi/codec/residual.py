"""The values that a codec has left out of its messages, until a later message includes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.flat.layout import Bucket


class Residual:
    """The flat vector ``left`` of a codec.

    A failure may interrupt a sum whose summand stays in the model, so that a later sum includes it
    again. Then the residual must not change: :meth:`keep` copies a part of it before the sum, and
    the state is that of the copies until :meth:`settle`.

    With ``dtype`` bf16 the residual is rounded, which loses at most a 256th of it.

    Args:
        numel: length of the flat vector.
        device: device of a restored residual.
    """

    def __init__(self, numel: int, device: torch.device) -> None:
        self.dtype = torch.float32
        self._numel = numel
        self._device = device
        self.left: Tensor | None = None
        """Flat residual; None until something has been sent."""
        self._kept: list[tuple[slice, Tensor]] = []

    def on(self, device: torch.device) -> Tensor:
        """Return ``left``, created on the device of the values if necessary."""
        if self.left is None:
            self.left = torch.zeros(self._numel, dtype=self.dtype, device=device)
        return self.left

    # -- sums that a failure may interrupt ---------------------------------------------
    def keep(self, bucket: Bucket, values: Tensor) -> None:
        """Keep the residual of ``bucket`` until :meth:`settle`; ``values`` are to be summed."""
        if not values.is_meta:
            part = bucket.of(self.on(values.device))
            self._kept.append((bucket.part, part.clone()))

    def settle(self) -> None:
        """Drop all copies: the sums are complete."""
        self._kept.clear()

    # -- checkpoints -------------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return ``left``, without the changes by sums in progress."""
        left = self.left
        if left is not None and self._kept:
            left = left.clone()
            for part, values in self._kept:
                left[part] = values
        return {"left": left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``left``."""
        saved = state["left"]
        self.left = None
        if saved is not None:
            self.left = saved.to(self._device, self.dtype, copy=True)

    def scale_held_back(self, factor: float) -> None:
        """Scale ``left``."""
        if self.left is not None:
            self.left.mul_(factor)
