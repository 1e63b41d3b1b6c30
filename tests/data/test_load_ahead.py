"""Batches loaded by a thread are those loaded without one, and only where that is safe and pays."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from aladdin_mpi.data import loader_processes
from aladdin_mpi.data.loader_processes import AHEAD, THREAD, TRIALS
from aladdin_mpi.data.loading import BatchSource
from aladdin_mpi.data.sampler import ShardedStream
from aladdin_mpi.errors import UserError

SECONDS = 0.004
"""That a sample takes: a batch of two takes enough for a thread to pay."""


class Samples(Dataset[Any]):
    """Notes which thread loads what."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self.threads: list[str] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[int, float]:
        time.sleep(self.seconds)
        self.threads.append(threading.current_thread().name.removesuffix("_0"))
        return index, self.noise()

    def noise(self) -> float:
        return 0.0


class Torch(Samples):
    def noise(self) -> float:
        return torch.rand(1).item()


class Python(Samples):
    def noise(self) -> float:
        return random.random()


class Numpy(Samples):
    def noise(self) -> float:
        return float(np.random.random())


def source(data: Samples, ahead: bool = True, collate: Any = default_collate) -> BatchSource:
    stream = ShardedStream(len(data), 0, 1, seed=3)
    return BatchSource(data, stream, batch_size=2, collate=collate, ahead=ahead)


def batches(source: BatchSource, counts: list[int]) -> list[list[list[float]]]:
    return [[part.tolist() for part in source.next_batch(count)] for count in counts]


def test_they_are_those_loaded_without_a_thread() -> None:
    counts = [2] * 8 + [1] + [2] * 14 + [1, 1, 2, 2, 2]
    data = Samples()
    assert batches(source(data), counts) == batches(source(Samples(), ahead=False), counts)
    assert data.threads[: 2 * TRIALS] == ["MainThread"] * 2 * TRIALS
    assert data.threads.count(THREAD) >= 2 * (len(counts) - 3 * TRIALS - 3)


def test_the_next_are_loaded_while_one_is_used() -> None:
    data = Samples()
    ahead = source(data)
    for number in range(TRIALS):
        ahead.next_batch()
        assert len(data.threads) >= 2 * (number + 1)
    for _ in range(500):
        if len(data.threads) == 2 * (TRIALS + AHEAD):
            break
        time.sleep(0.01)
    time.sleep(10 * SECONDS)
    assert len(data.threads) == 2 * (TRIALS + AHEAD)  # and no more than these
    assert ahead.stream.position == 2 * TRIALS  # only what was used counts


@pytest.mark.parametrize("kind", [Torch, Python, Numpy])
def test_what_draws_random_numbers_is_loaded_while_the_training_waits(kind: type[Samples]) -> None:
    data = kind()
    found = batches(source(data), [2] * 8)
    assert found == batches(source(kind(), ahead=False), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_so_is_what_is_put_together_at_random() -> None:
    def mixed(samples: list[Any]) -> Any:
        return default_collate(samples[:: 1 if torch.rand(1) < 0.5 else -1])

    data = Samples()
    batches(source(data, collate=mixed), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_fast_data_are_loaded_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_processes, "LEAST_SECONDS", 1.0)  # whatever else the cores do
    data = Samples(seconds=0.0)
    batches(source(data), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_an_error_is_raised_where_its_batch_is_asked_for() -> None:
    class Broken(Samples):
        def __getitem__(self, index: int) -> tuple[int, float]:
            if len(self.threads) == 2 * (TRIALS + 1):
                raise UserError("sample 7: expected an image")
            return super().__getitem__(index)

    ahead = source(Broken())
    for _ in range(TRIALS + 1):
        ahead.next_batch()
    with pytest.raises(UserError, match="sample 7"):
        ahead.next_batch()


def test_an_augmentation_of_ones_own_leaves_the_training_its_random_numbers() -> None:
    class Own(Samples):
        def augmented(self, index: int, key: int) -> tuple[int, float]:
            return index, torch.rand(1).item()

    data = Own()
    before = torch.get_rng_state()
    one = source(data)
    for _ in range(TRIALS + 2):
        one.next_batch()
    assert torch.equal(torch.get_rng_state(), before)
    assert one.draws
