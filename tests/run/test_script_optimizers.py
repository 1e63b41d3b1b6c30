"""Optimizers and schedulers that a run cannot step, and the documented alternatives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import naming

STEPS, RHO = 4, 0.5
INPUTS = torch.randn(STEPS, 6, 3, generator=torch.Generator().manual_seed(2))


class SAM(torch.optim.Optimizer):
    """The usual implementation of Foret et al., ICLR 2021: one step up and one back."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__(params, settings)
        self.base_optimizer = base(self.param_groups, **settings)

    @torch.no_grad()
    def first_step(self) -> None:
        own = self.param_groups[0]["params"]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            self.state[p]["moved"] = p.grad * (RHO / (norm + 1e-12))
            p.add_(self.state[p]["moved"])
            p.grad = None

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["moved"])
        self.base_optimizer.step()
        self.base_optimizer.zero_grad()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("requires a closure")


def network() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).square().mean()


def train(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[int], Tensor],
    **settings: Any,
) -> None:
    """Train on one simulated worker; ``backward`` computes the gradient of a step."""

    def main(transport: Transport) -> None:
        run = DataParallel(
            model,
            optimizer=optimizer,
            transport=transport,
            algorithm="ar-sgd",
            steps=STEPS,
            batch_size=1,
            compute_time=0.01,
            run_dir=folder,
            quiet=True,
            **settings,
        )
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(step))

    VirtualCluster(1, Cluster(hosts=1), 0).run(main)


def test_two_pass_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    model = network()
    sam = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(UserError, match=naming("optimizer:", "SAM", "run.step()")):
        train(tmp_path, model, sam, lambda step: INPUTS[step])


def test_documented_loop_equals_sam(tmp_path: Path) -> None:
    model, expected = network(), network()
    sam = SAM(expected.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    for inputs in INPUTS:
        loss_of(expected(inputs)).backward()
        sam.first_step()
        loss_of(expected(inputs)).backward()
        sam.second_step()

    def backward(step: int) -> Tensor:
        parameters = dict(model.named_parameters())
        loss = loss_of(model(INPUTS[step]))
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        perturbed = {
            name: parameter + gradient * (RHO / (norm + 1e-12))
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
        outputs = torch.func.functional_call(model, perturbed, (INPUTS[step],))
        loss_of(outputs).backward()
        return loss

    train(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), backward)
    for a, b in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("length", "is_enough"), [(STEPS - 1, False), (STEPS, True)])
def test_one_cycle_scheduler_that_ends_before_the_run_is_refused(
    tmp_path: Path, length: int, is_enough: bool
) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=length)
    names = ("scheduler:", "OneCycleLR", f"{length} steps", f"total_steps={STEPS}")

    def backward(step: int) -> Tensor:
        loss = loss_of(model(INPUTS[step]))
        loss.backward()
        return loss

    if is_enough:
        train(tmp_path, model, optimizer, backward, scheduler=scheduler)
        assert scheduler.last_epoch == STEPS
    else:
        with pytest.raises(UserError, match=naming(*names)):
            train(tmp_path, model, optimizer, backward, scheduler=scheduler)


def test_chained_scheduler_is_refused(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    chained = torch.optim.lr_scheduler.ChainedScheduler([rates], optimizer)
    with pytest.raises(UserError, match=naming("scheduler:", "ChainedScheduler")):
        train(tmp_path, model, optimizer, lambda step: INPUTS[step], scheduler=chained)


@pytest.mark.parametrize("algorithm", ["ar-sgd", "bsp"])
def test_rates_of_numpy_are_numbers(tmp_path: Path, algorithm: str) -> None:
    """On servers too, and in checkpoints, which are read without NumPy's types."""

    def final(kind: Callable[[float], float], steps: int) -> Tensor:
        folder = tmp_path / kind.__name__
        resumed = {"resume": str(folder)} if folder.exists() else {"run_dir": folder}

        def main(transport: Transport) -> Tensor:
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda step: kind(np.cos(step / 4) ** 2)
            )
            run = DataParallel(
                model,
                optimizer=optimizer,
                scheduler=scheduler,
                transport=transport,
                algorithm=algorithm,
                steps=steps,
                batch_size=1,
                compute_time=0.01,
                quiet=True,
                **resumed,
            )
            for step, _ in enumerate(run.batches(range(1))):
                loss = loss_of(model(INPUTS[step % STEPS]))
                loss.backward()
                run.step(loss)
            return torch.cat([each.detach().view(-1) for each in model.parameters()])

        size = 1 if algorithm == "ar-sgd" else 2
        models: list[Any] = VirtualCluster(size, Cluster(hosts=1), 0).run(main)
        return models[-1]

    for steps in (STEPS, 2 * STEPS):
        assert torch.equal(final(np.float64, steps), final(float, steps))
