"""Arithmetic on flat vectors: in blocks, and whether it is finite."""

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
def test_one_value_that_is_not_finite_is_found(bad: float, place: int, dtype: torch.dtype) -> None:
    x = values(1).to(dtype)
    assert vectors.is_finite(x)
    x[place] = bad
    assert not vectors.is_finite(x)


def test_infinite_values_of_both_signs_do_not_cancel() -> None:
    x = torch.zeros(NUMEL)
    x[0], x[1] = inf, -inf
    assert not vectors.is_finite(x)


@pytest.mark.parametrize("size", [1e19, 1e30])
def test_large_values_are_finite_though_their_squares_are_not(size: float) -> None:
    x = torch.full((NUMEL,), size)
    x[::2] *= -1
    assert not torch.isfinite(torch.dot(x, x))
    assert vectors.is_finite(x)
    y = x.clone()
    assert vectors.add_if_finite(y, x)
    assert torch.equal(y, 2 * x)


def test_a_sum_that_is_infinite_is_found() -> None:
    assert not vectors.is_finite(torch.full((NUMEL,), 1e38))


def test_odd_shapes_are_looked_at() -> None:
    x = torch.ones(6, 4)
    assert vectors.is_finite(x) and vectors.is_finite(x.t()) and vectors.is_finite(x[:0])
    x[5, 3] = nan
    assert not vectors.is_finite(x) and not vectors.is_finite(x.t())
    assert vectors.is_finite(torch.zeros(5, device="meta"))


def test_adding_is_adding() -> None:
    x, y = values(1), values(2)
    expected, other = x + y, y.clone()
    assert vectors.add_if_finite(x, y)
    assert torch.equal(x, expected)
    assert torch.equal(y, other)


@pytest.mark.parametrize("which", [0, 1])
def test_adding_tells_of_a_sum_that_is_not_finite(which: int) -> None:
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
def test_one_of_several_is_refused_and_the_others_are_in(bad_turn: int, dtype: torch.dtype) -> None:
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


def test_a_sum_that_would_be_infinite_is_kept_as_it_was() -> None:
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    large = torch.zeros(NUMEL)
    large[7] = 3e38
    assert total.add(arrival(large.clone()))
    assert not total.add(arrival(large.clone()))
    assert torch.equal(total.values, large)
    assert total.count == 2


def test_what_was_refused_before_counts_as_zeros_and_is_not_told_again() -> None:
    total = GradientSum(NUMEL, NUMEL, torch.zeros(NUMEL))
    for _ in range(2):
        refused = arrival(torch.full((NUMEL,), nan))
        refused.refuse()
        assert total.add(refused)
    assert total.count == 2
    assert not total.values.any()


def test_memory_goes_round() -> None:
    """What is given back for later receives is never the memory of the sum."""
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
def test_blocks_change_no_bit(nesterov: bool) -> None:
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
def test_descending_is_scaling_correcting_and_adding(momentum: float, clip: float | None) -> None:
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
