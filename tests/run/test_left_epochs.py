"""Epochs that are left by ``break``: their remaining samples, and the other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import summary
from tests.messages import naming

LENGTH, BATCH, EPOCHS, MOST = 48, 4, 3, 2
NUMBERS = torch.arange(float(LENGTH))[:, None]


class Batches:
    """An iterable of batches."""

    def __len__(self) -> int:
        return LENGTH // BATCH

    def __iter__(self) -> Iterator[Tensor]:
        return iter(NUMBERS.split(BATCH))


SAMPLES: Any = list(NUMBERS)
RANGES: Any = [range(start, start + BATCH) for start in range(0, LENGTH, BATCH)]
DATA: dict[str, Callable[[], Any]] = {
    "samples": lambda: DataLoader(SAMPLES, BATCH),
    "loader process": lambda: DataLoader(SAMPLES, BATCH, num_workers=1),
    "batch sampler": lambda: DataLoader(SAMPLES, batch_sampler=RANGES),
    "iterable": Batches,
}
Epochs = list[list[tuple[int, list[int]]]]
"""For each epoch, the positions and samples of a worker's batches."""


def train(
    folder: Path,
    algorithm: str,
    workers: int = 2,
    data: Callable[[], Any] = DATA["samples"],
    leaves: Callable[[DataParallel, int], bool] = lambda run, count: count == MOST,
    before: str = "next batch",
    last: int = EPOCHS,
    **settings: Any,
) -> list[Epochs]:
    """Train in simulation to one model, and return the epochs of each worker.

    Args:
        folder: of the run.
        algorithm: its name.
        workers: their number.
        data: makes the data.
        leaves: returns whether to leave the epoch, given the number of its batches so far.
        before: "next batch", "step" or "backward", where the loop is left.
        last: the epoch after which the loop over epochs is left.
        settings: of the run.
    """
    seen: list[Epochs] = [[] for _ in range(workers)]
    weights = set()

    def main(transport: Transport) -> None:
        model = nn.Linear(1, 1)
        options: dict[str, Any] = {
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "lr": 1e-4,
            "compute_time": 0.01,
        }
        options |= {"run_dir": folder, "resume": "auto", "quiet": True, **settings}
        run = DataParallel(model, transport=transport, algorithm=algorithm, **options)
        for epoch in run.epochs(data()):
            mine: list[tuple[int, list[int]]] = []
            seen[run.worker].append(mine)
            for x in epoch:
                mine.append((run.samples, x.flatten().int().tolist()))
                is_last = leaves(run, len(mine))
                if is_last and before == "backward":
                    break
                (model(x) / LENGTH).square().mean().backward()
                if is_last and before == "step":
                    break
                run.step()
                if is_last:
                    break
            if not ALGORITHMS[algorithm].bounds_staleness:
                assert run.reduce(1.0, "sum") == workers
            if int(epoch) == last:
                break
        assert run.summary is not None
        assert run.is_over
        weights.add(model.weight.item())

    servers = int(ALGORITHMS[algorithm].has_servers)
    VirtualCluster(servers + workers, Cluster(hosts=2), 0).run(main)
    assert len(weights) == 1
    return seen


def order(data: str, worker: int, workers: int = 2) -> list[int]:
    """Return the samples of one worker's pass through the data."""
    if data in ("samples", "loader process"):
        return list(range(worker, LENGTH, workers))
    return [i for i in range(LENGTH) if i // BATCH % workers == worker]


@pytest.mark.sample(3)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin-ahead"])
def test_next_epoch_begins_with_the_samples_that_a_left_one_has_not_used(
    tmp_path: Path, algorithm: str, data: str
) -> None:
    """No batch has the position of a former epoch; no sample is lost or repeated."""
    for worker, epochs in enumerate(train(tmp_path, algorithm, data=DATA[data])):
        assert [len(each) for each in epochs] == [MOST] * EPOCHS
        for number, epoch in enumerate(epochs):
            assert all(position // LENGTH == number for position, _ in epoch)
        used = [i for _, samples in chain(*epochs) for i in samples]
        assert used == order(data, worker)[: len(used)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"multistep"}))
@pytest.mark.parametrize("before", ["next batch", "backward"])
def test_other_workers_do_not_wait_for_one_that_left_the_epoch(
    tmp_path: Path, algorithm: str, before: str
) -> None:
    """It takes part in steps that were granted before; all meet at the end of the epoch."""

    def leaves(run: DataParallel, count: int) -> bool:
        return run.is_first and count == MOST

    first, *others = train(tmp_path, algorithm, 3, leaves=leaves, before=before)
    assert [len(each) for each in first] == [MOST] * EPOCHS
    for epochs in others:
        assert len(epochs) == EPOCHS
        for number, epoch in enumerate(epochs):
            assert all(position // LENGTH == number for position, _ in epoch)


@pytest.mark.parametrize("before", ["next batch", "backward"])
def test_resumed_run_continues_after_left_epochs(tmp_path: Path, before: str) -> None:
    """On the same number of workers, and then on another one, which completes the first pass."""
    whole = train(tmp_path / "whole", "ar-sgd", before=before, epochs=2)
    train(tmp_path / "parts", "ar-sgd", before=before, epochs=1)
    resumed = train(tmp_path / "parts", "ar-sgd", before=before, epochs=2)
    assert [each[1:] for each in whole] == resumed
    more = train(tmp_path / "parts", "ar-sgd", 3, allow_resize=True)
    used = [i for epochs in (*whole, *more) for _, samples in chain(*epochs) for i in samples]
    assert len(used) == LENGTH + 8
    assert set(used) == set(range(LENGTH))


@pytest.mark.sample(4)
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"multistep"}))
@pytest.mark.parametrize("most", [MOST, LENGTH])
def test_break_out_of_the_loop_over_epochs_completes_the_run(
    tmp_path: Path, algorithm: str, most: int
) -> None:
    """The summary counts the samples that were computed."""
    workers = train(tmp_path, algorithm, leaves=lambda run, count: count == most, last=1)
    assert all(len(epochs) == 2 for epochs in workers)
    used = [i for epochs in workers for _, samples in chain(*epochs) for i in samples]
    assert summary(tmp_path)["samples"] == len(used)


def test_epoch_left_between_backward_and_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("step()", "not called for a batch")):
        train(tmp_path, "ar-sgd", before="step")
