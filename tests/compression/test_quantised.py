"""Quantisation of gradients and models to 8, 4 or 2 bits: rounding and conservation."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.codec.quantise import (
    BITS,
    SMALLEST,
    WIDTH,
    Scratch,
    add_dequantised,
    bits_of,
    message_length,
    quantise,
    quantise_difference,
    scales_of,
    steps_of,
)
from aladdin_mpi.codec.quantised import (
    QuantisedCodec,
    QuantisedDecoder,
    QuantisedEncoder,
    make_codec,
)
from aladdin_mpi.flat.layout import Bucket, Layout, cut
from aladdin_mpi.flat.vectors import BLOCK
from aladdin_mpi.options.general import SUM_BITS
from aladdin_mpi.transport.checksums import is_void, void

CPU = torch.device("cpu")
SIZES = [9, 11, 127, 255, 256, 257, 511, 11597, BLOCK, BLOCK + 1, 2 * BLOCK + 300]
FEW = [1, 2, 4, 8]
all_bits = pytest.mark.parametrize("bits", BITS)
both = pytest.mark.parametrize("bits", [8, 4])
"""Bits whose steps are those of the largest value."""
sizes = pytest.mark.parametrize("numel", SIZES)


def drawn(numel: int, seed: int = 0) -> Tensor:
    """Return values whose magnitudes differ widely between blocks, with some zero blocks."""
    random = torch.Generator().manual_seed(seed)
    blocks = -(-numel // WIDTH)
    magnitudes = 10 ** (8 * torch.rand(blocks, generator=random) - 6)
    magnitudes[3::7] = 0
    return torch.randn(numel, generator=random) * magnitudes.repeat_interleave(WIDTH)[:numel]


def step_of(message: Tensor, numel: int) -> Tensor:
    """Return the quantisation step of every value."""
    return scales_of(message, numel).repeat_interleave(WIDTH)[:numel]


def sent(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the message for ``values`` and the residual."""
    message = torch.full((message_length(values.numel(), bits),), nan)
    left = torch.zeros_like(values)
    quantise(values, left, message, bits, Scratch())
    return message, left


def read(message: Tensor, numel: int, alpha: float = 1.0) -> Tensor:
    values = torch.zeros(numel)
    add_dequantised(message, values, alpha, Scratch())
    return values


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def layout_of(numel: int) -> Layout:
    return cut(numel, 1, 64.0, 64.0)


def codec_of(numel: int, bits: int = 8) -> QuantisedCodec:
    wire = {bits: name for name, bits in SUM_BITS.items()}[bits]
    codec = make_codec(wire, layout_of(numel), CPU)
    assert isinstance(codec, QuantisedCodec)
    return codec


# -- the format ---------------------------------------------------------------
def test_message_length_identifies_format() -> None:
    for numel in range(1, 3 * WIDTH + 2):
        lengths = [message_length(numel, bits) for bits in BITS]
        if numel < SMALLEST:
            assert lengths == [numel] * len(BITS)
        else:
            assert len({numel, *lengths}) == 1 + len(BITS)
            assert max(lengths) < numel
            assert [bits_of(numel, length) for length in lengths] == list(BITS)
        assert bits_of(numel, numel) is None


def test_bits_of_rejects_unknown_message_length() -> None:
    with pytest.raises(ValueError, match=r"length: .*\b1000\b.*\b500\b"):
        bits_of(1000, 500)


@pytest.mark.parametrize(("bits", "share"), [(8, 1 / 4), (4, 1 / 8), (2, 1 / 16)])
def test_quantised_message_has_bits_over_32_of_the_bytes_in_fp32(bits: int, share: float) -> None:
    assert message_length(1_000_000, bits) == pytest.approx((share + 1 / 256) * 1e6, abs=2)


@pytest.mark.parametrize(("bits", "steps"), [(8, 127), (4, 7), (2, 1)])
def test_quantisation_is_exact_for_multiples_of_step(bits: int, steps: int) -> None:
    values = torch.arange(-steps, steps + 1).float().repeat(3)
    message, left = sent(values, bits)
    torch.testing.assert_close(read(message, len(values)), values)
    assert left.abs().max() < 1e-4


@both
@sizes
def test_quantisation_rounds_values_to_nearest_step(bits: int, numel: int) -> None:
    values = drawn(numel)
    message, left = sent(values, bits)
    result = read(message, numel)
    step = step_of(message, numel)
    for block, scale in zip(values.split(WIDTH), scales_of(message, numel), strict=True):
        assert float(scale) == pytest.approx(float(block.abs().max()) / steps_of(bits), rel=1e-6)
    assert ((values - result).abs() <= 0.50001 * step).all()
    assert ((values - result - left).abs() <= 1e-5 * step).all()
    whole = result / step.clamp_min(1e-30)
    assert (whole - whole.round()).abs().max() < 1e-4
    assert float(whole.abs().max()) == pytest.approx(steps_of(bits))


@sizes
def test_two_bits_send_the_mean_magnitude_of_large_values(numel: int) -> None:
    values = drawn(numel)
    message, left = sent(values, 2)
    result = read(message, numel)
    torch.testing.assert_close(result + left, values)
    for block, mine in zip(values.split(WIDTH), result.split(WIDTH), strict=True):
        size = block.abs()
        kept = size >= 0.75 * size.mean()
        expected = torch.where(kept, size[kept].mean() * block.sign(), 0.0)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=0)
        assert (mine - block).norm() < 0.7 * block.norm() or not block.any()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_error_feedback_of_two_bits_stays_bounded(is_sparse: bool) -> None:
    """Also if one value of each block is much larger than all others."""
    random = torch.Generator().manual_seed(0)
    left, message = torch.zeros(1000), torch.empty(message_length(1000, 2))
    whole, arrived = torch.zeros(2, 1000, dtype=torch.float64)
    norms = []
    for _ in range(400):
        values = torch.randn(1000, generator=random) + 0.5
        if is_sparse:
            values[::200] *= 1000
        quantise(values, left, message, 2, Scratch())
        whole += values
        arrived += read(message, 1000)
        norms.append(float(left.norm()))
    torch.testing.assert_close(arrived + left, whole, rtol=1e-4, atol=1e-2)
    assert max(norms[200:]) < 1.5 * max(norms[100:200])


@all_bits
def test_quantisation_keeps_zeros(bits: int) -> None:
    message, left = sent(torch.zeros(600), bits)
    assert not read(message, 600).any()
    assert not left.any()
    assert not scales_of(message, 600).any()


@all_bits
@pytest.mark.parametrize("size", [1e-45, 1e-39, 1e-37, 3e38])
def test_quantisation_handles_smallest_and_largest_values(bits: int, size: float) -> None:
    values = drawn(600).sign() * size
    message, left = sent(values, bits)
    result = read(message, 600)
    assert result.isfinite().all()
    assert ((result - values).abs() <= size).all()
    assert ((result + left - values).abs() <= 1e-5 * size).all()


@all_bits
@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_non_finite_values_reach_scales_but_not_residual(bits: int, bad: float, place: int) -> None:
    values = torch.ones(600)
    values[place] = bad
    message, left = sent(values, bits)
    finite = scales_of(message, 600).isfinite()
    assert finite.tolist() == [block != place // WIDTH for block in range(3)]
    assert left.isfinite().all()


@all_bits
def test_alpha_scales_dequantised_values(bits: int) -> None:
    values = drawn(700)
    message, _ = sent(values, bits)
    torch.testing.assert_close(read(message, 700, -0.3), -0.3 * read(message, 700))


# -- gradients ----------------------------------------------------------------
@both
@pytest.mark.parametrize("numel", FEW + SIZES)
def test_quantised_messages_sum_to_gradients_within_half_a_step(bits: int, numel: int) -> None:
    codec, reader = codec_of(numel, bits), codec_of(numel)
    bucket = layout_of(numel).buckets[0]
    room = codec.buffer_for(torch.zeros(numel))
    whole, arrived = torch.zeros(2, numel, dtype=torch.float64)
    largest = torch.zeros(numel)
    for seed in range(20):
        values = drawn(numel, seed)
        kept = values.clone()
        message, event = codec.compress(bucket, values, seed, room)
        assert event is None
        assert same_bits(values, kept)
        assert message.numel() == message_length(numel, bits)
        reader.add(bucket, message.clone(), arrived)
        whole += values
        if numel < SMALLEST:
            assert torch.equal(message, values)
            continue
        step = step_of(message, numel)
        largest = largest.maximum(step * steps_of(bits))  # relative to fp32 sums
        assert ((whole - arrived).abs() <= 0.5 * step + 1e-6 * largest).all()


@both
@pytest.mark.parametrize("numel", [*FEW, 256, 700])
def test_held_values_are_in_next_message(bits: int, numel: int) -> None:
    codec, bucket = codec_of(numel, bits), layout_of(numel).buckets[0]
    (room,) = codec.wires(torch.zeros(numel), [bucket])
    assert room.numel() == message_length(numel, 8)
    held, values, target, arrived = drawn(numel, 1), drawn(numel, 2), *torch.zeros(2, numel)
    codec.hold(bucket, held)
    codec.add_held(bucket, target, -0.5)
    torch.testing.assert_close(target, -0.5 * held)
    message, _ = codec.compress(bucket, values, 0, room)
    codec.add(bucket, message, arrived)
    codec.add_held(bucket, arrived, 1.0)
    torch.testing.assert_close(arrived, held + values)


@both
def test_rounded_residual_loses_less_than_256th_of_step(bits: int) -> None:
    numel, count = 700, 50
    codec, bucket = codec_of(numel, bits), layout_of(numel).buckets[0]
    codec.residual.dtype = torch.bfloat16
    room = codec.buffer_for(torch.zeros(numel))
    whole, arrived, allowed = torch.zeros(3, numel, dtype=torch.float64)
    for seed in range(count):
        values = drawn(numel, seed)
        message, _ = codec.compress(bucket, values, 0, room)
        codec.add(bucket, message, arrived)
        whole += values
        allowed += 0.5 * step_of(message, numel) / 256
    assert codec.residual.left is not None and codec.residual.left.dtype == torch.bfloat16
    lost = (whole - arrived - codec.residual.left).abs()
    assert (lost <= allowed + 1e-4).all()
    assert lost.mean() > 1e-5  # otherwise nothing was rounded


def test_bits_may_change_between_messages() -> None:
    codec, bucket = codec_of(1000), layout_of(1000).buckets[0]
    whole, arrived = torch.zeros(1000), torch.zeros(1000)
    lengths = []
    for seed in range(6):
        codec.bits = BITS[seed % 2]
        values = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        message, _ = codec.compress(bucket, values, seed, codec.buffer(1000))
        codec_of(1000, 4).add(bucket, message, arrived)
        lengths.append(message.numel())
        whole += values
    assert lengths == [message_length(1000, 8), message_length(1000, 4)] * 3
    assert codec.residual.left is not None
    torch.testing.assert_close(arrived + codec.residual.left, whole)


def test_non_finite_gradient_does_not_affect_next_message() -> None:
    codec, bucket = codec_of(1000), layout_of(1000).buckets[0]
    bad = torch.ones(1000)
    bad[700] = nan
    message, _ = codec.compress(bucket, bad, 0, codec.buffer(1000))
    assert not codec.numbers(bucket, message).isfinite().all()
    message, _ = codec.compress(bucket, torch.ones(1000), 1, codec.buffer(1000))
    assert codec.numbers(bucket, message).isfinite().all()
    torch.testing.assert_close(read(message, 1000), torch.ones(1000))


def test_numbers_of_quantised_message_are_its_scales() -> None:
    codec, bucket = codec_of(1000), layout_of(1000).buckets[0]
    message, _ = codec.compress(bucket, drawn(1000), 0, codec.buffer(1000))
    assert codec.numbers(bucket, message).numel() == 4
    dense = torch.ones(1000)
    assert codec.numbers(bucket, dense) is dense


def test_restored_codec_state_is_bit_identical() -> None:
    codec, other, bucket = codec_of(1000), codec_of(1000), layout_of(1000).buckets[0]
    other.load_state_dict(codec.state_dict())
    assert other.residual.left is None
    codec.compress(bucket, drawn(1000), 0, codec.buffer(1000))
    other.load_state_dict(codec.state_dict())
    mine, _ = codec.compress(bucket, drawn(1000, 1), 1, codec.buffer(1000))
    theirs, _ = other.compress(bucket, drawn(1000, 1), 1, other.buffer(1000))
    assert same_bits(mine, theirs)
    assert other.residual.left is not codec.residual.left


@all_bits
def test_void_quantised_message_is_detected(bits: int) -> None:
    message, _ = sent(drawn(1000), bits)
    assert not is_void(message)
    void(message)
    assert is_void(message)


# -- models -------------------------------------------------------------------
class Line:
    """A server's bucket and one worker's copy of it."""

    def __init__(self, numel: int, bits: int) -> None:
        self.codec = codec_of(numel, bits)
        self.bucket = layout_of(numel).buckets[0]
        self.encoder = self.codec.model_encoder()
        self.decoder = self.codec.model_decoder()
        self.values = drawn(numel)
        self.values[::5] = -0.0

    def encode(self, rank: int = 1) -> Tensor:
        room = torch.full((self.bucket.numel + 3,), nan)
        return self.encoder.encode(rank, self.bucket, self.values, room).clone()

    def send(self, rank: int = 1) -> tuple[int, Tensor]:
        """Return the message's length and the worker's copy after it."""
        message = self.encode(rank)
        decoded = self.decoder.decode(self.bucket, message)
        assert decoded is not None
        return message.numel(), decoded

    def shadow(self, rank: int = 1) -> Tensor:
        return self.encoder._last[rank, 0]


@both
@pytest.mark.parametrize("numel", FEW + SIZES)
def test_shadow_model_matches_worker_copy_bit_for_bit(bits: int, numel: int) -> None:
    line = Line(numel, bits)
    assert line.send()[0] == numel
    for seed in range(12):
        line.values += drawn(numel, seed) * 0.5**seed
        line.encoder.use(1, BITS[seed % 2])
        length, copy = line.send()
        assert length == message_length(numel, BITS[seed % 2])
        assert same_bits(copy, line.shadow())
    for _ in range(5):  # rounding is compensated until the residual vanishes in fp32
        _, copy = line.send()
    torch.testing.assert_close(copy, line.values, rtol=1e-5, atol=1e-7)


@both
def test_small_change_of_large_model_arrives(bits: int) -> None:
    line = Line(1000, bits)
    line.values.fill_(1000.0)
    line.send()
    line.values += torch.linspace(-1e-2, 1e-2, 1000)
    _, copy = line.send()
    assert (copy - line.values).abs().max() < 1e-2 / steps_of(bits)


def test_each_worker_has_own_shadow_model_and_bits() -> None:
    line = Line(1000, 8)
    decoders = {n: QuantisedDecoder(Scratch()) for n in (1, 2)}
    line.encoder.use(2, 4)
    lengths = []
    for rank in (1, 2, 1, 1, 2):
        line.values += 1
        line.decoder = decoders[rank]
        length, copy = line.send(rank)
        assert same_bits(copy, line.shadow(rank))
        lengths.append(length)
    eight, four = message_length(1000, 8), message_length(1000, 4)
    assert lengths == [1000, 1000, eight, eight, four]


def test_quantised_model_is_sent_whole_after_forget() -> None:
    line = Line(1000, 8)
    line.send()
    line.encoder.forget()
    line.decoder.forget()
    assert line.send()[0] == 1000
    assert line.send()[0] < 1000


def test_decoder_ignores_differences_after_loss_until_whole_bucket() -> None:
    line = Line(1000, 8)
    line.send()
    line.values += 1
    line.encode()  # never arrives
    line.decoder.lost(line.bucket)
    assert line.decoder.decode(line.bucket, line.encode()) is None
    line.encoder.lost(1, line.bucket.index)
    length, copy = line.send()
    assert length == 1000
    assert torch.equal(copy, line.values)
    assert line.send()[0] < 1000


@pytest.mark.parametrize("wire", SUM_BITS)
@pytest.mark.parametrize("moves_bytes", [False, True])
def test_quantised_message_lengths_are_right_with_timed_computing(
    wire: str, moves_bytes: bool
) -> None:
    bits, meta = SUM_BITS[wire], torch.device("meta")
    codec = make_codec(wire, layout_of(1000), meta, moves_bytes)
    bucket, values = Bucket(0, 0, 1000, 0), torch.zeros(1000, device=meta)
    room = codec.buffer_for(values)
    assert room.device.type == ("cpu" if moves_bytes else "meta")
    message, _ = codec.compress(bucket, values, 0, room)
    assert message.numel() == message_length(1000, bits)
    assert not is_void(message)
    codec.add(bucket, message, values)
    encoder: Any = codec.model_encoder()
    assert isinstance(encoder, QuantisedEncoder)
    lengths = [encoder.encode(1, bucket, values, codec.buffer(1000)).numel() for _ in range(2)]
    encoder.lost(1, 0)
    lengths.append(encoder.encode(1, bucket, values, codec.buffer(1000)).numel())
    assert lengths == [1000, message_length(1000, bits), 1000]
    assert codec.state_dict() == {"left": None}


def test_quantised_blocks_are_independent() -> None:
    """As on a device that processes all blocks at once: a bucket equals its parts in sequence."""
    numel = 2 * BLOCK + 300
    values, shadow = drawn(numel), drawn(numel, 1)
    whole = torch.empty(message_length(numel, 8))
    moved = shadow.clone()
    quantise_difference(values, moved, whole, 8, Scratch())
    for start in range(0, numel, BLOCK):
        part = slice(start, start + BLOCK)
        piece = torch.empty(message_length(values[part].numel(), 8))
        alone = shadow[part].clone()
        quantise_difference(values[part], alone, piece, 8, Scratch())
        assert same_bits(alone, moved[part])
