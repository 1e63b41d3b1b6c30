"""A parameter that a step's batch does not use keeps its value, as in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import check_names

SAMPLES = 36
CANNOT = ("eamsgd", "multistep")
"""Algorithms that step every parameter, and warn about it."""


class Branches(nn.Module):
    """The first two layers are used by separate samples, the third by all, and the last by none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Linear(3, 4)
        self.right = nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(4, 1)
        self.spare = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.left(x) if x[0, 0] > 0.5 else self.right(x) * self.scale
        return self.head(hidden.tanh())


class Points(Dataset[Tensor]):
    """Samples that use the right branch at first, then occasionally, and finally never."""

    def __init__(self) -> None:
        self.x = torch.rand(SAMPLES, 3, generator=torch.Generator().manual_seed(2))
        self.x[:6, 0] = 0.25
        self.x[24:, 0] = 0.75

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.x[index]


class InOrder(list[int]):
    """A sampler that does not shuffle."""

    def __init__(self) -> None:
        super().__init__(range(SAMPLES))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - x.sum()).square().mean()


OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, 0.02, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.02, weight_decay=0.1),
}
BUILT_IN = {
    "lr": 0.02,
    "momentum": 0.9,
    "weight_decay": 0.1,
    "lr_scaling": "none",
    "lr_schedule": "constant",
    "warmup_epochs": 0.0,
}
"""Equivalent to "momentum"."""


def train(
    folder: Path, algorithm: str, workers: int, optimizer: str | None, **settings: Any
) -> tuple[Tensor, list[list[Tensor]]]:
    """Train in simulation; return the flat model and every worker's batches."""
    servers = 0 if not ALGORITHMS[algorithm].has_servers else settings.get("servers", 1)
    batches: list[list[Tensor]] = [[] for _ in range(workers)]
    models: list[Tensor] = []

    def main(transport: Transport) -> None:
        model = Branches()
        own: dict[str, Any] = BUILT_IN
        if optimizer is not None:
            own = {"optimizer": OPTIMIZERS[optimizer](list(model.parameters()))}
        run = DataParallel(
            model,
            transport=transport,
            algorithm=algorithm,
            epochs=2,
            batch_size=1,
            compute_time=0.01,
            bucket_mb=0.00003,
            run_dir=folder / "run",
            quiet=True,
            **own,
            **settings,
        )
        loader = torch.utils.data.DataLoader(Points(), 1, sampler=InOrder())
        for x in run.batches(loader):
            batches[transport.rank - servers].append(x.clone())
            loss = loss_of(model, x)
            loss.backward()
            run.step(loss)
        models.append(flat(model))

    VirtualCluster(servers + workers, Cluster(hosts=2), 0).run(main)
    return models[0], batches


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_torch(batches: list[list[Tensor]], optimizer: str | None) -> Tensor:
    """Step torch's optimizer with the mean of the workers' gradients of each round."""
    model = Branches()
    stepper = OPTIMIZERS[optimizer or "momentum"](list(model.parameters()))
    for together in zip(*batches, strict=True):
        stepper.zero_grad()
        for x in together:
            (loss_of(model, x) / len(together)).backward()
        stepper.step()
    return flat(model)


@pytest.mark.sample(3)
@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {}),
        ("ar-sgd", {"clip": 100.0}),
        ("ar-sgd", {"wait_free": False}),
        ("bsp", {"servers": 2}),
        ("bsp", {"bsp": {"host_first": True}}),
    ],
    ids=["ar-sgd", "clip", "not wait-free", "bsp", "host first"],
)
def test_synchronous_step_skips_parameters_no_worker_used(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], optimizer: str | None
) -> None:
    if algorithm == "bsp" and optimizer == "adafactor":
        pytest.skip("bsp takes optimizers by value only")
    model, batches = train(tmp_path, algorithm, 3, optimizer, **settings)
    torch.testing.assert_close(model, by_torch(batches, optimizer), rtol=1e-5, atol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("algorithm", "settings", "optimizer"),
    [
        ("asp", {}, "adamw"),
        ("asp", {"asp": {"momentum": "server"}}, None),
        ("ssp", {}, None),
        ("aladdin", {"aladdin": {"pi": 1}}, "adamw"),
        ("aladdin", {"aladdin": {"pi": 1, "momentum": "split"}}, None),
        ("local-sgd", {}, "adamw"),
        ("adsp", {}, None),
        ("async-diloco", {"async_diloco": {"outer_lr": 1.0, "outer_momentum": 0.0}}, "adamw"),
    ],
    ids=str,
)
def test_one_worker_with_unused_parameters_equals_torch(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], optimizer: str | None
) -> None:
    model, batches = train(tmp_path, algorithm, 1, optimizer, **settings)
    torch.testing.assert_close(model, by_torch(batches, optimizer), rtol=1e-5, atol=1e-6)


def check_spare_is_unchanged(model: Tensor) -> None:
    """Check that the layer that no sample uses has its initial values."""
    spare = sum(p.numel() for p in Branches().spare.parameters())
    assert torch.equal(model[-spare:], flat(Branches())[-spare:])


@pytest.mark.sample(3)
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(CANNOT)))
def test_parameter_that_is_never_used_keeps_its_value(tmp_path: Path, algorithm: str) -> None:
    model, _ = train(tmp_path, algorithm, 4, None)
    check_spare_is_unchanged(model)
    assert not torch.allclose(model, flat(Branches()))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {"wire": "bf16"}),
        ("ar-sgd", {"compression": "dgc"}),
        ("bsp", {"wire": "bf16"}),
        ("bsp", {"compression": "dgc"}),
        ("asp", {"wire": "bf16", "asp": {"momentum": "server"}}),
    ],
    ids=str,
)
def test_rounded_and_compressed_gradients_mark_unused_parameters(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    model, _ = train(tmp_path, algorithm, 3, None, **settings)
    check_spare_is_unchanged(model)


@pytest.mark.sample(3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_per_node_aggregation_marks_unused_parameters(tmp_path: Path, algorithm: str) -> None:
    if not ALGORITHMS[algorithm].islands:
        pytest.skip("it has no per-node sums")
    model, _ = train(tmp_path, algorithm, 4, None, node_sums=True)
    check_spare_is_unchanged(model)
    assert not torch.allclose(model, flat(Branches()))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("eamsgd", {}),
        ("multistep", {}),
        ("bsp", {"wire": "int8"}),
        ("asp", {"wire": "int4", "asp": {"momentum": "server"}}),
        ("ar-sgd", {"wire": "int4"}),
        ("ar-sgd", {"compression": "powersgd"}),
    ],
    ids=["eamsgd", "multistep", "bsp", "asp", "ar-sgd int4", "ar-sgd powersgd"],
)
def test_run_that_updates_unused_parameters_warns_once(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    algorithm: str,
    settings: dict[str, Any],
) -> None:
    train(tmp_path, algorithm, 2, None, **settings)
    warnings = capfd.readouterr().err
    assert warnings.count("does not use") == 1
    check_names(warnings, "parameter", "at sample 0 ")


def test_run_that_skips_unused_parameters_prints_no_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "asp", 2, None, wire="int8")
    assert "does not use" not in capfd.readouterr().err


@pytest.mark.parametrize("settings", [{}, {"clip": 1e9}], ids=["", "held back"])
def test_refused_gradient_does_not_step_unused_parameters(settings: dict[str, Any]) -> None:
    """Weight decay would change them."""
    model = nn.ParameterDict({"used": torch.ones(3), "unused": torch.ones(3)})

    def main(transport: Transport) -> None:
        run = DataParallel(
            model,
            transport=transport,
            algorithm="ar-sgd",
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1),
            steps=3,
            batch_size=1,
            compute_time=1.0,
            quiet=True,
            **settings,
        )
        for step, _ in enumerate(run.batches(range(1))):
            loss = model["used"].sum() * (nan if step == 1 else 1.0)
            loss.backward()
            run.step(loss)

    VirtualCluster(1, Cluster(hosts=1), 0).run(main)
    assert torch.equal(model["unused"].detach(), torch.ones(3))
    assert model["used"].detach().isfinite().all() and (model["used"] < 1).all()
