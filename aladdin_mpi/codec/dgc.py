"""Deep gradient compression (Lin, Han, Mao, Wang, Dally; ICLR 2018).

Of each matrix or kernel only the values of largest magnitude are sent; the rest accumulates in
``v`` until it is large enough. The paper's four techniques are implemented as follows:

- momentum correction: what is added to ``v`` is ``u``, the step with the worker's own
  momentum, computed by :meth:`aladdin_mpi.optimizers.sgd.MomentumSGD.correct`;
- factor masking: ``u`` is cleared too where ``v`` is sent;
- local clipping: :class:`~aladdin_mpi.optimizers.sgd.MomentumSGD`'s ``clip``;
- warm-up: :meth:`aladdin_mpi.options.general.DgcOptions.ratio_at`.

As in the authors' code (github.com/synxlin/deep-gradient-compression) values are selected
for each tensor separately, as magnitudes differ between layers, and vectors (biases,
normalisation) are sent in full: they are few, and momentum on them stays unchanged.

As gradients omit most values, a worker already has most of the model that a server returns.
Such a message holds the positions and new values of what has changed since the last one,
bit for bit, or all values if that is not longer. New values instead of differences keep the
worker's copy exactly equal to the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.codec.base import DenseWire, GradientCodec, ModelDecoder, ModelEncoder
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.transport.base import Event

FEWEST = 0.8
"""Factor by which the threshold is lowered if less than this share of k values passes."""
ADAPTATIONS = 10
"""Largest number of times that the threshold is lowered."""


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of positions sent with values of ``dtype``, at least as wide."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def index_values(dtype: torch.dtype) -> int:
    """Return the length of a position, in values of ``dtype``."""
    return index_dtype(dtype).itemsize // dtype.itemsize


def _entry(dtype: torch.dtype) -> int:
    """Return the length of a position and a value, in values of ``dtype``."""
    return 1 + index_values(dtype)


def select(values: Tensor, k: int, sample: float, start: int = 0) -> Tensor:
    """Return the indices (int64) of about the ``k`` largest magnitudes in ``values``, at most k.

    The threshold comes from a strided sample, as in Lin et al. (ICLR 2018), and is
    lowered until 0.8 k values pass; if more than k pass, the k largest are selected. NaN
    passes every threshold: if it were held back, it would never be detected.

    On an accelerator the k largest are selected exactly, which avoids a host synchronisation.

    Args:
        values: one-dimensional.
        k: at least 1.
        sample: share of the values in the sample, which should contain at least two of the k.
        start: offset that varies the values in the sample.
    """
    importance = values.abs()
    numel = importance.numel()
    wanted = max(ceil(numel * sample), ceil(2 * numel / k))
    stride = numel // wanted
    if stride < 2 or is_accelerator(values.device):
        return importance.topk(min(k, numel), sorted=False).indices
    sampled = importance[start % stride :: stride]
    threshold = sampled.topk(ceil(sampled.numel() * k / numel)).values[-1]
    for _ in range(ADAPTATIONS):
        passed = importance.lt(threshold).logical_not_()
        passing = int(passed.count_nonzero())
        if passing >= FEWEST * k:
            break
        threshold = threshold * FEWEST
    indices = passed.nonzero().view(-1)
    if passing > k:
        indices = indices[importance[indices].topk(k, sorted=False).indices]
    return indices


class _BucketParts(NamedTuple):
    """The matrices (and kernels) and the vectors of a bucket, as slices relative to its start."""

    matrices: list[slice]
    vectors: list[slice]
    always_sent: int
    """Number of values in the vectors."""


class DeepGradientCompression(GradientCodec):
    """The codec with ``v``: the values that a worker has not sent yet.

    A message holds the selected positions (int32, with float64 int64, relative to the bucket),
    their values, and the bucket's vectors in full; values are in the wire's dtype. If that
    would not be shorter, the bucket is sent in full, as without compression: all of ``v``, and
    momentum is unchanged. The error of rounding to the wire's dtype stays in ``v``. Values that
    remain in ``v`` at the end of a run are not sent.

    Decoding needs only the shapes: a server passes no ``velocity``.

    Args:
        wire: dtype of the values and their staging memory.
        shapes: shapes of the parameters in flat order; those with fewer than two dimensions
            are sent in full.
        ratio: share of values to select, in (0, 1], as a function of the run's samples.
        velocity: the worker's flat momentum ``u``, or None.
        sample: share of values from which the threshold is estimated.
    """

    def __init__(
        self,
        wire: DenseWire,
        layout: Layout,
        shapes: Sequence[tuple[int, ...]],
        ratio: Callable[[int], float],
        velocity: Tensor | None = None,
        sample: float = 0.01,
    ) -> None:
        self.dtype = wire.dtype
        self.ratio = ratio
        self._wire = wire
        self._numel = layout.numel
        self._velocity = velocity
        self._sample = sample
        self._parts = [_parts(bucket, shapes) for bucket in layout.buckets]
        self._index_values = index_values(wire.dtype)
        self._lengths: dict[tuple[int, float], int] = {}
        self.left: Tensor | None = None
        """``v``, flat; None until values have been left out."""

    # -- sizes ----------------------------------------------------------------
    def longest(self, bucket: Bucket, samples: int) -> int:
        """Return the length of the longest message about ``bucket``, in values of ``dtype``."""
        ratio = self.ratio(samples)
        key = bucket.index, ratio
        if key not in self._lengths:
            parts = self._parts[bucket.index]
            entries = sum(_share(part.stop - part.start, ratio) for part in parts.matrices)
            length = entries * _entry(self.dtype) + parts.always_sent
            self._lengths[key] = min(length, bucket.numel)
        return self._lengths[key]

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """Return the values of ``message`` without the positions."""
        if message.numel() == bucket.numel:
            return message
        return message[self.selected(bucket, message.numel()) * self._index_values :]

    def selected(self, bucket: Bucket, length: int) -> int:
        """Return the number of selected values in a message of ``length``."""
        always = self.always_sent(bucket)
        if length == bucket.numel:
            return bucket.numel - always
        return (length - always) // _entry(self.dtype)

    def always_sent(self, bucket: Bucket) -> int:
        """Return the number of values in the bucket's vectors."""
        return self._parts[bucket.index].always_sent

    def model_encoder(self) -> DifferenceEncoder | None:
        """Return an encoder of changes, as a worker already has most of the model."""
        return DifferenceEncoder(self._wire)

    def model_decoder(self) -> DifferenceDecoder | None:
        """Return the decoder for the changes."""
        return DifferenceDecoder()

    # -- memory ----------------------------------------------------------------
    @property
    def plain(self) -> DenseWire:
        """The plain codec of values."""
        return self._wire

    # -- sending ---------------------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Add ``u`` to ``v``, and take the values to send out of ``v``."""
        length = self.longest(bucket, samples)
        whole = length == bucket.numel
        if values.is_meta:
            return out[:length], None
        if whole and self.left is None:
            return self._wire.compress(bucket, values, samples, out)
        if self.left is None:
            # In bf16, a sum of many small gradients would stop growing.
            dtype = full(values.dtype)
            self.left = torch.zeros(self._numel, dtype=dtype, device=values.device)
        left = self.left[bucket.part].add_(values)
        message = self._take(left) if whole else self._take_largest(bucket, left, samples)
        return self._wire.stage(message, out[: message.numel()])

    def _take(self, left: Tensor) -> Tensor:
        """Return ``left`` in the wire's dtype; the rounding error remains in ``left``."""
        sent = left.to(self.dtype, copy=True)
        left.sub_(sent)
        return sent

    def _take_largest(self, bucket: Bucket, left: Tensor, samples: int) -> Tensor:
        parts = self._parts[bucket.index]
        ratio = self.ratio(samples)
        indices = torch.cat(
            [
                part.start
                + select(left[part], _share(part.stop - part.start, ratio), self._sample, samples)
                for part in parts.matrices
            ]
        )
        chosen = left.index_select(0, indices).to(self.dtype)
        left.index_add_(0, indices, chosen.to(left.dtype), alpha=-1)
        if self._velocity is not None:
            self._velocity[bucket.part].index_fill_(0, indices, 0.0)
        vectors = (self._take(left[part]) for part in parts.vectors)
        pieces = (indices.to(index_dtype(self.dtype)), chosen, *vectors)
        # Concatenated as bytes, so that no index is interpreted as a number.
        return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(self.dtype)

    # -- receiving -------------------------------------------------------------
    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the gradient in ``message`` to ``target``."""
        if target.is_meta:
            return
        if message.numel() == bucket.numel:
            self._wire.add(bucket, message, target, alpha)
            return
        count = self.selected(bucket, message.numel())
        values = message[count * self._index_values :]
        indices = message[: count * self._index_values].view(index_dtype(self.dtype))
        target.index_add_(0, indices, values[:count].to(target.dtype), alpha=alpha)
        start = count
        for part in self._parts[bucket.index].vectors:
            mine = target[part]
            mine.add_(values[start : start + mine.numel()], alpha=alpha)
            start += mine.numel()

    # -- checkpoints -------------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return ``v``."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore ``v``."""
        saved = state["left"]
        self.left = (
            None if saved is None else saved.to(self._wire.device, full(saved.dtype), copy=True)
        )

    def scale_held_back(self, factor: float) -> None:
        """Scale ``v``."""
        if self.left is not None:
            self.left.mul_(factor)


def _share(numel: int, ratio: float) -> int:
    return max(1, ceil(ratio * numel))


def _parts(bucket: Bucket, shapes: Sequence[tuple[int, ...]]) -> _BucketParts:
    """Return the matrices and vectors in ``bucket``."""
    matrices: list[slice] = []
    vectors: list[slice] = []
    start = 0
    for shape in shapes:
        stop = start + prod(shape)
        first, last = max(start, bucket.start), min(stop, bucket.stop)
        if first < last:
            part = slice(first - bucket.start, last - bucket.start)
            (matrices if len(shape) > 1 else vectors).append(part)
        start = stop
    always_sent = sum(part.stop - part.start for part in vectors)
    return _BucketParts(matrices, vectors, always_sent)


class DifferenceEncoder(ModelEncoder):
    """Encoder of the values of a model that have changed since the last message to a worker.

    Args:
        wire: supplies the dtype of the values.
    """

    def __init__(self, wire: DenseWire) -> None:
        super().__init__()
        self._dtype = wire.dtype
        self._touched: dict[int, int] = {}
        self._touched_at_send: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        """Send every bucket in full next time."""
        super().forget()
        self._touched_at_send.clear()

    def touch(self, bucket: Bucket, count: int) -> None:
        """Add to the number of changed values of ``bucket``."""
        self._touched[bucket.index] = self._touched.get(bucket.index, 0) + count

    def encode(
        self, rank: int, bucket: Bucket, values: Tensor, out: Tensor, always: int = 0
    ) -> Tensor:
        """Encode the changes, or the whole bucket if that is not longer."""
        key = rank, bucket.index
        if values.is_meta:
            return out[: self._likely_length(key, bucket, always)]
        new = values.to(self._dtype)
        last = self._last.get(key)
        if last is None:
            self._last[key] = new.clone()
            return out[: bucket.numel].copy_(new)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self._dtype.itemsize]
        changed = (new.view(bits) != last.view(bits)).nonzero().view(-1)
        length = changed.numel() * _entry(self._dtype)
        if length >= bucket.numel:
            last.copy_(new)
            return out[: bucket.numel].copy_(new)
        chosen = new.index_select(0, changed)
        last.index_copy_(0, changed, chosen)
        positions = length - chosen.numel()
        out[:positions].view(index_dtype(self._dtype)).copy_(changed)
        out[positions:length].copy_(chosen)
        return out[:length]

    def _likely_length(self, key: tuple[int, int], bucket: Bucket, always: int) -> int:
        """Return the length with simulated computation, as if all changes hit different values."""
        touched = self._touched.get(bucket.index, 0)
        last = self._touched_at_send.get(key)
        self._touched_at_send[key] = touched
        if last is None:
            return bucket.numel
        changed = touched - last + (always if touched > last else 0)
        return min(bucket.numel, changed * _entry(self._dtype))


class DifferenceDecoder(ModelDecoder):
    """Decoder of a :class:`DifferenceEncoder`'s messages."""

    def _update(self, last: Tensor, message: Tensor) -> None:
        positions = message.numel() - message.numel() // _entry(message.dtype)
        places = message[:positions].view(index_dtype(message.dtype)).long()
        last.index_copy_(0, places, message[positions:])
