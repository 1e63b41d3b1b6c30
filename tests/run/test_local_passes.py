"""Passes of a batch that stay on the worker, as SAM's first one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.loop_lab import DATA, PLAN, flat, loss_of, network, plain, train
from tests.messages import check_names
from tests.quadratic import NO_DELAY

RHO = 0.5
"""Length of the perturbation, large enough to change the result."""


class Sam:
    """Sharpness-aware minimization as its authors' users write it (Foret et al., ICLR 2021)."""

    def __init__(self, parameters: Iterable[nn.Parameter], rho: float = RHO) -> None:
        self.base = torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)
        self._parameters = self.base.param_groups[0]["params"]
        self._rho = rho
        self._before: list[Tensor] = []

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb to the sharpest point nearby, and clear the gradients."""
        norms = [p.grad.norm() for p in self._parameters if p.grad is not None]
        norm = torch.stack(norms).norm()
        self._before = [p.data.clone() for p in self._parameters]
        for p in self._parameters:
            p.add_(p.grad * (self._rho / (norm + 1e-12)))
        self.base.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Return, and step along the gradient found there."""
        for p, before in zip(self._parameters, self._before, strict=True):
            p.data = before
        self.base.step()
        self.base.zero_grad()


Batches = list[list[tuple[Tensor, Tensor]]]


def by_torch(batches: Batches) -> Tensor:
    """Take SAM's steps along the mean of the workers' gradients, each at its own sharpest point."""
    model = network()
    sam = Sam(model.parameters())
    for together in zip(*batches, strict=True):
        means = [torch.zeros_like(p) for p in model.parameters()]
        start = [p.detach().clone() for p in model.parameters()]
        for batch in together:
            for p, before in zip(model.parameters(), start, strict=True):
                p.data = before.clone()
            loss_of(model, *batch).backward()
            sam.first_step()
            loss_of(model, *batch).backward()
            for mean, p in zip(means, model.parameters(), strict=True):
                assert p.grad is not None
                mean += p.grad / len(together)
            sam.base.zero_grad()
        for p, mean in zip(model.parameters(), means, strict=True):
            p.grad = mean
        sam._before = start
        sam.second_step()
    return flat(model)


def train_with_sam(
    folder: Path, algorithm: str, workers: int, **settings: Any
) -> tuple[Tensor, Batches]:
    """Train with SAM in simulation; return the flat model and every worker's batches."""
    servers = int(find_algorithm(algorithm).has_servers)
    batches: Batches = [[] for _ in range(workers)]

    def rank(transport: Any) -> Tensor:
        model = network()
        sam = Sam(model.parameters())
        plan = {name: PLAN[name] for name in ("batch_size", "compute_time", "eval_every", "quiet")}
        options: dict[str, Any] = {**plan, "samples": 48, "run_dir": folder / "run", **settings}
        run = DataParallel(
            model, transport=transport, algorithm=algorithm, optimizer=sam.base, **options
        )
        for inputs, labels in run.batches(DATA):
            batches[transport.rank - servers].append((inputs.clone(), labels.clone()))
            with run.local():
                loss = loss_of(model, inputs, labels)
                loss.backward()
                sam.first_step()
            loss_of(model, inputs, labels).backward()
            run.step(loss)
        return flat(model)

    results: list[Any] = VirtualCluster(servers + workers, NO_DELAY).run(rank)
    return results[-1], batches


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "workers"),
    [
        ("ar-sgd", 1),
        ("ar-sgd", 2),
        ("bsp", 2),
        ("asp", 1),
        ("aladdin", 1),
        ("local-sgd", 1),
    ],
)
def test_sam_equals_its_reference(tmp_path: Path, algorithm: str, workers: int) -> None:
    settings = {"aladdin": {"pi": 1}} if algorithm == "aladdin" else {}
    x, batches = train_with_sam(tmp_path, algorithm, workers, **settings)
    assert len(batches[0]) == 12 // workers
    torch.testing.assert_close(x, by_torch(batches), rtol=1e-5, atol=1e-6)
    assert (x - train(tmp_path, "ar-sgd", overwrite=True).x).norm() > 1e-2


def perturbed(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Change parameters and gradients in a local pass without an effect on the step's gradient."""
    with run.local():
        (1e3 * loss_of(model, inputs, labels)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.add_(100.0)
    with run.local(), torch.no_grad():
        for p, values in zip(model.parameters(), before, strict=True):
            p.copy_(values)
    plain(run, model, inputs, labels)


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        *((name, {}) for name in sorted(set(ALGORITHMS) - {"multistep"})),
        ("ar-sgd", {"accumulate": 2}),
        ("aladdin-ahead", {"clip": 0.05}),
    ],
    ids=str,
)
def test_local_passes_do_not_change_the_step(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    expected = train(tmp_path, algorithm, **settings)
    trained = train(tmp_path, algorithm, perturbed, overwrite=True, **settings)
    assert torch.equal(trained.x, expected.x)
    assert expected.moved > 1e-3


def test_batch_may_be_skipped_after_a_local_pass(tmp_path: Path) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        with run.local():
            loss_of(model, inputs, labels).backward()
            for p in model.parameters():
                p.data.zero_()

    assert torch.equal(train(tmp_path, "ar-sgd", step).x, flat(network()))


def test_error_in_a_local_pass_leaves_the_model_unchanged(tmp_path: Path) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        try:
            with run.local():
                loss_of(model, inputs, labels).backward()
                next(model.parameters()).data.zero_()
                raise ValueError
        except ValueError:
            pass

    assert torch.equal(train(tmp_path, "ar-sgd", step).x, flat(network()))


def test_write_after_a_local_pass_is_refused(tmp_path: Path) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        with run.local():
            loss_of(model, inputs, labels).backward()
        next(model.parameters()).data.zero_()
        plain(run, model, inputs, labels)

    with pytest.raises(UserError) as caught:
        train(tmp_path, "ar-sgd", step)
    check_names(str(caught.value), "parameter 0.weight", "changed between", "run.local()")


def test_multistep_refuses_local_passes(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train(tmp_path, "multistep", perturbed)
    check_names(str(caught.value), "run.local()", "multistep", "activations", "ar-sgd")


def test_batch_norm_is_recalibrated_without_local_passes(tmp_path: Path) -> None:
    """Local passes see other inputs, and parameters that the model never has."""

    def rank(transport: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(24), nn.Linear(24, 3))
        options = {**PLAN, "run_dir": tmp_path / "run", "algorithm": "ar-sgd"}
        run = DataParallel(model, transport=transport, **options)
        for inputs, labels in run.batches(DATA):
            with run.local():
                functional.cross_entropy(model(inputs + 1000), labels).backward()
            plain(run, model, inputs, labels)
        mean = model[0].running_mean
        assert isinstance(mean, Tensor)
        return mean

    results: list[Any] = VirtualCluster(2, NO_DELAY).run(rank)
    assert results[0].abs().max() < 2
