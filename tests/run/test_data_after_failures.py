"""In simulations, samples are distributed once per epoch, also after workers have failed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from aladdin_mpi import DataParallel
from aladdin_mpi.data import sampler
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

LENGTH = 24
WORKERS = 3


class Dealt:
    """Number of times that each sample was distributed, by (epoch, index)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = Counter[tuple[int, int]]()
        take = sampler.ShardedStream.take

        def counted(stream: sampler.ShardedStream, count: int) -> Any:
            epochs, indices = take(stream, count)
            self.times.update(zip(epochs.tolist(), indices.tolist(), strict=True))
            return epochs, indices

        monkeypatch.setattr(sampler.ShardedStream, "take", counted)


def play(
    folder: Path,
    algorithm: str,
    lost: dict[int, float],
    slowdown: dict[int, float],
    samples: int,
    start: float = 0.0,
    figures: int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """Train, and return the summary; ``lost`` maps workers to the second in which they fail.

    ``figures`` is the number of figures logged in each step.
    """
    servers = 1 if find_algorithm(algorithm).has_servers else 0

    def train(transport: Transport) -> dict[str, Any]:
        module = nn.Linear(1, 1)
        run = DataParallel(
            module,
            transport=transport,
            algorithm=algorithm,
            evaluate=lambda module: {"test_loss": 0.0},
            samples=samples,
            batch_size=2,
            compute_time=1.0,
            slowdown=slowdown,
            run_dir=None if "resume" in settings else folder,
            quiet=True,
            **settings,
        )
        for epoch in run.epochs([float(number) for number in range(LENGTH)]):
            for x in epoch:
                loss = module(x.float().view(-1, 1)).sum()
                loss.backward()
                run.log(**{f"figure_{number}": 1.0 for number in range(figures)})
                run.step(loss)
        return run.summary

    failures = {servers + worker: second for worker, second in lost.items()}
    cluster = Cluster(hosts=1, failures=failures).placed(servers)
    summaries = VirtualCluster(servers + WORKERS, cluster, start_time=start).run(train)
    return next(filter(None, summaries))


@pytest.mark.parametrize("algorithm", ["asp", "gosgd"])
def test_remaining_samples_of_a_failed_worker_are_redistributed_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, algorithm: str
) -> None:
    """The failed worker was epochs ahead; the next checkpoint redistributes its samples."""
    dealt = Dealt(monkeypatch)
    samples = 10 * LENGTH
    figures = play(
        tmp_path / "run",
        algorithm,
        {2: 30.5},
        {0: 6.0, 1: 6.0},
        samples,
        checkpoint_every=96,
    )
    assert max(epoch for epoch, _ in dealt.times) == 9
    assert set(dealt.times.values()) == {1}
    # The failed worker had not yet loaded the last batch of the lost samples.
    assert samples - figures["samples_lost"] <= dealt.times.total() <= samples


def test_logged_figures_do_not_prevent_copies_for_the_standby(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 0 fails after thousands of values; the next coordinator knows which samples are left."""
    dealt = Dealt(monkeypatch)
    samples = 10 * LENGTH
    play(tmp_path / "run", "ar-sgd", {0: 35.5}, {}, samples, figures=300, log_every=1000)
    assert dealt.times.total() >= samples
    assert set(dealt.times.values()) == {1}


def test_failed_worker_continues_its_data_after_resume(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run ends without it, and is resumed with the original number of workers."""
    dealt = Dealt(monkeypatch)
    folder = tmp_path / "run"
    samples = 10 * LENGTH
    play(folder, "asp", {2: 30.5}, {0: 6.0, 1: 6.0}, samples, checkpoint_every="never")
    before = dealt.times.total()
    play(folder, "asp", {}, {0: 6.0, 1: 6.0}, 2 * samples, 1e6, resume=folder)
    assert dealt.times.total() >= before + samples
    assert set(dealt.times.values()) == {1}


def test_slowdown_may_name_a_worker_missing_from_the_next_group(tmp_path: Path) -> None:
    slowdown = {1: 2.0, 2: 2.0}
    figures = play(tmp_path / "run", "bsp", {0: 5.5}, slowdown, 10 * LENGTH, checkpoint_every=96)
    assert figures["samples"] == 10 * LENGTH
    assert figures["workers"] == 2
