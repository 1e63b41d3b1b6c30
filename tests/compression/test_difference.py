"""Models sent as differences: the worker's copy is bit-identical to the server's model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.codec.dgc import DifferenceDecoder, DifferenceEncoder
from aladdin_mpi.flat.layout import Bucket

NUMEL = 1000
BUCKET = Bucket(0, 0, NUMEL, 0)
DTYPES = [torch.float32, torch.bfloat16]


def wire_of(dtype: torch.dtype) -> DenseWire:
    return DenseWire(dtype, torch.device("cpu"))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


class Line:
    """A server's bucket and one worker's copy of it."""

    def __init__(self, dtype: torch.dtype = torch.float32, numel: int = NUMEL) -> None:
        self.wire = wire_of(dtype)
        self.bucket = Bucket(0, 0, numel, 0)
        self.encoder = DifferenceEncoder(self.wire)
        self.decoder = DifferenceDecoder()
        self.values = torch.linspace(-1, 1, numel)

    def send(self, rank: int = 1) -> tuple[int, Tensor]:
        """Return the message's length and the worker's copy after it."""
        room = self.wire.buffer(self.bucket.numel + 3)
        message = self.encoder.encode(rank, self.bucket, self.values, room)
        received = message.clone()
        room.zero_()
        decoded = self.decoder.decode(self.bucket, received)
        assert decoded is not None
        return message.numel(), decoded

    def check(self) -> int:
        length, copy = self.send()
        assert same_bits(copy, self.values.to(self.wire.dtype))
        return length


@pytest.mark.parametrize("dtype", DTYPES)
def test_difference_encoder_sends_whole_model_then_changes(dtype: torch.dtype) -> None:
    line = Line(dtype)
    entry = {torch.float32: 2, torch.bfloat16: 3}[dtype]
    assert line.check() == NUMEL
    assert line.check() == 0
    line.values[[3, 999, 500]] += 1
    assert line.check() == 3 * entry
    line.values[:100] *= -3
    assert line.check() == 100 * entry
    line.values[: NUMEL // 2] += 5
    assert line.check() == NUMEL  # a difference would not be shorter
    line.values[7] = 42
    assert line.check() == entry


@given(
    st.sampled_from(DTYPES),
    st.integers(1, 40),
    st.lists(st.lists(st.tuples(st.integers(0, 39), st.floats(width=32)), max_size=12), max_size=6),
)
def test_decoded_copy_is_bit_identical_to_model(
    dtype: torch.dtype, numel: int, rounds: list[list[tuple[int, float]]]
) -> None:
    """Includes zeros of either sign and NaN values."""
    line = Line(dtype, numel)
    line.check()
    for changes in rounds:
        for place, value in changes:
            line.values[place % numel] = value
        line.check()


def test_change_below_wire_precision_is_not_sent() -> None:
    line = Line(torch.bfloat16)
    line.values.fill_(1.0)
    line.check()
    line.values += 1e-4
    assert line.check() == 0
    for _ in range(40):  # most of them are
        line.values += 1e-4
    assert line.check() == NUMEL


def test_difference_encoder_tracks_last_model_per_worker() -> None:
    line = Line()
    decoders = {1: DifferenceDecoder(), 2: DifferenceDecoder()}
    lengths = []
    for rank, place in ((1, 0), (2, 1), (1, 2), (1, 3), (2, 4)):
        line.values[place] += 1
        line.decoder = decoders[rank]
        length, copy = line.send(rank)
        assert torch.equal(copy, line.values)
        lengths.append(length)
    assert lengths == [NUMEL, NUMEL, 4, 2, 6]


def test_difference_encoder_sends_whole_model_after_forget() -> None:
    line = Line()
    line.check()
    line.encoder.forget()
    line.decoder.forget()
    line.values[0] = 9
    assert line.check() == NUMEL
    assert line.check() == 0


def test_difference_length_counts_touched_values_with_timed_computing() -> None:
    wire = DenseWire(torch.float32, torch.device("meta"), moves_bytes=False)
    encoder = DifferenceEncoder(wire)
    values, room = torch.zeros(NUMEL, device="meta"), wire.buffer(NUMEL)

    def length(rank: int) -> int:
        return encoder.encode(rank, BUCKET, values, room, always=5).numel()

    assert length(1) == NUMEL
    encoder.touch(BUCKET, 10)
    encoder.touch(BUCKET, 20)
    assert length(2) == NUMEL
    assert length(1) == 2 * (30 + 5)
    assert length(1) == 0
    encoder.touch(BUCKET, 40)
    assert (length(1), length(2)) == (90, 90)
    encoder.touch(BUCKET, 700)
    assert length(1) == NUMEL


def test_difference_decoder_ignores_changes_after_loss_until_whole_bucket() -> None:
    line = Line()
    line.check()
    line.values[7] += 1
    line.encoder.encode(1, line.bucket, line.values, line.wire.buffer(NUMEL))  # never arrives
    line.decoder.lost(line.bucket)
    line.values[8] += 1
    message = line.encoder.encode(1, line.bucket, line.values, line.wire.buffer(NUMEL))
    assert line.decoder.decode(line.bucket, message) is None
    line.encoder.lost(1, line.bucket.index)
    assert line.check() == NUMEL
    assert line.check() == 0
