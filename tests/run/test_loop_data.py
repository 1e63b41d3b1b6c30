"""Data of custom training loops, compared with plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import naming

X = torch.randn(161, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X.sum(1, keepdim=True).sin())
PLAIN: dict[str, Any] = {
    "lr_scaling": "none",
    "lr_schedule": "constant",
    "warmup_epochs": 0,
    "weight_decay": 0.0,
}


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def trained(model: nn.Module, loader: DataLoader[Any], epochs: int) -> int:
    """Train in plain torch; return the steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in itertools.chain.from_iterable([loader] * epochs):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return epochs * len(loader)


def model_of(more: Sequence[type[nn.BatchNorm1d]] = ()) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), *(each(4) for each in more), nn.Tanh(), nn.Linear(4, 1))


def run_in(
    folder: Path, workers: int, data: Any, *layers: type[nn.BatchNorm1d], **settings: Any
) -> tuple[list[list[int]], nn.Module]:
    """Train with ar-sgd; return the sizes of each worker's batches, and the model."""
    sizes: list[list[int]] = [[] for _ in range(workers)]
    models = []

    def main(transport: Transport) -> None:
        model = model_of(layers)
        own = data() if callable(data) else data
        run = DataParallel(
            model, transport=transport, algorithm="ar-sgd", lr=0.1, momentum=0.9,
            quiet=True, **{**PLAIN, "run_dir": folder, **settings},
        )  # fmt: skip
        for batch in run.batches(own):
            sizes[transport.rank].append(len(batch[0]))
            loss = loss_of(model, batch)
            loss.backward()
            run.step(loss)
        models.append(model)

    VirtualCluster(workers, Cluster(hosts=1), 0).run(main)
    return sizes, models[0]


def assert_equal(mine: nn.Module, other: nn.Module) -> None:
    for a, b in zip(mine.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_drop_last_equals_plain_torch_with_concatenated_worker_batches(
    tmp_path: Path, workers: int
) -> None:
    """A round of n workers is a batch of n times the size; an incomplete round is dropped."""
    expected = model_of()
    steps = trained(expected, DataLoader(DATA, 16 * workers, drop_last=True), 3)
    sizes, model = run_in(tmp_path / "run", workers, DataLoader(DATA, 16, drop_last=True), epochs=3)
    assert sizes == [[16] * steps] * workers
    assert_equal(model, expected)


def test_data_loader_generator_determines_same_order_as_plain_torch(tmp_path: Path) -> None:
    def loader(batch_size: int) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        return DataLoader(DATA, batch_size, shuffle=True, drop_last=True, generator=generator)

    expected = model_of()
    trained(expected, loader(32), 3)
    _, model = run_in(tmp_path / "run", 2, lambda: loader(16), epochs=3)
    assert_equal(model, expected)


@pytest.mark.parametrize("workers", [2, 4])
def test_other_numbers_of_workers_cut_no_batch(tmp_path: Path, workers: int) -> None:
    """Segments end after rounds of the first three workers."""
    forms = (
        lambda: DataLoader(DATA, 8, shuffle=True, drop_last=True),
        lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 8, True)),
    )
    for number, form in enumerate(forms):
        folder = tmp_path / f"{number}"
        settings: dict[str, Any] = {"checkpoint_every": "24", "samples": 48}
        run_in(folder, 3, form, **settings, batch_size=8)
        resumed = {"resume": folder, "allow_resize": True, "run_dir": None}
        sizes, _ = run_in(folder, workers, form, **{**settings, "samples": 144, **resumed})
        assert {size for own in sizes for size in own} == {8}
        assert sum(map(len, sizes)) == (144 - 48) // 8


def test_drop_last_prevents_batch_of_one_for_batch_norm(tmp_path: Path) -> None:
    """A checkpoint that is due within a round waits for the end of the round."""
    loader = DataLoader(DATA, 16, shuffle=True, drop_last=True)
    every = {"epochs": 2, "checkpoint_every": "33samples"}
    sizes, _ = run_in(tmp_path / "run", 2, loader, nn.BatchNorm1d, **every)
    assert sizes == [[16] * 10] * 2


@pytest.mark.parametrize(
    ("workers", "settings", "names"),
    [
        (11, {"epochs": 1}, ["drop_last=True", "176 samples", "11 workers"]),
        (2, {"samples": 100}, ["drop_last=True", "32 samples", "samples=100", "100 samples"]),
        (2, {"epochs": 0.3}, ["drop_last=True", "epochs=0.3", "48 samples"]),
    ],
)
def test_drop_last_without_whole_rounds_is_refused(
    tmp_path: Path, workers: int, settings: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(UserError, match=naming(*names)):
        run_in(tmp_path / "run", workers, DataLoader(DATA, 16, drop_last=True), **settings)


def test_batches_cross_epochs_without_batch_sampler_or_drop_last(tmp_path: Path) -> None:
    """As documented in docs/your-script.md."""
    data = TensorDataset(*DATA[:150])
    plain = DataLoader(data, 16, shuffle=True)
    by_sampler = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 16, False))
    dropping = DataLoader(data, 16, shuffle=True, drop_last=True)
    sizes = {
        name: run_in(tmp_path / name, 1, loader, epochs=2)[0][0]
        for name, loader in (("plain", plain), ("sampler", by_sampler), ("drop", dropping))
    }
    assert 2 * len(plain) == 20
    assert sizes["plain"] == [16] * 18 + [12]
    assert sizes["sampler"] == ([16] * 9 + [6]) * 2
    assert sizes["drop"] == [16] * 18


def endless(first: int) -> Iterator[list[Tensor]]:
    for number in itertools.count(first):
        yield [part[number % 40 * 4 :][:4] for part in DATA.tensors]


@pytest.mark.parametrize("sharded", [False, True])
def test_endless_generator_trains_for_steps(tmp_path: Path, sharded: bool) -> None:
    """Each worker has a separate generator: parts of the same batches, or other batches."""
    expected = model_of()
    first, second = endless(0), endless(7) if sharded else endless(1)
    batches = []
    for _ in range(6):
        batches.append([torch.cat(parts) for parts in zip(next(first), next(second), strict=True)])
        if not sharded:
            next(first), next(second)
    trained(expected, batches, 1)  # type: ignore[arg-type]
    models = []

    def main(transport: Transport) -> None:
        model = model_of()
        run = DataParallel(
            model, transport=transport, algorithm="ar-sgd", lr=0.1, momentum=0.9, steps=6,
            batch_size=4, run_dir=tmp_path / "run", quiet=True, **PLAIN,
        )  # fmt: skip
        mine = endless(7 * transport.rank if sharded else 0)
        for batch in run.batches(mine, sharded=sharded):
            loss = loss_of(model, batch)
            loss.backward()
            run.step(loss)
        models.append(model)

    VirtualCluster(2, Cluster(hosts=1), 0).run(main)
    assert_equal(models[0], expected)


def test_epoch_of_sharded_windows_visits_all_windows_of_every_worker(tmp_path: Path) -> None:
    """Workers have columns of a text, whose hidden state would be carried from row to row."""
    text = torch.arange(24.0).view(6, 4)
    seen: list[tuple[int, int, list[float]]] = []

    def main(transport: Transport) -> None:
        model = nn.Linear(1, 1)
        run = DataParallel(
            model, transport=transport, algorithm="ar-sgd", epochs=2, batch_size=2,
            run_dir=tmp_path / "run", quiet=True,
        )  # fmt: skip
        mine = text[:, run.worker :: run.workers]
        for number, epoch in enumerate(run.epochs(_Rows(mine), sharded=True)):
            for row in epoch:
                seen.append((number, run.worker, row.tolist()))
                loss = model(row.unsqueeze(1)).square().mean()
                loss.backward()
                run.step(loss)

    VirtualCluster(2, Cluster(hosts=1), 0).run(main)
    for number in range(2):
        for worker in range(2):
            rows = [row for epoch, of, row in seen if (epoch, of) == (number, worker)]
            assert rows == text[:, worker::2].tolist()


class _Rows:
    """Batches that can only be read in order."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def test_endless_generator_without_run_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("generator", "samples=", "steps=")):
        run_in(tmp_path / "run", 1, lambda: endless(0), epochs=1)
