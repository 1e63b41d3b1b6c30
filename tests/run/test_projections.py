"""Projections of parameters after each step, with every algorithm and for every copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import check_names, naming

BOUND = 0.05
ROUNDED = BOUND * (1 + 1e-6)
SAMPLES = 24
X = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(4))
ABLE = sorted(set(ALGORITHMS) - {"multistep"})


def network() -> nn.Sequential:
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) - 3.0).square().mean()


def clamp(name: str, values: Tensor) -> None:
    if name.endswith("weight"):
        values.clamp_(-BOUND, BOUND)


def limit_rows(name: str, values: Tensor) -> None:
    if name.endswith("weight"):
        values.mul_((0.5 / values.norm(dim=1, keepdim=True)).clamp_max(1.0))


def train(
    folder: Path,
    algorithm: str,
    workers: int = 3,
    project: Callable[[str, Tensor], None] | None = clamp,
    after: Callable[[nn.Module, int], None] = lambda model, worker: None,
    **settings: Any,
) -> tuple[Tensor, list[list[Tensor]], list[float]]:
    """Train in simulation; return the flat model, all workers' batches and evaluated values."""
    servers = 0 if not ALGORITHMS[algorithm].has_servers else settings.get("servers", 1)
    batches: list[list[Tensor]] = [[] for _ in range(workers)]
    models: list[Tensor] = []
    measured: list[float] = []

    def evaluate(module: nn.Module) -> dict[str, float]:
        largest = max(p.detach().abs().max().item() for p in module.parameters() if p.dim() > 1)
        measured.append(largest)
        return {"largest": largest}

    def main(transport: Transport) -> None:
        model = network()
        run = DataParallel(
            model,
            transport=transport,
            algorithm=algorithm,
            optimizer=torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
            if ALGORITHMS[algorithm].optimizers != "sgd"
            else None,
            epochs=2,
            batch_size=1,
            evaluate=evaluate,
            compute_time=0.01,
            run_dir=folder / "run",
            quiet=True,
            **{"bucket_mb": 0.00003, "eval_every": 12, **settings},
        )
        if project is not None:
            run.project(project)
        for (x,) in run.batches(TensorDataset(X)):
            batches[transport.rank - servers].append(x.clone())
            loss = loss_of(model, x)
            loss.backward()
            run.step(loss)
            after(model, transport.rank - servers)
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))

    VirtualCluster(servers + workers, Cluster(hosts=2), 0).run(main)
    return models[0], batches, measured


def by_torch(batches: list[list[Tensor]], project: Callable[[str, Tensor], None]) -> Tensor:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), 0.02, weight_decay=0.1)
    for together in zip(*batches, strict=True):
        optimizer.zero_grad()
        for x in together:
            (loss_of(model, x) / len(together)).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                project(name, parameter)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("project", [clamp, limit_rows])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("ar-sgd", {}), ("bsp", {}), ("bsp", {"servers": 2})],
    ids=["ar-sgd", "bsp", "two servers"],
)
def test_projected_synchronous_training_equals_torch(
    tmp_path: Path,
    algorithm: str,
    settings: dict[str, Any],
    project: Callable[[str, Tensor], None],
) -> None:
    model, batches, _ = train(tmp_path, algorithm, project=project, **settings)
    torch.testing.assert_close(model, by_torch(batches, project), rtol=1e-5, atol=1e-6)


@pytest.mark.sample(3)
@pytest.mark.parametrize("algorithm", ABLE)
def test_projection_applies_to_every_copy_of_the_weights(tmp_path: Path, algorithm: str) -> None:
    seen: list[float] = []

    def look(model: nn.Module, worker: int) -> None:
        seen.extend(p.detach().abs().max().item() for p in model.parameters() if p.dim() > 1)

    model, _, measured = train(tmp_path, algorithm, 4, after=look)
    weights = torch.cat([model[:21], model[28:42]])
    assert weights.abs().max() <= ROUNDED
    assert max(measured) <= ROUNDED
    assert model[21:28].abs().max() > BOUND  # a bias
    if algorithm != "eamsgd":  # whose gradients are computed at the look-ahead position
        assert max(seen) <= ROUNDED
    free, _, _ = train(tmp_path / "free", algorithm, 4, None)
    assert free[:21].abs().max() > 2 * BOUND


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"ar-sgd"}))
def test_parameter_write_that_would_be_lost_is_refused(tmp_path: Path, algorithm: str) -> None:
    def write(model: nn.Module, worker: int) -> None:
        for parameter in model.parameters():
            parameter.data.clamp_(-BOUND, BOUND)

    with pytest.raises(UserError, match=naming(algorithm, "run.step()", "run.project()")):
        train(tmp_path, algorithm, project=None, after=write)


def test_ar_sgd_keeps_values_written_by_a_loop(tmp_path: Path) -> None:
    def write(model: nn.Module, worker: int) -> None:
        for name, parameter in model.named_parameters():
            clamp(name, parameter.data)

    model, batches, _ = train(tmp_path, "ar-sgd", project=None, after=write)
    torch.testing.assert_close(model, by_torch(batches, clamp), rtol=1e-5, atol=1e-6)


def test_ar_sgd_warns_of_different_values_written_by_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def write(model: nn.Module, worker: int) -> None:
        if worker == 1:
            next(model.parameters()).data.mul_(0.5)

    train(tmp_path, "ar-sgd", project=None, after=write)
    check_names(capfd.readouterr().err, "worker 1 ", "run.project()")


def test_projection_refuses_more_servers_than_parameters(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("servers:", "at most 3")):
        train(tmp_path, "bsp", workers=5, servers=5)


def test_projection_refuses_multistep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("run.project()", "multistep", "ar-sgd")):
        train(tmp_path, "multistep")


def test_projection_function_that_returns_values_is_refused(tmp_path: Path) -> None:
    def pure(name: str, values: Tensor) -> Any:
        return values.clamp(-BOUND, BOUND)

    with pytest.raises(UserError, match=naming("run.project()", "in place", "pure returned")):
        train(tmp_path, "ar-sgd", project=pure)
