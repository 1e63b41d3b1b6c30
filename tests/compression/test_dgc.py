"""Deep gradient compression: selected values, residuals, and conservation of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aladdin_mpi.allreduce.compressed import add_packed, pack, packed_length
from aladdin_mpi.codec.base import DenseWire, GradientCodec
from aladdin_mpi.codec.dgc import DeepGradientCompression, select
from aladdin_mpi.flat.layout import Bucket, Layout, cut
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.general import DgcOptions

SHAPES = [(7,), (20, 30), (30,), (30, 4, 3, 3), (5, 5)]
"""Vectors of 7 and 30 values among matrices and kernels of 600, 1080 and 25."""
NUMEL = 1742
DTYPES = [torch.float32, torch.bfloat16]


def layout_of(bucket: int = 1000) -> Layout:
    return cut(NUMEL, 1, (bucket + 0.5) * 4e-6, 16.0)


def wire_of(dtype: torch.dtype = torch.float32) -> DenseWire:
    return DenseWire(dtype, torch.device("cpu"))


def codec_of(
    ratio: float | Callable[[int], float] = 0.01,
    dtype: torch.dtype = torch.float32,
    velocity: Tensor | None = None,
    layout: Layout | None = None,
) -> DeepGradientCompression:
    rule = ratio if callable(ratio) else lambda samples: ratio
    return DeepGradientCompression(wire_of(dtype), layout or layout_of(), SHAPES, rule, velocity)


def noise(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def whole_numbers(seed: int) -> Tensor:
    """Return values whose sums are exact in fp32, and which are exact in bf16."""
    return torch.randint(-99, 100, (NUMEL,), generator=torch.Generator().manual_seed(seed)).float()


def send(codec: GradientCodec, layout: Layout, u: Tensor, samples: int = 0) -> list[Tensor]:
    """Return one gradient's messages, as they arrive in a receive buffer."""
    room, before = codec.buffer_for(u), u.clone()
    arrived = []
    for bucket in layout.buckets:
        part = bucket.part
        message, event = codec.compress(bucket, u[part], samples, room[part])
        assert event is None
        buffer = codec.buffer(layout.largest)
        assert message.dtype == buffer.dtype == codec.dtype
        assert message.is_contiguous()
        received = buffer[: message.numel()]
        received.view(torch.uint8).copy_(message.view(torch.uint8))
        arrived.append(received)
    assert torch.equal(u, before), "the worker still needs its own gradient"
    return arrived


def receive(codec: GradientCodec, layout: Layout, messages: list[Tensor]) -> Tensor:
    target = torch.zeros(NUMEL)
    for bucket, message in zip(layout.buckets, messages, strict=True):
        codec.add(bucket, message, target[bucket.part])
    return target


def vectors() -> Tensor:
    """Return a mask of the values that belong to vectors."""
    mask = torch.zeros(NUMEL, dtype=torch.bool)
    mask[:7] = mask[607:637] = True
    return mask


# -- selection ----------------------------------------------------------------------------


@given(st.integers(1, 5000), st.floats(1e-4, 1.0), st.floats(1e-3, 1.0), st.integers(0, 10**9))
def test_select_returns_about_k_largest_values(n: int, ratio: float, sample: float, s: int) -> None:
    values = noise(s % 1000, n)
    k = max(1, ceil(ratio * n))
    chosen = select(values, k, sample, s)
    assert min(1, 0.8 * k) <= chosen.numel() <= k
    assert chosen.unique().numel() == chosen.numel()
    rest = values.abs()
    smallest = rest[chosen].min()
    rest[chosen] = 0
    if chosen.numel() == k:
        assert rest.max() <= smallest  # exactly the largest
    else:
        assert (rest >= smallest).sum() == 0


@pytest.mark.parametrize("k", [1, 10, 100, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_select_finds_four_fifths_of_k_normal_values(k: int, seed: int) -> None:
    assert 0.8 * k <= select(noise(seed, 100_000), k, 0.01, seed).numel() <= k


@pytest.mark.parametrize("fill", [0.0, 1.0, -2.5])
def test_select_limits_equal_values_to_k(fill: float) -> None:
    assert select(torch.full((10_000,), fill), 10, 0.01).numel() == 10


def test_select_keeps_largest_if_sample_underestimates() -> None:
    values = torch.zeros(10_000)
    values[1::2] = torch.arange(5000.0)  # the sample sees the zeros between
    chosen = select(values, 50, 0.01, start=0)
    assert chosen.numel() == 50
    assert values[chosen].min() == 4950


def test_select_corrects_sample_that_overestimates() -> None:
    """The threshold estimated from the sample is too high for all other values."""
    values = noise(0, 10_000)
    stride = 10_000 // ceil(2 * 10_000 / 100)
    values[::stride] *= 10
    assert 80 <= select(values, 100, 0.01, start=0).numel() <= 100


def test_select_prefers_non_finite_values() -> None:
    values = noise(1, 10_000)
    values[[17, 4321]] = float("nan")
    values[5000] = float("-inf")
    for sample in (0.01, 1.0):
        assert {17, 4321, 5000} <= set(select(values, 10, sample).tolist())


# -- messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket", [NUMEL, 1000, 300, 40])
def test_dgc_sends_vectors_whole_and_largest_values_of_matrices(
    bucket: int, dtype: torch.dtype
) -> None:
    layout = layout_of(bucket)
    codec = codec_of(0.02, dtype, layout=layout)
    u = noise(2)
    arrived = receive(codec, layout, send(codec, layout, u))
    sent = u.to(dtype).float()
    assert torch.equal(arrived[vectors()], sent[vectors()])
    of_matrices = arrived[~vectors()]
    # Every bucket sends at least one value of a matrix.
    assert 0 < of_matrices.count_nonzero() <= max(0.1, 3 / bucket) * of_matrices.numel()
    there = arrived != 0
    assert torch.equal(arrived[there], sent[there])


def test_dgc_sends_largest_values_of_each_matrix() -> None:
    """However small its values are compared to those of other layers."""
    u = noise(3)
    u[7:607] *= 1e-6
    layout = layout_of(NUMEL)
    codec = codec_of(0.02, layout=layout)
    arrived = receive(codec, layout, send(codec, layout, u))
    assert arrived[7:607].count_nonzero() == ceil(0.02 * 600)
    assert arrived[637:1717].count_nonzero() == ceil(0.02 * 1080)
    assert arrived[1717:].count_nonzero() == 1
    smallest_sent = arrived[7:607].abs()[arrived[7:607] != 0].min()
    assert (u[7:607].abs() > smallest_sent).sum() == ceil(0.02 * 600) - 1


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.1, 0.2, 0.3, 0.45, 0.7, 1.0])
def test_dgc_messages_stay_within_longest_and_bucket(ratio: float, dtype: torch.dtype) -> None:
    for bucket_size in (1000, 100, 9, 1):
        layout = layout_of(bucket_size)
        codec = codec_of(ratio, dtype, layout=layout)
        for turn in range(3):
            messages = send(codec, layout, noise(turn))
            for bucket, message in zip(layout.buckets, messages, strict=True):
                longest = codec.longest(bucket, 0)
                assert message.numel() <= longest <= bucket.numel
                entry = 3 if dtype == torch.bfloat16 else 2
                always = codec.always_sent(bucket)
                if message.numel() < bucket.numel:
                    assert (
                        message.numel() == codec.selected(bucket, message.numel()) * entry + always
                    )
                else:
                    assert codec.selected(bucket, message.numel()) + always == bucket.numel


def test_dgc_final_ratio_shrinks_message() -> None:
    layout = cut(1_000_000, 1, 4.0, 16.0)
    wire = wire_of()
    codec = DeepGradientCompression(wire, layout, [(1000, 1000)], lambda samples: 0.001)
    (bucket,) = layout.buckets
    u = noise(4, 1_000_000)
    message, _ = codec.compress(bucket, u, 0, wire.buffer_for(u))
    assert 0.8 * 8000 <= message.nbytes <= 8000


@pytest.mark.parametrize("dtype", DTYPES)
def test_dgc_message_is_scaled_by_alpha(dtype: torch.dtype) -> None:
    layout = layout_of()
    for codec in (codec_of(0.02, dtype), codec_of(1.0, dtype), wire_of(dtype)):
        messages = send(codec, layout, whole_numbers(5))
        once = receive(codec, layout, messages)
        target = torch.ones(NUMEL)
        for bucket, message in zip(layout.buckets, messages, strict=True):
            codec.add(bucket, message, target[bucket.part], alpha=-0.5)
        assert torch.equal(target, 1 - 0.5 * once)


# -- conservation --------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket", [NUMEL, 300, 9])
def test_dgc_sent_and_residual_values_sum_to_gradients(bucket: int, dtype: torch.dtype) -> None:
    """Integers make sums exact; with bf16, rounding errors are part of the residual."""
    layout = layout_of(bucket)
    velocity = torch.zeros(NUMEL)
    codec = codec_of(0.02, dtype, velocity, layout)
    put, arrived = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for turn in range(30):
        # Values that bf16 has to round, except at first: as long as no bucket has a residual, a
        # bucket that is sent whole is sent as without compression.
        u = whole_numbers(turn) * (101 if turn else 1)
        velocity.copy_(u)
        put += u
        arrived += receive(codec, layout, send(codec, layout, u))
        assert codec.left is not None
        assert torch.equal(arrived + codec.left, put)
    left = codec.left
    assert left is not None
    assert left[~vectors()].count_nonzero() > 100
    assert left[vectors()].any() == (dtype == torch.bfloat16)


def test_dgc_sends_all_residual_values_eventually() -> None:
    """Without new gradients, the residual is sent step by step until it is empty."""
    layout = layout_of()
    codec = codec_of(0.1)
    put = whole_numbers(0)
    arrived = receive(codec, layout, send(codec, layout, put))
    for _ in range(40):
        arrived += receive(codec, layout, send(codec, layout, torch.zeros(NUMEL)))
    assert torch.equal(arrived, put)


def test_dgc_clears_momentum_of_sent_values_only() -> None:
    layout = layout_of()
    sgd = MomentumSGD(torch.zeros(NUMEL), 0.9, 0.0)
    velocity = sgd.velocity
    assert velocity is not None
    codec = codec_of(0.05, velocity=velocity)
    for turn in range(3):
        u = noise(turn)
        for bucket in layout.buckets:
            sgd.correct(bucket.part, u[bucket.part], torch.zeros(bucket.numel))
        before = velocity.clone()
        arrived = receive(codec, layout, send(codec, layout, u))
        cleared = (arrived != 0) & ~vectors()
        assert cleared.count_nonzero() > 50
        assert velocity[cleared].count_nonzero() == 0
        assert torch.equal(velocity[~cleared], before[~cleared])


def test_dgc_momentum_correction_matches_hand_computation() -> None:
    """One of two values is sent each time; m = 1/2."""
    layout = cut(8, 1, 1.0, 1.0)
    (bucket,) = layout.buckets
    sgd = MomentumSGD(torch.zeros(8), 0.5, 0.0)
    wire = wire_of()
    codec = DeepGradientCompression(wire, layout, [(2, 4)], lambda samples: 0.125, sgd.velocity)

    def step(a: float, b: float) -> list[float]:
        g = torch.zeros(8)
        g[0], g[1] = a, b
        sgd.correct(bucket.part, g, torch.zeros(8))
        message, _ = codec.compress(bucket, g, 0, wire.buffer_for(g))
        target = torch.zeros(8)
        codec.add(bucket, message, target)
        return target[:2].tolist()

    assert step(4, 3) == [4, 0]  # u = (4, 3), v = (4, 3): 4 is sent, u_0 and v_0 are cleared
    assert step(1, 1) == [0, 5.5]  # u = (1, 2.5), v = (1, 5.5)
    assert step(0, 2) == [0, 2]  # u = (0.5, 2), v = (1.5, 2): no momentum of sent values
    assert step(1, 0) == [2.75, 0]  # u = (1.25, 0), v = (2.75, 0)


# -- ratio 1 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_dgc_with_ratio_one_is_bit_identical_to_dense(dtype: torch.dtype) -> None:
    layout = layout_of()
    velocity = noise(9)
    codec, dense = codec_of(1.0, dtype, velocity), wire_of(dtype)
    for turn in range(3):
        u = noise(turn)
        for mine, plain in zip(send(codec, layout, u), send(dense, layout, u), strict=True):
            assert torch.equal(mine, plain)
    assert torch.equal(velocity, noise(9))
    assert codec.left is None


def test_dense_fp32_messages_are_not_copied() -> None:
    layout = layout_of()
    for codec in (wire_of(), codec_of(1.0)):
        u = noise(0)
        room = codec.buffer_for(u)
        for bucket in layout.buckets:
            message, _ = codec.compress(bucket, u[bucket.part], 0, room[bucket.part])
            assert message.data_ptr() == u[bucket.part].data_ptr()


def test_dgc_dense_message_flushes_residual() -> None:
    layout = layout_of()
    codec = codec_of(lambda samples: 0.01 if samples < 10 else 1.0)
    first, second = whole_numbers(0), whole_numbers(1)
    arrived = receive(codec, layout, send(codec, layout, first, samples=0))
    arrived += receive(codec, layout, send(codec, layout, second, samples=10))
    assert torch.equal(arrived, first + second)
    assert codec.left is not None
    assert codec.left.count_nonzero() == 0


def options_of(**values: Any) -> DgcOptions:
    return DgcOptions.model_validate(values)


def test_dgc_ratio_decays_as_in_the_paper() -> None:
    options = options_of()
    shares = [options.ratio_at(epoch * 1000 + 999, 1000) for epoch in range(7)]
    expected = [0.25, 0.0625, 0.0156, 0.004, 0.001, 0.001, 0.001]
    assert shares == pytest.approx(expected, rel=0.02)
    assert options_of(warmup_epochs=0).ratio_at(0, 1000) == 0.001
    assert options_of(ratio=1.0).ratio_at(0, 1000) == 1.0


# -- checkpoints ------------------------------------------------------------------------------


@pytest.mark.parametrize("turns_before", [0, 3])
def test_restored_dgc_codec_continues_identically(turns_before: int) -> None:
    layout = layout_of()
    one, other = codec_of(0.02), codec_of(0.02)
    for turn in range(turns_before):
        send(one, layout, noise(turn))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for turn in range(turns_before, turns_before + 3):
        u = noise(turn)
        for a, b in zip(send(one, layout, u), send(other, layout, u), strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# -- timed computing ---------------------------------------------------------------------------


@pytest.mark.parametrize("moves_bytes", [True, False])
@pytest.mark.parametrize("ratio", [0.01, 1.0])
def test_dgc_timed_computing_sends_messages_of_right_size(ratio: float, moves_bytes: bool) -> None:
    layout = layout_of()
    wire = DenseWire(torch.float32, torch.device("meta"), moves_bytes)
    u = torch.zeros(NUMEL, device="meta")
    codec = DeepGradientCompression(wire, layout, SHAPES, lambda samples: ratio, u)
    room = codec.buffer_for(u)
    for bucket in layout.buckets:
        message, event = codec.compress(bucket, u[bucket.part], 0, room[bucket.part])
        assert event is None
        assert message.is_meta != moves_bytes
        assert message.numel() == codec_of(ratio).longest(bucket, 0)
        codec.add(bucket, message, u[bucket.part])
    assert codec.left is None


# -- all-gather --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bucket_size", [NUMEL, 41])
def test_dgc_packed_messages_have_equal_length_and_sum(
    bucket_size: int, dtype: torch.dtype
) -> None:
    layout = layout_of(bucket_size)
    workers = [codec_of(0.03, dtype, layout=layout) for _ in range(3)]
    gradients = [noise(seed) for seed in range(3)]
    messages = [send(c, layout, u) for c, u in zip(workers, gradients, strict=True)]
    expected = sum((receive(workers[0], layout, m) for m in messages), torch.zeros(NUMEL))
    target = torch.zeros(NUMEL)
    for bucket in layout.buckets:
        length = packed_length(workers[0], bucket, 0)
        gathered = wire_of(dtype).buffer(3 * length)
        for rank, worker in enumerate(workers):
            part = gathered[rank * length : (rank + 1) * length]
            pack(worker, messages[rank][bucket.index], part)
        add_packed(workers[0], bucket, gathered, 3, target[bucket.part], alpha=0.5)
    torch.testing.assert_close(target, 0.5 * expected)


def _bucket(numel: int) -> Bucket:
    return Bucket(0, 0, numel, 0)


def test_dgc_sends_bucket_without_matrices_whole() -> None:
    wire = wire_of()
    codec = DeepGradientCompression(wire, cut(6, 1, 1.0, 1.0), [(2,), (4,)], lambda samples: 0.01)
    assert codec.longest(_bucket(6), 0) == 6
    assert codec.always_sent(_bucket(6)) == 6


def test_small_gradients_in_bf16_add_up() -> None:
    """In bf16, a sum of 1000 times 0.001 would stay at 0.5."""
    layout = cut(1000, 1, 1.0, 1.0)
    (bucket,) = layout.buckets
    codec = DeepGradientCompression(wire_of(), layout, [(10, 100)], lambda samples: 0.001)
    gradient = torch.full((1000,), 1e-3, dtype=torch.bfloat16)
    gradient[0] = 1.0  # the value that is sent
    sent = torch.zeros(1000)
    for samples in range(1000):
        message, _ = codec.compress(bucket, gradient.clone(), samples, torch.zeros(1000))
        codec.add(bucket, message, sent)
    assert codec.left is not None
    assert (sent + codec.left)[1].item() == pytest.approx(1.0, rel=0.01)
