"""Running statistics of batch norm, recalibrated for the global model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi.hooks.measurement import reestimate_batch_norm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster


def test_batch_norm_statistics_are_plain_means_over_the_batches() -> None:
    """They do not use torch's momentum of 0.1, which gives the first batches almost no weight."""
    norm = nn.BatchNorm1d(2)
    with torch.no_grad():
        norm(torch.full((4, 2), 50.0))  # of a previous model
    batches = [torch.randn(8, 2) * scale + scale for scale in (1.0, 2.0, 3.0, 10.0)]
    norm.eval()
    reestimate_batch_norm(norm, [((batch,), {}) for batch in batches])
    means = torch.stack([batch.mean(0) for batch in batches]).mean(0)
    variances = torch.stack([batch.var(0) for batch in batches]).mean(0)
    torch.testing.assert_close(norm.running_mean, means)
    torch.testing.assert_close(norm.running_var, variances)
    assert norm.momentum == 0.1
    assert not norm.training


def test_model_without_batch_norm_is_not_called() -> None:
    class Uncalled(nn.Module):
        def forward(self, _: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    reestimate_batch_norm(Uncalled(), [((torch.zeros(1),), {})])


class Two(nn.Module):
    """A model with two batch norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        for norm in (self.first, self.second):
            norm.running_mean = torch.full((3,), 2.0)
            norm.running_var = torch.full((3,), 4.0)
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.first(x) + self.second(x))
        return y


@pytest.mark.parametrize("frozen", [["first"], ["first", "second"]], ids=str)
@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin"])
def test_frozen_batch_norms_keep_their_statistics(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], algorithm: str, frozen: list[str]
) -> None:
    models: list[Two] = []

    def main(transport: Transport) -> None:
        model = Two()
        run = DataParallel(
            model,
            transport=transport,
            algorithm=algorithm,
            lr=0.01,
            samples=48,
            batch_size=4,
            compute_time=0.01,
            run_dir=tmp_path / "run",
            evaluate=lambda module: {
                "mean": float(sum(b.float().mean() for b in module.buffers()))
            },
        )
        for (x,) in run.batches(TensorDataset(torch.randn(48, 3))):
            model.train()
            for name in frozen:
                model.get_submodule(name).eval()
            loss = model(x).square().mean()
            loss.backward()
            run.step(loss)
        models.append(model)

    VirtualCluster(3, Cluster(hosts=1), 0).run(main)
    for model in models:
        for name in ("first", "second"):
            mean = model.get_buffer(f"{name}.running_mean")
            is_kept = torch.equal(mean, torch.full((3,), 2.0))
            assert is_kept == (name in frozen)
    assert "no training call" not in capfd.readouterr().err
