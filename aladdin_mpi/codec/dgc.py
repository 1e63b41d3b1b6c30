"""Deep gradient compression (Lin, Han, Mao, Wang, Dally; ICLR 2018).

Of each matrix or kernel only the values of largest magnitude are sent; the rest wait in
``v`` and are added up until their turn comes. The paper's four devices are here so:

- momentum correction: what is added to ``v`` is ``u``, the step with the worker's own
  momentum, which :meth:`aladdin_mpi.optimizers.sgd.MomentumSGD.correct` makes of the gradient;
- factor masking: ``u`` too is cleared where ``v`` is sent;
- local clipping: :class:`~aladdin_mpi.optimizers.sgd.MomentumSGD`'s ``clip``;
- warm-up: :meth:`aladdin_mpi.options.general.DgcOptions.ratio_at`.

As in the authors' code (github.com/synxlin/deep-gradient-compression) the choice is
made tensor by tensor, for magnitudes differ between layers, and vectors (biases,
normalisation) are sent whole: they are few, and momentum on them stays plain.

As gradients leave most values out, most of the model that a server sends back is what a worker has
already. Such a message holds the positions and the new values of what has changed since the last
one, to the bit; or all values, if that is not longer. Values, not differences of values, so that
the worker's copy equals the server's exactly.
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
from aladdin_mpi.transport.base import Event

FEWEST = 0.8
"""Of the values wanted: with fewer the threshold is lowered, by this factor."""
ADAPTATIONS = 10
"""How often the threshold is lowered at most."""


def index_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of positions sent with values of ``dtype``; it has as many bytes or more."""
    return torch.int64 if dtype.itemsize == 8 else torch.int32


def index_values(dtype: torch.dtype) -> int:
    """Return the length of a position, in values of ``dtype``."""
    return index_dtype(dtype).itemsize // dtype.itemsize


def _entry(dtype: torch.dtype) -> int:
    """Length of a position and a value, in values of ``dtype``."""
    return 1 + index_values(dtype)


def select(values: Tensor, k: int, sample: float, start: int = 0) -> Tensor:
    """Indices (int64) of about the ``k`` largest magnitudes in ``values``, and of no more.

    The threshold comes from a strided sample, as in Lin et al. (ICLR 2018), and is
    lowered until 0.8 k values pass it; of more than k, the k largest are taken. Values
    that are not numbers pass every threshold: kept back, they would never be noticed.

    On an accelerator exactly the k largest, for which the host need not ask how many pass.

    Args:
        values: one-dimensional.
        k: at least 1.
        sample: share of the values in the sample, which expects two of the k at least.
        start: varies the values in the sample.
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
        found = int(passed.count_nonzero())
        if found >= FEWEST * k:
            break
        threshold = threshold * FEWEST
    indices = passed.nonzero().view(-1)
    if found > k:
        indices = indices[importance[indices].topk(k, sorted=False).indices]
    return indices


class _BucketParts(NamedTuple):
    """What a bucket holds of matrices and kernels, and of vectors; relative to its start."""

    matrices: list[slice]
    vectors: list[slice]
    always_sent: int
    """Number of values in the vectors."""


class DeepGradientCompression(GradientCodec):
    """The codec, with ``v``: the values that a worker has not sent yet.

    A message holds the positions chosen (int32, with float64 int64, relative to the bucket), then
    their values, then the bucket's vectors whole; values in the wire's dtype. Where that
    would not be shorter the bucket is sent whole, as without compression: all of
    ``v``, and momentum is left alone. The error of rounding to the wire's dtype
    stays in ``v``. What waits in ``v`` at the end of a run is not sent.

    Decoding needs only the shapes: a server gives no ``velocity``.

    Args:
        wire: format of the values, and where they are staged.
        shapes: of the parameters in flat order; those with fewer than two dimensions
            are sent whole.
        ratio: share of values that is chosen, in (0, 1], as a function of the run's
            samples.
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
        """``v``, flat; None as long as everything has been sent."""

    # -- sizes ----------------------------------------------------------------
    def longest(self, bucket: Bucket, samples: int) -> int:
        """Length of the longest message about ``bucket``, in values of ``dtype``."""
        ratio = self.ratio(samples)
        key = bucket.index, ratio
        if key not in self._lengths:
            parts = self._parts[bucket.index]
            entries = sum(_share(part.stop - part.start, ratio) for part in parts.matrices)
            length = entries * _entry(self.dtype) + parts.always_sent
            self._lengths[key] = min(length, bucket.numel)
        return self._lengths[key]

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """See :meth:`GradientCodec.numbers`."""
        if message.numel() == bucket.numel:
            return message
        return message[self.selected(bucket, message.numel()) * self._index_values :]

    def selected(self, bucket: Bucket, length: int) -> int:
        """See :meth:`GradientCodec.selected`."""
        always = self.always_sent(bucket)
        if length == bucket.numel:
            return bucket.numel - always
        return (length - always) // _entry(self.dtype)

    def always_sent(self, bucket: Bucket) -> int:
        """See :meth:`GradientCodec.always_sent`."""
        return self._parts[bucket.index].always_sent

    def model_encoder(self) -> DifferenceEncoder | None:
        """Most of a model is what a worker has already."""
        return DifferenceEncoder(self._wire)

    def model_decoder(self) -> DifferenceDecoder | None:
        """See :meth:`GradientCodec.model_decoder`."""
        return DifferenceDecoder()

    # -- memory ----------------------------------------------------------------
    @property
    def plain(self) -> DenseWire:
        """The format of the values."""
        return self._wire

    # -- sending ---------------------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """``v <- v + u``, and out of ``v`` what is sent; see :meth:`GradientCodec.compress`."""
        length = self.longest(bucket, samples)
        whole = length == bucket.numel
        if values.is_meta:
            return room[:length], None
        if whole and self.left is None:
            return self._wire.compress(bucket, values, samples, room)
        if self.left is None:
            self.left = torch.zeros(self._numel, dtype=values.dtype, device=values.device)
        left = self.left[bucket.part].add_(values)
        message = self._take(left) if whole else self._take_largest(bucket, left, samples)
        return self._wire.stage(message, room[: message.numel()])

    def _take(self, left: Tensor) -> Tensor:
        """``left`` in the wire's dtype; what rounding loses remains."""
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
        # As bytes, so that no bit of an index is taken for a number.
        return torch.cat([piece.view(torch.uint8) for piece in pieces]).view(self.dtype)

    # -- receiving -------------------------------------------------------------
    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """See :meth:`GradientCodec.add`."""
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
        """``v``."""
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up ``v``."""
        saved = state["left"]
        if saved is not None and self._velocity is not None:
            saved = saved.to(self._velocity.device)
        self.left = None if saved is None else saved.clone()

    def scale_held_back(self, factor: float) -> None:
        """See :meth:`GradientCodec.scale_held_back`."""
        if self.left is not None:
            self.left.mul_(factor)


def _share(numel: int, ratio: float) -> int:
    return max(1, ceil(ratio * numel))


def _parts(bucket: Bucket, shapes: Sequence[tuple[int, ...]]) -> _BucketParts:
    """Where matrices and where vectors lie in ``bucket``."""
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
    """Sends what has changed of a model since the last message to a worker.

    Args:
        wire: whose dtype the values are sent in.
    """

    def __init__(self, wire: DenseWire) -> None:
        super().__init__()
        self._dtype = wire.dtype
        self._touched: dict[int, int] = {}
        self._touched_at_send: dict[tuple[int, int], int] = {}

    def forget(self) -> None:
        """See :meth:`ModelEncoder.forget`."""
        super().forget()
        self._touched_at_send.clear()

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
            return room[: bucket.numel].copy_(new)
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[self._dtype.itemsize]
        changed = (new.view(bits) != last.view(bits)).nonzero().view(-1)
        length = changed.numel() * _entry(self._dtype)
        if length >= bucket.numel:
            last.copy_(new)
            return room[: bucket.numel].copy_(new)
        chosen = new.index_select(0, changed)
        last.index_copy_(0, changed, chosen)
        positions = length - chosen.numel()
        room[:positions].view(index_dtype(self._dtype)).copy_(changed)
        room[positions:length].copy_(chosen)
        return room[:length]

    def _likely_length(self, key: tuple[int, int], bucket: Bucket, always: int) -> int:
        """With timed computing nothing changes: as long as if all had hit other values."""
        touched = self._touched.get(bucket.index, 0)
        last = self._touched_at_send.get(key)
        self._touched_at_send[key] = touched
        if last is None:
            return bucket.numel
        changed = touched - last + (always if touched > last else 0)
        return min(bucket.numel, changed * _entry(self._dtype))


class DifferenceDecoder(ModelDecoder):
    """Reads the messages of a :class:`DifferenceEncoder`."""

    def _update(self, last: Tensor, message: Tensor) -> None:
        positions = message.numel() - message.numel() // _entry(message.dtype)
        places = message[:positions].view(index_dtype(message.dtype)).long()
        last.index_copy_(0, places, message[positions:])
