"""Momentum SGD on flat vectors equals torch.optim.SGD."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.flat.layout import cut
from aladdin_mpi.flat.unused import used_parts
from aladdin_mpi.optimizers.sgd import MomentumSGD

NUMEL, STEPS = 97, 40
CASES: list[dict[str, Any]] = [
    {"momentum": 0.0, "weight_decay": 0.0},
    {"momentum": 0.0, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.0},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]


def rate(step: int) -> float:
    return 0.1 / (1 + step / 10)


def gradient(step: int, x: Tensor) -> Tensor:
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))
    return torch.linspace(0.1, 1, NUMEL) * (x - 1) + 0.1 * noise


def start() -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))


def by_torch(case: dict[str, Any]) -> Tensor:
    x = nn.Parameter(start())
    sgd = torch.optim.SGD([x], lr=1.0, **case)
    for step in range(STEPS):
        sgd.param_groups[0]["lr"] = rate(step)
        x.grad = gradient(step, x.detach())
        sgd.step()
    return x.detach()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_momentum_sgd_steps_equal_torch(case: dict[str, Any]) -> None:
    x = start()
    sgd = MomentumSGD(x, **case)
    for step in range(STEPS):
        g = gradient(step, x)
        kept = g.clone()
        sgd.step(x, g, rate(step))
        assert torch.equal(g, kept)
    torch.testing.assert_close(x, by_torch(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_momentum_sgd_keeps_unused_parts_and_velocity(case: dict[str, Any]) -> None:
    used, x, whole = start(), start(), slice(0, NUMEL)
    unused = [slice(3, 10), slice(20, NUMEL)]
    one, other = MomentumSGD(used, **case), MomentumSGD(x, **case)
    for step in range(STEPS):
        g = gradient(step, x)
        left_out = unused if step == 1 else []
        kept = x.clone(), None if other.velocity is None else other.velocity.clone()
        other.correct(whole, g, x, left_out)
        x.add_(g, alpha=-rate(step))
        direction = gradient(step, used)
        for part in used_parts(NUMEL, left_out):
            one.correct(part, direction[part], used[part])
            used[part].add_(direction[part], alpha=-rate(step))
        assert torch.equal(x, used)
        for part in left_out:
            assert not g[part].any()
            assert torch.equal(x[part], kept[0][part])
            if other.velocity is not None and kept[1] is not None:
                assert torch.equal(other.velocity[part], kept[1][part])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_momentum_sgd_by_bucket_is_bit_identical_to_whole_step(case: dict[str, Any]) -> None:
    """As on workers: directions bucket by bucket, then one step for all buckets."""
    whole, x = start(), start()
    one, other = MomentumSGD(whole, **case), MomentumSGD(x, **case)
    buckets = cut(NUMEL, 1, bucket_mb=44e-6, shard_mb=1.0).buckets
    assert len(buckets) > 5
    for step in range(STEPS):
        one.step(whole, gradient(step, whole), rate(step))
        direction = gradient(step, x)
        for bucket in buckets:
            part = bucket.part
            other.correct(part, direction[part], x[part])
        x.add_(direction, alpha=-rate(step))
        assert torch.equal(x, whole)


def test_each_part_has_its_own_velocity() -> None:
    """As on servers, whose buckets are stepped at different times."""
    x = start()
    sgd = MomentumSGD(x, 0.5, 0.0)
    late, early = slice(40, NUMEL), slice(0, 40)
    for _ in range(3):
        sgd.correct(early, torch.ones(40), x[early])
    direction = torch.ones(NUMEL - 40)
    sgd.correct(late, direction, x[late])
    assert torch.equal(direction, torch.ones(NUMEL - 40))
    assert sgd.velocity is not None
    assert sgd.velocity[0] == 1.75


@pytest.mark.parametrize("case", CASES, ids=str)
def test_restored_momentum_sgd_continues_identically(case: dict[str, Any]) -> None:
    x = start()
    sgd = MomentumSGD(x, **case)
    for step in range(STEPS):
        sgd.step(x, gradient(step, x), rate(step))
        if step == STEPS // 2:
            state = {name: None if v is None else v.clone() for name, v in sgd.state_dict().items()}
            sgd = MomentumSGD(x, **case)
            sgd.load_state_dict(state)
    torch.testing.assert_close(x, by_torch(case))


# -- clipping --------------------------------------------------------------------------------

PARTS = (slice(0, 11), slice(11, 60), slice(60, NUMEL))


def clipped(g: Tensor, clip: float | None) -> Tensor:
    """Return ``g`` as sent, clipped part by part."""
    sgd = MomentumSGD(g, 0.0, 0.0, clip=clip)
    out = g.clone()
    for part in PARTS:
        sgd.correct(part, out[part], torch.zeros_like(out[part]))
    return out


@pytest.mark.parametrize("seed", range(3))
def test_clipped_gradient_norm_stays_within_bound(seed: int) -> None:
    g = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * torch.arange(NUMEL)
    out = clipped(g, 2.0)
    assert out.norm() <= 2.0 * (1 + 1e-6)
    for part in PARTS:  # each part keeps its direction
        torch.testing.assert_close(out[part] / out[part].norm(), g[part] / g[part].norm())


def test_evenly_spread_gradient_is_clipped_as_a_whole() -> None:
    g = torch.ones(NUMEL)
    torch.testing.assert_close(clipped(g, 2.0), g * 2.0 / g.norm())


def test_clipping_leaves_short_gradient_unchanged() -> None:
    g = torch.full((NUMEL,), 1e-3)
    assert torch.equal(clipped(g, 2.0), g)
    assert torch.equal(clipped(torch.zeros(NUMEL), 2.0), torch.zeros(NUMEL))
    assert torch.equal(clipped(g, None), g)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_keeps_non_finite_values(bad: float) -> None:
    g = torch.ones(NUMEL)
    g[20] = bad
    assert not clipped(g, 2.0)[20].isfinite()


def test_weight_decay_is_not_clipped() -> None:
    sgd = MomentumSGD(torch.zeros(4), 0.0, 0.5, clip=1.0)
    g, x = torch.full((4,), 10.0), torch.full((4,), 8.0)
    sgd.correct(slice(0, 4), g, x)
    torch.testing.assert_close(g, torch.full((4,), 0.5 + 4.0))
