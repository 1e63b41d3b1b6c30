"""First moments, mixed with those whose steps cause a given movement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.optimizers.from_torch import TorchOptimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD

LATE = 1e12
"""A number of steps after which no bias is left to correct."""
UNCHANGED = 1 - 1e-9
"""Decay factor with which a step leaves moments as they are."""
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
}


class Two(nn.Module):
    """Two parameters in two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.linspace(-1, 1, 5))
        self.b = nn.Parameter(torch.linspace(1, 2, 4))


def trained(kind: str) -> tuple[TorchOptimizer, Tensor]:
    """Return an optimizer after three steps, and its flat vector."""
    module = Two()
    replica = Replica(module)
    make, settings = KINDS[kind]
    groups: list[dict[str, Any]] = [{"params": [module.a], "lr": 0.02}, {"params": [module.b]}]
    optimizer = TorchOptimizer(make(groups, lr=0.01, **settings), module, replica.parameters)
    for seed in range(3):
        step(optimizer, replica.parameters, seed)
    return optimizer, replica.parameters


def step(optimizer: TorchOptimizer, x: Tensor, seed: int) -> None:
    gradient = torch.randn(len(x), generator=torch.Generator().manual_seed(seed))
    optimizer.descend(slice(0, len(x)), gradient, x, 1.0)


def freeze(optimizer: TorchOptimizer) -> None:
    """Let further steps use the moments as they are."""
    for group in optimizer.given.param_groups:
        if "betas" in group:
            group["betas"] = (UNCHANGED, UNCHANGED)
        else:
            group.update(momentum=UNCHANGED, dampening=1.0)
    for state in states(optimizer):
        if "step" in state:
            state["step"].fill_(LATE)


def states(optimizer: TorchOptimizer) -> list[dict[str, Any]]:
    (part,) = optimizer._parts.values()
    return [part.state_of(leaf) for leaf, _ in part.leaves()]


@pytest.mark.parametrize("kind", KINDS)
def test_next_step_is_the_movement(kind: str) -> None:
    optimizer, x = trained(kind)
    freeze(optimizer)
    movement = torch.linspace(-0.01, 0.02, len(x))
    for part in (slice(0, 3), slice(3, 7), slice(7, 9)):  # the second lies in both groups
        optimizer.mix(part, movement[part].clone(), x[part], 1.0, 1.0)
    before = x.clone()
    step(optimizer, x, seed=9)
    torch.testing.assert_close(x - before, movement, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_interpolates_and_other_parts_stay(kind: str) -> None:
    name = "momentum_buffer" if kind == "sgd" else "exp_avg"
    found = []
    for weight in (0.0, 0.3, 1.0):
        optimizer, x = trained(kind)
        optimizer.mix(slice(2, 5), torch.full((3,), 0.01), x[2:5], 1.0, weight)
        found.append(torch.cat([state[name] for state in states(optimizer)]))
    none, some, whole = found
    torch.testing.assert_close(some, torch.lerp(none, whole, 0.3))
    assert torch.equal(none[:2], whole[:2])
    assert torch.equal(none[5:], whole[5:])
    assert not torch.isclose(none[2:5], whole[2:5]).any()


def test_factor_on_the_rate_counts() -> None:
    moments = []
    for lr in (1.0, 0.5):
        optimizer, x = trained("sgd")
        optimizer.mix(slice(0, 9), torch.full((9,), 0.01 * lr), x, lr, 1.0)
        moments.append(torch.cat([state["momentum_buffer"] for state in states(optimizer)]))
    torch.testing.assert_close(moments[0], moments[1])


def test_optimizer_without_first_moment_is_left_as_it_is() -> None:
    module = Two()
    x = Replica(module).parameters
    optimizer = TorchOptimizer(torch.optim.RMSprop(module.parameters()), module, x)
    step(optimizer, x, seed=0)
    before = [dict(state) for state in states(optimizer)]
    optimizer.mix(slice(0, 9), torch.ones(9), x, 1.0, 1.0)
    for state, old in zip(states(optimizer), before, strict=True):
        assert all(torch.equal(state[name], old[name]) for name in old)


@pytest.mark.parametrize("nesterov", [False, True])
def test_steady_steps_of_momentum_sgd_are_the_movement(nesterov: bool) -> None:
    x = torch.zeros(4)
    optimizer = MomentumSGD(x, 0.9, 0.0, nesterov)
    movement = torch.tensor([0.1, -0.2, 0.3, 0.0])
    optimizer.mix(slice(0, 4), movement.clone(), x, 0.05, 1.0)
    # The gradient that keeps the velocity v is (1 - m) v.
    assert optimizer.velocity is not None
    optimizer.descend(slice(0, 4), 0.1 * optimizer.velocity, x, 0.05)
    torch.testing.assert_close(x, movement)


def test_without_a_rate_nothing_is_mixed() -> None:
    optimizer = MomentumSGD(torch.zeros(2), 0.9, 0.0)
    optimizer.mix(slice(0, 2), torch.ones(2), torch.zeros(2), 0.0, 1.0)
    assert optimizer.velocity is not None
    assert not optimizer.velocity.any()
