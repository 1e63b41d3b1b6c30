"""The model that a server sends back, as its difference from the one that it sent last.

Where gradients leave most values out, most of the model is what a worker has already.
A message holds the positions (int32, with float64 int64, relative to the bucket) and the new
values of what has changed, to the bit; or all values, where that is not longer. Values, not
differences of values, so that the worker's copy equals the server's exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire, ModelDecoder, ModelEncoder
from aladdin_mpi.flat.layout import Bucket


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of positions sent with values of ``dtype``; it has as many bytes or more."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def index_values(dtype: torch.dtype) -> int:
    """Return the length of a position, in values of ``dtype``."""
    return index_dtype(dtype).itemsize // dtype.itemsize


def _entry(dtype: torch.dtype) -> int:
    """Length of a position and a value, in values of ``dtype``."""
    return 1 + index_values(dtype)


class DifferenceEncoder(ModelEncoder):
    """A server's memory of what every worker has: as many models as there are workers.

    Args:
        wire: whose dtype the values are sent in.
    """

    def __init__(self, wire: DenseWire) -> None:
        self._dtype = wire.dtype
        self._last: dict[tuple[int, int], Tensor] = {}
        self._touched: dict[int, int] = {}
        self._touched_at_send: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        """See :meth:`ModelEncoder.forget`."""
        self._last.clear()
        self._touched_at_send.clear()

    def lost(self, rank: int, bucket: int) -> None:
        """See :meth:`ModelEncoder.lost`."""
        self._last.pop((rank, bucket), None)

    def touch(self, bucket: Bucket, count: int) -> None:
        """See :meth:`ModelEncoder.touch`."""
        self._touched[bucket.index] = self._touched.get(bucket.index, 0) + count

    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, room: Tensor, always: int = 0
    ) -> Tensor:
        """See :meth:`ModelEncoder.encode`."""
        key = rank, bucket.index
        if values.is_meta:
            return room[: self._likely_length(key, bucket, always)]
        new = values.to(self._dtype)
        last = self._last.get(key)
        if last is None:
            self._last[key] = new.clone()
            return _whole(new, room)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self._dtype.itemsize]
        changed = (new.view(bits) != last.view(bits)).nonzero().view(-1)
        if changed.numel() * _entry(self._dtype) >= bucket.numel:
            last.copy_(new)
            return _whole(new, room)
        chosen = new.index_select(0, changed)
        last.index_copy_(0, changed, chosen)
        return _sparse(changed, chosen, room)

    def _likely_length(self, key: tuple[int, int], bucket: Bucket, always: int) -> int:
        """With timed computing nothing changes: as long as if all had hit other values."""
        touched = self._touched.get(bucket.index, 0)
        last = self._touched_at_send.get(key)
        self._touched_at_send[key] = touched
        if last is None:
            return bucket.numel
        changed = touched - last + (always if touched > last else 0)
        return min(bucket.numel, changed * _entry(self._dtype))


def _whole(values: Tensor, room: Tensor) -> Tensor:
    message = room[: values.numel()]
    message.copy_(values)
    return message


def _sparse(changed: Tensor, values: Tensor, room: Tensor) -> Tensor:
    length = changed.numel() * _entry(values.dtype)
    message = room[:length]
    message[: length - values.numel()].view(index_dtype(values.dtype)).copy_(changed)
    message[length - values.numel() :].copy_(values)
    return message


class DifferenceDecoder(ModelDecoder):
    """A worker's copy of the last model received, in the wire's dtype; kept where it is read."""

    def __init__(self) -> None:
        self._last: dict[int, Tensor] = {}

    def forget(self) -> None:
        """See :meth:`ModelDecoder.forget`."""
        self._last.clear()

    def lost(self, bucket: Bucket) -> None:
        """See :meth:`ModelDecoder.lost`."""
        self._last.pop(bucket.index, None)

    def decode(self, bucket: Bucket, message: Tensor) -> Tensor | None:
        """See :meth:`ModelDecoder.decode`."""
        if message.numel() == bucket.numel:
            whole = self._last.setdefault(bucket.index, torch.empty_like(message))
            return whole.copy_(message)
        last = self._last.get(bucket.index)
        if last is None:
            return None
        count = message.numel() // _entry(message.dtype)
        places = message[: message.numel() - count].view(index_dtype(message.dtype)).long()
        return last.index_copy_(0, places, message[message.numel() - count :])
