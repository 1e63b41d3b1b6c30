"""``run.evaluation_batches()``: each batch of evaluation data on one worker, in simulated loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import naming

TRAINING = TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(0)))
NUMBERS = torch.arange(11)
DATA = TensorDataset(NUMBERS)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(NUMBERS)


class Batches:
    """An iterable of batches."""

    def __init__(self, batches: list[Tensor]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._batches)


class Noisy(Dataset[Tensor]):
    """Samples with random numbers from the global generator."""

    def __len__(self) -> int:
        return len(NUMBERS)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index + torch.rand(()).item() / 2)


def doubled(samples: list[tuple[Tensor]]) -> list[Tensor]:
    return [2 * torch.stack([sample for (sample,) in samples])]


FORMS: dict[str, Callable[[], Any]] = {
    "data set": lambda: DATA,
    "loader": lambda: DataLoader(DATA, 3),
    "shuffled": lambda: DataLoader(DATA, 3, shuffle=True),
    "generator of the loader": lambda: DataLoader(
        DATA, 3, shuffle=True, generator=torch.Generator().manual_seed(3)
    ),
    "collate_fn": lambda: DataLoader(DATA, 2, collate_fn=doubled),
    "processes": lambda: DataLoader(DATA, 3, num_workers=1),
    "drop_last": lambda: DataLoader(DATA, 3, drop_last=True),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, drop_last=False)
    ),
    "without batches": lambda: DataLoader(DATA, batch_size=None),
    "stream": lambda: DataLoader(Stream(), 2),
    "batches": lambda: Batches([NUMBERS[:4], NUMBERS[4:5], NUMBERS[5:]]),
    "generator": lambda: (NUMBERS[i : i + 2] for i in range(0, 11, 2)),
    "random": lambda: DataLoader(Noisy(), 3),
}


def evaluate(
    folder: Path, workers: int, form: str, algorithm: str = "ar-sgd", mid_epoch: bool = False
) -> list[list[list[float]]]:
    """Return each worker's batches of a pass; check that the sums of all passes are equal."""
    shares: list[list[list[float]]] = [[] for _ in range(workers)]
    servers = int(algorithm == "asp")

    def main(transport: Transport) -> None:
        model = nn.Linear(2, 1)
        run = DataParallel(
            model, transport=transport, algorithm=algorithm, epochs=2, batch_size=4,
            run_dir=folder, overwrite=True, quiet=True, compute_time=0.01, slowdown={0: 3.0},
        )  # fmt: skip
        totals = []

        def evaluate_once() -> None:
            mine = [
                (batch[0] if isinstance(batch, (list, tuple)) else batch).reshape(-1).tolist()
                for batch in run.evaluation_batches(FORMS[form]())
            ]
            shares[run.worker] = mine
            totals.append(run.reduce(float(sum(map(sum, mine))), "sum").item())

        for epoch in run.epochs(TRAINING):
            for (inputs,) in epoch:
                run.step(model(inputs).sum().backward())
                if mid_epoch:
                    evaluate_once()
            evaluate_once()
        assert len(set(totals)) <= 1

    VirtualCluster(servers + workers, Cluster(hosts=2), 0).run(main)
    return shares


@pytest.mark.sample(4)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("form", FORMS)
def test_workers_share_the_batches_of_one_process(tmp_path: Path, form: str, workers: int) -> None:
    (whole,) = evaluate(tmp_path / "one", 1, form)
    shares = evaluate(tmp_path / "several", workers, form, mid_epoch=form == "loader")
    assert shares == [whole[worker::workers] for worker in range(workers)]
    count = {"drop_last": 9}.get(form, 11)
    assert len({round(each) for batch in whole for each in batch}) == count


def test_servers_get_no_evaluation_batches(tmp_path: Path) -> None:
    """With an asynchronous algorithm, at the ends of epochs."""
    (whole,) = evaluate(tmp_path / "one", 1, "loader")
    assert evaluate(tmp_path / "asp", 2, "loader", "asp") == [whole[::2], whole[1::2]]


def test_generator_of_the_training_loader_determines_one_order(tmp_path: Path) -> None:
    """Workers have drawn different numbers of epochs when they evaluate the training data."""
    shares: list[list[float]] = [[] for _ in range(3)]

    def main(transport: Transport) -> None:
        model = nn.Linear(2, 1)
        run = DataParallel(
            model, transport=transport, algorithm="asp", epochs=3, batch_size=4, quiet=True,
            run_dir=tmp_path, compute_time=0.01, slowdown={0: 3.0},
        )  # fmt: skip
        data = torch.arange(24.0)
        loader = DataLoader(
            TensorDataset(data), 4, shuffle=True, generator=torch.Generator().manual_seed(0)
        )
        for epoch in run.epochs(loader):
            for (inputs,) in epoch:
                run.step(model(inputs.view(-1, 2)).sum().backward())
            shares[run.worker] += [
                each for (batch,) in run.evaluation_batches(loader) for each in batch.tolist()
            ]

    VirtualCluster(4, Cluster(), 0).run(main)
    assert sorted(each for share in shares for each in share) == sorted([*range(24)] * 3)


def test_evaluation_after_the_run_is_refused(tmp_path: Path) -> None:
    def main(transport: Transport) -> None:
        model = nn.Linear(2, 1)
        run = DataParallel(
            model, transport=transport, algorithm="ar-sgd", epochs=1, batch_size=4,
            run_dir=tmp_path, overwrite=True, quiet=True,
        )  # fmt: skip
        for (inputs,) in run.batches(TRAINING):
            run.step(model(inputs).sum().backward())
        with pytest.raises(UserError, match=naming("run.evaluation_batches()", "run.epochs()")):
            run.evaluation_batches(DATA)

    VirtualCluster(2, Cluster(hosts=2), 0).run(main)
