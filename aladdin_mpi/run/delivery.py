"""How a batch gets to where the training loop wants it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from aladdin_mpi.accelerator import CopyStream, is_accelerator


class Delivery:
    """Puts batches of any structure on a device: by pinned memory, on a stream of its own.

    Args:
        device: of the model.
        channels_last: images are laid out so.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._copies = CopyStream(device) if is_accelerator(device) else None

    def __call__(self, batch: Any) -> Any:
        """The same batch there."""
        return tree_map(self._put, batch)

    def _put(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            # Such as the batches of a tokenizer, which are no containers that torch knows.
            return item.to(self._device) if callable(getattr(item, "to", None)) else item
        if self._channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        if self._copies is None or item.device.type != "cpu" or item.is_sparse:
            return item.to(self._device, non_blocking=True)
        return self._copies.fetch(item if item.is_pinned() else item.pin_memory())[0]
