"""Messages brought to one length, for an all-gather of compressed gradients."""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.compression.dgc import DeepGradientCompression
from aladdin_mpi.compression.difference import index_dtype, index_values
from aladdin_mpi.model.layout import Bucket


def packed_length(codec: DeepGradientCompression, bucket: Bucket, samples: int) -> int:
    """Length of every rank's part, in values of the wire's dtype.

    It depends on the bucket and on the share of values that is sent at ``samples``:
    give the same on all ranks.
    """
    head = _head(codec)
    return head + -(-codec.longest(bucket, samples) // head) * head


def pack(codec: DeepGradientCompression, message: Tensor, part: Tensor) -> None:
    """Put ``message`` into ``part``, which has the packed length, with its length in front.

    Wait first for the event that came with the message.
    """
    if message.is_meta or codec.plain.device.type == "meta":
        return
    head = _head(codec)
    part[:head].view(index_dtype(codec.dtype)).fill_(message.numel())
    part[head : head + message.numel()] = message


def add_packed(
    codec: DeepGradientCompression,
    bucket: Bucket,
    gathered: Tensor,
    parts: int,
    target: Tensor,
    alpha: float = 1.0,
) -> None:
    """``target <- target + alpha * sum of the gradients`` in ``gathered``, in rank order.

    Args:
        codec: any rank's.
        bucket: whose gradients they are.
        gathered: ``parts`` packed messages, one after the other.
        parts: their number.
        target: of the bucket's length.
        alpha: of the sum.
    """
    if target.is_meta:
        return
    head = _head(codec)
    there, _ = codec.plain.fetch(gathered)
    for here, part in zip(gathered.view(parts, -1), there.view(parts, -1), strict=True):
        length = int(here[:head].view(index_dtype(codec.dtype)))
        codec.add(bucket, part[head : head + length], target, alpha)


def _head(codec: DeepGradientCompression) -> int:
    """Values of the wire's dtype that are as long as a position, as the length in front is."""
    return index_values(codec.dtype)
