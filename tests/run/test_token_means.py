"""The recipe for means over tokens in docs/your-script.md equals one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.run.test_loop_data import PLAIN, assert_equal

WORKERS, BATCH, LENGTH, TOKENS = 2, 8, 39, 5
"""The last round has 7 samples: 4 on the first worker, 3 on the second."""


def sequences() -> TensorDataset:
    """Return inputs, targets of each token, and masks; samples have 1 to 5 tokens."""
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(LENGTH, 3, generator=random)
    counts = torch.randint(1, TOKENS + 1, (LENGTH, 1), generator=random)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(TOKENS) < counts)


def new_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, TOKENS))


def total_of(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets, mask = batch
    return ((model(inputs) - targets).square() * mask).sum()


@pytest.mark.parametrize("algorithm", ["ar-sgd", "bsp"])
def test_mean_over_tokens_equals_one_process(tmp_path: Path, algorithm: str) -> None:
    expected = new_model()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    for batch in DataLoader(sequences(), WORKERS * BATCH):
        optimizer.zero_grad()
        (total_of(expected, batch) / batch[2].sum()).backward()
        optimizer.step()
    models = []

    def main(transport: Transport) -> None:
        model = new_model()
        run = DataParallel(
            model, transport=transport, algorithm=algorithm, epochs=1, lr=0.1, momentum=0.9,
            run_dir=tmp_path, quiet=True, compute_time=0.01, slowdown={0: 3.0}, **PLAIN,
        )  # fmt: skip
        for batch in run.batches(DataLoader(sequences(), BATCH)):
            total = total_of(model, batch)
            samples = len(batch[0])
            sizes = torch.tensor([float(batch[2].sum()), samples])
            all_tokens, all_samples = run.reduce(sizes, "sum")
            loss = total / samples * all_samples / all_tokens
            loss.backward()
            run.step(loss)
        models.append(model)

    VirtualCluster(WORKERS + (algorithm == "bsp"), Cluster(hosts=2), 0).run(main)
    for model in models:
        assert_equal(model, expected)
