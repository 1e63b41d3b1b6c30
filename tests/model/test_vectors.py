"""Arithmetic on flat vectors in blocks, and detection of non-finite values."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from aladdin_mpi.exchange.server import GradientSum
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat import vectors
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.optimizers.sgd import MomentumSGD

NUMEL = 3 * vectors.BLOCK + 17


def values(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("place", [0, vectors.BLOCK, NUMEL - 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_is_finite_detects_single_non_finite_value(
    bad: float, place: int, dtype: torch.dtype
) -> None:
    x = values(1).to(dtype)
    assert vectors.is_finite(x)
    x[place] = bad
    assert not vectors.is_finite(x)


def test_is_finite_detects_infinities_of_both_signs() -> None:
    x = torch.zeros(NUMEL)
    x[0], x[1] = inf, -inf
    assert not vectors.is_finite(x)


@pytest.mark.parametrize("size", [1e19, 1e30])
def test_is_finite_accepts_values_whose_squares_overflow(size: float) -> None:
    x = torch.full((NUMEL,), size)
    x[::2] *= -1
    assert not torch.isfinite(torch.dot(x, x))
    assert vectors.is_finite(x)
    y = x.clone()
    assert vectors.add_if_finite(y, x)
    assert torch.equal(y, 2 * x)


def test_is_finite_rejects_vector_whose_sum_overflows() -> None:
    assert not vectors.is_finite(torch.full((NUMEL,), 1e38))


def test_is_finite_accepts_any_shape() -> None:
    x = torch.ones(6, 4)
    assert vectors.is_finite(x) and vectors.is_finite(x.t()) and vectors.is_finite(x[:0])
    x[5, 3] = nan
    assert not vectors.is_finite(x) and not vectors.is_finite(x.t())
    assert vectors.is_finite(torch.zeros(5, device="meta"))


def test_add_if_finite_adds_vectors() -> None:
    x, y = values(1), values(2)
    expected, other = x + y, y.clone()
    assert vectors.add_if_finite(x, y)
    assert torch.equal(x, expected)
    assert torch.equal(y, other)


@pytest.mark.parametrize("which", [0, 1])
def test_add_if_finite_reports_non_finite_sum(which: int) -> None:
    pair = [values(1), values(2)]
    pair[which][vectors.BLOCK + 3] = nan
    other = pair[1].clone()
    assert not vectors.add_if_finite(*pair)
    assert torch.equal(pair[1].nan_to_num(), other.nan_to_num())


# -- the sum of a bucket --------------------------------------------------------------------
BUCKET = Bucket(0, 0, NUMEL, 0)


def arrival(message: Tensor, count: int = 1) -> ReceivedBucket:
    return ReceivedBucket(0, BUCKET, count, message)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad_turn", [0, 1, 2])
def test_gradient_sum_rejects_one_message_and_keeps_others(
    bad_turn: int, dtype: torch.dtype
) -> None:
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    expected = torch.zeros(NUMEL)
    for turn in range(3):
        message = values(turn).to(dtype)
        if turn == bad_turn:
            message[-1] = inf
        else:
            expected += message.float()
        sound = total.add(arrival(message))
        assert sound == (turn != bad_turn)
    assert total.count == 3
    torch.testing.assert_close(total.values, expected)


def test_gradient_sum_is_unchanged_by_overflowing_message() -> None:
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    large = torch.zeros(NUMEL)
    large[7] = 3e38
    assert total.add(arrival(large.clone()))
    assert not total.add(arrival(large.clone()))
    assert torch.equal(total.values, large)
    assert total.count == 2


def test_gradient_sum_counts_refused_arrival_as_zeros() -> None:
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    for _ in range(2):
        refused = arrival(torch.full((NUMEL,), nan))
        refused.refuse()
        assert total.add(refused)
    assert total.count == 2
    assert not total.values.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_restored", [False, True])
def test_gradient_sum_keeps_message_without_gradients(
    is_restored: bool, dtype: torch.dtype
) -> None:
    """A worker without samples sends what its codec has held back; a checkpoint may follow."""
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    messages = [values(turn).to(dtype) for turn in range(3)]
    expected = torch.stack(messages).float().sum(0)
    for message, count in zip(messages, (0, 0, 1), strict=True):
        assert total.add(arrival(message, count))
        if is_restored:
            former, total = total, GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
            total.saved, total.count = former.saved, former.count
    assert total.count == 1
    torch.testing.assert_close(total.values, expected)
    total.clear()
    assert total.saved is None


def test_gradient_sum_never_returns_its_own_memory() -> None:
    """Memory returned for later receives is never that of the sum."""
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    free = [values(number) for number in range(2)]
    expected = torch.zeros(NUMEL)
    for turn in range(7):
        message = free.pop(0)
        message.copy_(values(turn))
        expected += message
        arrived = arrival(message)
        total.add(arrived)
        free.append(arrived.storage)
        free[-1].fill_(nan)  # the next message is written into it
        torch.testing.assert_close(total.values, expected)


# -- momentum -------------------------------------------------------------------------------
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_step_in_blocks_is_bit_identical(nesterov: bool) -> None:
    x, g = values(1), values(2)
    sgd = MomentumSGD(x, 0.9, 0.01, nesterov)
    velocity, plain = torch.zeros(NUMEL), x.clone()
    for _ in range(3):
        direction = g + 0.0
        direction.add_(plain, alpha=0.01)
        velocity.mul_(0.9).add_(direction)
        direction = direction.add_(velocity, alpha=0.9) if nesterov else velocity
        plain.add_(direction, alpha=-0.1)
        before = g.clone()
        sgd.step(x, g, 0.1)
        assert torch.equal(g, before)
        assert torch.equal(x, plain)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_descend_equals_scale_correct_and_add(momentum: float, clip: float | None) -> None:
    part = slice(11, NUMEL)
    x, other = values(1), values(1)
    one, two = (MomentumSGD(x, momentum, 0.01, clip=clip) for _ in range(2))
    for seed in range(2, 5):
        g, h = values(seed)[part], values(seed)[part]
        one.descend(part, g, x[part], 0.1, 0.25)
        h.mul_(0.25)
        two.correct(part, h, other[part])
        other[part].add_(h, alpha=-0.1)
    assert torch.equal(x, other)
