"""Variance among the workers' models: its value, and no effect of measuring it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.flat.layout import Bucket, Layout, cut
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.hooks.variance import ModelVariance, OnVariance, Places, draw_places
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from aladdin_mpi.worker.role import Role
from tests.commands import checkpoint_part, metrics, train
from tests.launch import needs
from tests.quadratic import network
from tests.simulation import start

SIZES = (10, 300, 5000, 64)
NUMEL = sum(SIZES)


def variance_of(models: Tensor) -> float:
    """Return the variance by its definition, in float64; models are rows."""
    mean = models.double().mean(0)
    return ((models.double() - mean) ** 2).sum(1).mean().item() / (mean @ mean).item()


# -- the sample -------------------------------------------------------------------------------
def test_variance_sample_covers_every_parameter() -> None:
    places = draw_places(SIZES, seed=3, count=400)
    assert len(places.at) < 500
    assert torch.equal(places.at, places.at.unique())
    stops = torch.tensor(SIZES).cumsum(0)
    of = torch.searchsorted(stops, places.at, right=True)
    for parameter, size in enumerate(SIZES):
        assert places.weight[of == parameter].sum() == pytest.approx(size)
        assert (of == parameter).sum() >= min(size, 50)
    again, other = draw_places(SIZES, seed=3, count=400), draw_places(SIZES, seed=4, count=400)
    assert torch.equal(again.at, places.at)
    assert not torch.equal(other.at, places.at)


def test_variance_sample_of_a_small_model_is_the_whole_model() -> None:
    places = draw_places(SIZES, seed=0, count=NUMEL)
    assert torch.equal(places.at, torch.arange(NUMEL))
    assert torch.equal(places.weight, torch.ones(NUMEL).double())


def test_variance_sample_estimates_the_whole_without_bias() -> None:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)).double() ** 2
    values[:10] *= 1000  # a few large values, as the weights of normalisations
    estimates = []
    for seed in range(200):
        places = draw_places(SIZES, seed, count=400)
        estimates.append((places.weight @ values[places.at]).item())
    assert sum(estimates) / 200 == pytest.approx(values.sum().item(), rel=0.01)


# -- measurement by messages -------------------------------------------------------------------
class Still(Role):
    """A role that holds a model and does nothing."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def run(self) -> None:
        return

    def counts(self) -> dict[str, int]:
        return {}

    def part(self, bucket: Bucket) -> Tensor:
        return self.values[bucket.part]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return

    def resize(self, merged: MergedState) -> None:
        return


def measured(
    models: list[Tensor],
    servers: int,
    places: Places,
    cluster: Cluster,
    also: Callable[[ModelVariance, VirtualTransport, OnVariance], None] = lambda *_: None,
) -> tuple[list[float | None], list[float | None]]:
    """Return the result on rank 0, and the final state of every surviving rank."""
    layout: Layout = cut(NUMEL, servers, 0.002, 0.01)
    reported: list[float | None] = []

    def tell(samples: int, value: float | None) -> None:
        reported.append(value)

    def main(transport: VirtualTransport) -> float | None:
        role = Still(models[transport.rank])
        variance = ModelVariance(
            transport, layout, role, places, range(servers, transport.size), False
        )
        transport.sleep(1.0)
        if transport.rank == 0:
            variance.take(100, tell)
            assert len(reported) == (len(models) == 1)
        also(variance, transport, tell)
        transport.sleep(10.0)
        assert transport.traffic.bytes_sent == 0
        return variance.at_end()

    ends = VirtualCluster(len(models), cluster).run(main)
    return reported, [end for rank, end in enumerate(ends) if rank not in cluster.failures]


def models(count: int, spread: float = 0.1) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    centre = torch.randn(NUMEL, generator=random)
    return [centre + spread * torch.randn(NUMEL, generator=random) for _ in range(count)]


WHOLE = draw_places(SIZES, seed=0, count=NUMEL)
SAMPLE = draw_places(SIZES, seed=0, count=800)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_model_variance_is_exact_if_every_value_is_sampled(servers: int) -> None:
    ranks = models(servers + 5)
    reported, ends = measured(ranks, servers, WHOLE, network(delay_us=1e5))
    expected = variance_of(torch.stack(ranks[servers:]))
    assert reported == [pytest.approx(expected, rel=1e-9)]
    assert ends == [pytest.approx(expected, rel=1e-9)] * len(ranks)


def test_model_variance_of_a_small_sample_is_approximate() -> None:
    ranks = models(6)
    reported, ends = measured(ranks, 1, SAMPLE, network())
    assert reported == [pytest.approx(variance_of(torch.stack(ranks[1:])), rel=0.1)]
    assert reported[0] == pytest.approx(ends[0])


def test_model_variance_of_equal_models_is_zero() -> None:
    same = models(1) * 8
    reported, ends = measured(same, 1, SAMPLE, network())
    assert reported == [0.0]
    assert set(ends) == {0.0}


def test_model_variance_of_one_worker_is_zero() -> None:
    assert measured(models(1), 0, SAMPLE, network()) == ([0.0], [0.0])


def test_model_variance_excludes_a_failed_worker() -> None:
    ranks = models(6)
    failed = network(failures={4: 0.5})  # before the request
    reported, ends = measured(ranks, 1, WHOLE, failed)
    expected = variance_of(torch.stack([ranks[i] for i in (1, 2, 3, 5)]))
    assert reported == [pytest.approx(expected, rel=1e-9)]
    assert ends == [pytest.approx(expected, rel=1e-9)] * 5


def test_model_variance_excludes_a_worker_that_fails_before_its_reply() -> None:
    ranks = models(6)
    slow = network(failures={4: 1.1}, latency_us=2e5, local_latency_us=2e5)
    reported, _ = measured(ranks, 1, WHOLE, slow)
    expected = variance_of(torch.stack([ranks[i] for i in (1, 2, 3, 5)]))
    assert reported == [pytest.approx(expected, rel=1e-9)]


def test_model_variance_ignores_replies_to_an_earlier_request() -> None:
    ranks = models(3)
    slow = network(latency_us=1e6, local_latency_us=1e6)

    def ask_again(variance: ModelVariance, transport: VirtualTransport, tell: OnVariance) -> None:
        transport.sleep(0.5)
        if transport.rank == 0:
            variance.take(200, tell)

    reported, _ = measured(ranks, 1, WHOLE, slow, ask_again)
    assert reported == [None, pytest.approx(variance_of(torch.stack(ranks[1:])), rel=1e-9)]


# -- in complete runs -------------------------------------------------------------------------
PLAN = ["--workers", 4, "--jitter", 0.3, "--lr", 0.02, "--bn-batches", 1, "--quiet"]


def run_small(run_dir: Path, algorithm: str, *words: object) -> dict[str, Any]:
    return start("--algorithm", algorithm, *PLAN, *words, "--run-dir", run_dir)


def variances(run_dir: Path) -> list[float | None]:
    return [line["model_variance"] for line in metrics(run_dir, "eval")]


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["bsp", "ar-sgd", "multistep"])
def test_model_variance_of_synchronous_algorithms_is_zero(tmp_path: Path, algorithm: str) -> None:
    """Although the workers are hardly ever in the same step at the same time."""
    uneven = ["--hosts", 4, "--latency-us", 2e4, "--slowdown", "1=2"]
    run_small(tmp_path / "run", algorithm, *uneven, "--epochs", 2, "--eval-every", 0.1)
    values = variances(tmp_path / "run")
    assert len(values) > 10
    assert set(values) == {0.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["aladdin", "asp", "easgd", "gosgd", "ad-psgd", "local-sgd"])
def test_model_variance_of_asynchronous_algorithms_is_positive(
    tmp_path: Path, algorithm: str
) -> None:
    run_small(tmp_path / "run", algorithm, "--epochs", 2, "--eval-every", 0.3)
    *values, _ = variances(tmp_path / "run")
    assert len(values) >= 6
    assert all(value is not None and 0 < value < 1 for value in values)


@pytest.mark.parametrize("model", ["digits", "tests.failing:build"], ids=["sample", "whole"])
def test_last_model_variance_is_that_of_the_checkpoint(tmp_path: Path, model: str) -> None:
    """The last value refers to the models in the last checkpoint."""
    run_small(tmp_path / "run", "gosgd", "--epochs", 2, "--model", model, "--eval-every", 0)
    parts = [checkpoint_part(tmp_path / "run", rank)["role"] for rank in range(4)]
    ranks = torch.stack([part["parameters"] for part in parts])
    is_whole = ranks.shape[1] <= 4096
    assert is_whole == (model != "digits")
    expected = pytest.approx(variance_of(ranks), rel=1e-6 if is_whole else 0.1)
    assert variances(tmp_path / "run") == [expected]


def test_measuring_model_variance_does_not_change_the_run(tmp_path: Path) -> None:
    ends = [
        run_small(tmp_path / str(every), "aladdin", "--epochs", 2, "--eval-every", every)
        for every in (0, 0.1)
    ]
    for name in ("seconds", "bytes_sent_per_step", "test_loss", "wait_fraction"):
        assert ends[0][name] == ends[1][name], name


def test_model_variance_is_measured_after_a_worker_fails(tmp_path: Path) -> None:
    run_small(tmp_path / "run", "aladdin", "--epochs", 3, "--eval-every", 0.25, "--failures", "3=4")
    values = variances(tmp_path / "run")
    assert len(values) == 12
    assert all(value is not None and value > 0 for value in values)


def test_hanging_worker_does_not_delay_model_variance(tmp_path: Path) -> None:
    run_small(tmp_path / "run", "aladdin", "--epochs", 3, "--eval-every", 0.25, "--pauses", "3:3:6")
    values = variances(tmp_path / "run")
    assert len(values) == 12
    assert None in values
    assert values[0] is not None and values[-1] is not None


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["aladdin", "ar-sgd"])
def test_model_variance_over_mpi(tmp_path: Path, algorithm: str) -> None:
    options = ["--algorithm", algorithm, "--epochs", 4, "--eval-every", 1]
    train(3, tmp_path / "run", *options)
    lines = metrics(tmp_path / "run", "eval")
    assert lines[-1]["samples"] == 4 * 1437
    measured = [line["model_variance"] for line in lines]
    last, measured = measured[-1], [value for value in measured if value is not None]
    assert last is not None
    if algorithm == "ar-sgd":
        assert set(measured) == {0.0}
    else:
        assert len(measured) > 1
        assert all(0 < value < 1 for value in measured)
