"""A worker's position in the run: the samples of all workers before its current step."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from tests.loop_lab import PLAN, WORKERS, plain, train


@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin"])
def test_run_counts_samples_of_all_workers_before_the_step(tmp_path: Path, algorithm: str) -> None:
    seen: dict[int, list[tuple[int, int]]] = {}

    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        before = run.samples
        plain(run, model, inputs, labels)
        seen.setdefault(run.transport.rank, []).append((before, run.samples))

    train(tmp_path, algorithm, step)
    size, total = PLAN["batch_size"], PLAN["samples"]
    assert len(seen) == WORKERS
    for positions in seen.values():
        starts, ends = zip(*positions, strict=True)
        assert ends == (*starts[1:], total)
        if algorithm == "ar-sgd":
            assert starts == tuple(range(0, total, WORKERS * size))
    if algorithm == "aladdin":
        drawn = sorted(start for positions in seen.values() for start, _ in positions)
        assert drawn == list(range(0, total, size))
