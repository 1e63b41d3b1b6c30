"""Batches loaded ahead by a thread, if that is safe and faster, equal those loaded without one."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from aladdin_mpi.data import loading
from aladdin_mpi.data.loading import AHEAD, THREAD, TRIALS, BatchSource
from aladdin_mpi.data.sampler import ShardedStream
from aladdin_mpi.errors import UserError

SECONDS = 0.004
"""Seconds per sample: a batch of two takes long enough for a thread to pay off."""


class Samples(Dataset[Any]):
    """Samples that record the thread that loads them."""

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


def test_load_ahead_returns_same_batches_as_loading_without_thread() -> None:
    counts = [2] * 8 + [1] + [2] * 14 + [1, 1, 2, 2, 2]
    data = Samples()
    assert batches(source(data), counts) == batches(source(Samples(), ahead=False), counts)
    assert data.threads[: 2 * TRIALS] == ["MainThread"] * 2 * TRIALS
    assert data.threads.count(THREAD) >= 2 * (len(counts) - 3 * TRIALS - 3)


def test_load_ahead_loads_next_batches_up_to_limit() -> None:
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
    assert ahead.stream.position == 2 * TRIALS  # only used batches count


@pytest.mark.parametrize("kind", [Torch, Python, Numpy])
def test_load_ahead_uses_main_thread_for_random_data_set(kind: type[Samples]) -> None:
    data = kind()
    result = batches(source(data), [2] * 8)
    assert result == batches(source(kind(), ahead=False), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_load_ahead_uses_main_thread_for_random_collate() -> None:
    def mixed(samples: list[Any]) -> Any:
        return default_collate(samples[:: 1 if torch.rand(1) < 0.5 else -1])

    data = Samples()
    batches(source(data, collate=mixed), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_load_ahead_uses_main_thread_for_fast_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "LEAST_SECONDS", 1.0)  # whatever other processes use the cores
    data = Samples(seconds=0.0)
    batches(source(data), [2] * 8)
    assert set(data.threads) == {"MainThread"}


def test_load_ahead_raises_error_with_its_own_batch() -> None:
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


def test_load_ahead_preserves_global_generator_with_custom_augmentation() -> None:
    class Own(Samples):
        def augmented(self, index: int, key: int) -> tuple[int, float]:
            return index, torch.rand(1).item()

    data = Own()
    before = torch.get_rng_state()
    one = source(data)
    for _ in range(TRIALS + 2):
        one.next_batch()
    assert torch.equal(torch.get_rng_state(), before)
    assert one._loader.draws
