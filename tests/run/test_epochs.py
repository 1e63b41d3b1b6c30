"""Epochs of a simulated custom loop: every worker reaches the end of each."""

from __future__ import annotations

import io
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

SCHEDULES = int(os.environ.get("ALADDIN_MPI_SCHEDULES", "2"))
LEFT_OUT = ("multistep", "ssp")
"""The first sums whole layers, of a larger model. With the second, a worker that is as far ahead as
allowed waits for one that waits for it (docs/your-script.md).
"""


class Points(Dataset[tuple[Tensor, Tensor]]):
    """A number of random points and their sums."""

    def __init__(self, count: int) -> None:
        self.x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(SCHEDULES))
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(LEFT_OUT)))
def test_workers_synchronise_at_the_end_of_every_epoch(
    tmp_path: Path, algorithm: str, seed: int
) -> None:
    """However few batches some workers have, and wherever a checkpoint or the end of the run is."""
    r = random.Random(f"{algorithm} {seed}")
    workers, length, batch = r.choice([2, 3, 5]), r.choice([8, 20, 45]), r.choice([1, 3, 8])
    samples = r.randrange(length // 2, 4 * length)
    slowdown, every = r.choice([1.0, 5.0]), r.choice([max(1, samples // 3), 10 * samples])
    servers = 0 if not ALGORITHMS[algorithm].has_servers else 1
    ends: Counter[int] = Counter()
    drawn: Counter[int] = Counter()

    def main(transport: Transport) -> None:
        torch.manual_seed(0)
        module = nn.Linear(2, 1)
        run = DataParallel(
            module,
            transport=transport,
            algorithm=algorithm,
            samples=samples,
            batch_size=batch,
            seed=seed,
            compute_time=0.01,
            jitter=0.5,
            slowdown={0: slowdown},
            checkpoint_every=every,
            run_dir=tmp_path / "run",
            quiet=True,
        )
        for epoch in run.epochs(Points(length)):
            count = 0
            for x, y in epoch:
                run.step(nn.functional.mse_loss(module(x), y).backward())
                count += len(x)
            everyone = run.reduce(1.0, "sum").item()
            assert everyone == workers
            ends[int(epoch)] += 1
            drawn[int(epoch)] += count

    VirtualCluster(servers + workers, Cluster(hosts=2), seed).run(main)
    epochs = -(-samples // length)
    assert ends == Counter(dict.fromkeys(range(epochs), workers))
    assert sum(drawn.values()) == samples


def test_epoch_is_its_number(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    numbers = []
    with DataParallel(module, epochs=3, batch_size=4, run_dir=tmp_path / "run", quiet=True) as run:
        for epoch in run.epochs(Points(8)):
            for x, y in epoch:
                run.step(nn.functional.mse_loss(module(x), y).backward())
            numbers.append((epoch + 1, epoch % 2 == 0, f"{epoch:02}", "%d" % epoch, str(epoch)))  # noqa: UP031
    assert numbers == [
        (1, True, "00", "0", "0"),
        (2, False, "01", "1", "1"),
        (3, True, "02", "2", "2"),
    ]


def test_saving_an_epoch_raises_an_error(tmp_path: Path) -> None:
    module = nn.Linear(2, 1)
    with (
        pytest.raises(UserError, match=r"cannot be saved. Save its number, int\(epoch\)"),
        DataParallel(module, epochs=1, batch_size=4, run_dir=tmp_path / "run", quiet=True) as run,
    ):
        for epoch in run.epochs(Points(8)):
            torch.save({"model": module.state_dict(), "epoch": epoch}, io.BytesIO())
