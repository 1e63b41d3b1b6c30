"""ALADDIN's analysis checked against the code: mean, mixing and convergence."""

from __future__ import annotations

from dataclasses import replace
from math import cos, pi, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.options.algorithms import AladdinOptions
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from tests.quadratic import Quadratic, Setup, aladdin_options, network, noise_of, run

Matrix = NDArray[np.float64]

ROUGH = network(hosts=2, latency_us=2e5, delay_us=8e5, bandwidth_gbit=1e-6)
"""Delays of whole steps in random order, and links that take half a second per gradient."""

# -- Lemma 1: the global model is the mean of the local models ------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize("weight_decay", [0.0, 0.02])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_global_model_is_mean_of_local_models(
    workers: int, momentum: float, weight_decay: float
) -> None:
    """This is exact without blending: every gradient is applied twice with the same rate, in full
    at its worker and by 1/n at the server, whatever the order and the delays.
    """
    end = run(
        Setup(
            workers=workers,
            servers=2,
            bucket=4,
            samples=300,
            aladdin=aladdin_options(alpha=0.0, normalize="workers"),
            schedule=lambda samples: 0.02,
            momentum=momentum,
            weight_decay=weight_decay,
            slowdown=(1.0, 3.0, 1.2, 7.0, 1.9),
            jitter=0.4,
            cluster=ROUGH,
            segments=2,
        )
    )
    assert (end.locals - end.first).abs().max() > 0.3
    torch.testing.assert_close(end.model, end.locals.mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        aladdin_options(alpha=0.0, normalize="count", pi=2),
        aladdin_options(alpha=0.0, normalize="none"),
        aladdin_options(alpha=0.0, normalize="workers", trigger="drop"),
        aladdin_options(alpha=0.9, normalize="workers"),
    ],
    ids=lambda options: f"{options.normalize}-{options.trigger}-{options.alpha}",
)
def test_other_aladdin_variants_deviate_from_mean(options: AladdinOptions) -> None:
    end = run(Setup(workers=3, samples=300, aladdin=options, slowdown=(1.0, 1.7, 2.9), noise=1.0))
    assert (end.model - end.locals.mean(0)).abs().max() > 0.02


# -- the mixing matrix ---------------------------------------------------------------------
#
# A blend of worker i takes the vector of local models from x to W_i x, under the lemma's
# assumption that the global model is their mean at that moment.


def blend(n: int, i: int, alpha: float) -> Matrix:
    """``W_i``: ``x_i <- (1 - alpha) x_i + alpha mean(x)``."""
    matrix = np.eye(n)
    matrix[i] = (1 - alpha) * matrix[i] + alpha / n
    return matrix


def second_eigenvalue(matrix: Matrix) -> float:
    return float(np.sort(np.abs(np.linalg.eigvals(matrix)))[-2])


def theory(n: int, period: int) -> float:
    return 1 - 1 / sqrt(n * period)


GRID = [(n, period) for n in (2, 3, 8, 32) for period in (1, 2, 4)]


@pytest.mark.parametrize(("n", "period"), GRID)
def test_single_blend_is_doubly_stochastic_only_in_expectation(n: int, period: int) -> None:
    """A single blend keeps consensus (its rows sum to 1) but moves the mean. If workers are due
    equally often, the expected blend is symmetric and doubly stochastic, with the spectral gap
    alpha / n.
    """
    alpha = theory(n, period)
    blends = [blend(n, i, alpha) for i in range(n)]
    for matrix in blends:
        np.testing.assert_allclose(matrix.sum(1), 1)
        assert np.abs(matrix.sum(0) - 1).max() > 0.1
    expected = np.mean(blends, axis=0)
    np.testing.assert_allclose(expected, expected.T)
    np.testing.assert_allclose(expected.sum(0), 1)
    assert (expected >= 0).all()
    assert second_eigenvalue(expected) == pytest.approx(1 - alpha / n)


@pytest.mark.parametrize(("n", "period"), GRID)
def test_round_of_blends_is_doubly_stochastic(n: int, period: int) -> None:
    """Every worker blends once while the server's model is fixed: the spectral gap is alpha, and
    a deviation from the mean shrinks to 1 / sqrt(n pi).
    """
    alpha = theory(n, period)
    still = np.full((n, n), 1 / n)
    matrix = np.stack([(1 - alpha) * np.eye(n)[i] + alpha * still[i] for i in range(n)])
    np.testing.assert_allclose(matrix.sum(0), 1)
    np.testing.assert_allclose(matrix.sum(1), 1)
    assert second_eigenvalue(matrix) == pytest.approx(1 / sqrt(n * period))


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("n", "period"), [(2, 1), (3, 2), (5, 4)])
def test_aladdin_contracts_workers_by_predicted_eigenvalue(
    n: int, period: int, servers: int
) -> None:
    """At learning rate 0 only blends act: after k of them, a deviation is (n pi)^(-k/2)."""
    steps = 2 * period + 1
    first = Setup().numel
    apart = torch.randn(n, first, generator=torch.Generator().manual_seed(3))
    apart -= apart.mean(0)
    setup = Setup(
        workers=n,
        servers=servers,
        bucket=4,
        batch=1,
        samples=n * steps,
        aladdin=aladdin_options(pi=period),
        schedule=lambda samples: 0.0,
        slowdown=tuple(1 + 0.01 * i for i in range(n)),
    )
    middle = run(setup).first
    end = run(replace(setup, start=lambda worker: middle + apart[worker]))
    assert [worker.role.worker.computed for worker in end.workers] == [steps] * n
    torch.testing.assert_close(end.model, middle)
    blends = steps // period
    torch.testing.assert_close(
        end.locals, middle + apart / (n * period) ** (blends / 2), rtol=1e-5, atol=1e-6
    )


# -- convergence ----------------------------------------------------------------------------


def cosine(rate: float, total: int) -> Any:
    return lambda samples: rate * 0.5 * (1 + cos(pi * samples / total))


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", range(2, 9))
def test_aladdin_defaults_converge_to_minimum(workers: int) -> None:
    """Strongly convex problem with noise, unequal workers and network delays."""
    samples = 150 * workers
    setup = Setup(
        workers=workers,
        servers=1 + workers // 4,
        bucket=6,
        batch=1,
        samples=samples,
        schedule=cosine(0.08, samples),
        momentum=0.9,
        noise=0.3,
        slowdown=tuple(1 + 3 * (i % 3) / 2 for i in range(workers)),
        jitter=0.2,
        cluster=network(hosts=2, latency_us=5e4, delay_us=1e5),
        seed=workers,
    )
    end = run(setup)
    optimum = Quadratic(setup.numel).optimum
    before, after = distance(end.first, optimum), distance(end.model, optimum)
    assert after < 0.1 * before, (before, after)
    assert all(distance(x, optimum) < 0.12 * before for x in end.locals)


def distance(x: Tensor, optimum: Tensor) -> float:
    return float((x - optimum).norm())


def test_lookahead_damps_oscillation_of_stale_models_and_momentum() -> None:
    """A model that lacks the other workers' newest steps oscillates with a large momentum."""
    away = {}
    for steps in (0.0, 0.5, 1.0):
        setup = Setup(
            workers=8,
            samples=3200,
            aladdin=aladdin_options(pi=1, lookahead=steps),
            schedule=lambda samples: 0.1,
            momentum=0.9,
            noise=0.0,
            jitter=0.05,
        )
        away[steps] = distance(run(setup).model, Quadratic(setup.numel).optimum)
    assert away[0.5] < 0.3 * away[0.0]
    assert away[1.0] < 0.3 * away[0.5]


@pytest.mark.long
def test_aladdin_final_error_shrinks_with_gradient_noise() -> None:
    """The remaining error is the noise of the gradients, not a bias of the algorithm."""
    setup = Setup(
        workers=4, batch=1, samples=1000, schedule=cosine(0.4, 1000), slowdown=(1.0, 2.0, 3.0, 4.0)
    )
    optimum = Quadratic(setup.numel).optimum
    left = [distance(run(replace(setup, noise=noise)).model, optimum) for noise in (0.3, 0.03, 0)]
    assert left[0] > 4 * left[1] > 0
    assert left[2] < 0.05 * left[0]


@pytest.mark.long
def test_data_parallel_with_defaults_converges(tmp_path: Path) -> None:
    """Three lines around a custom training loop; all ranks end with the same trained model."""

    def main(transport: VirtualTransport) -> tuple[Tensor, dict[str, Any]]:
        module = Quadratic(60)
        parallel = DataParallel(
            module,
            transport=transport,
            samples=2000,
            batch_size=4,
            lr=0.04,
            warmup_epochs=0.0,
            weight_decay=0.0,
            bucket_mb=1e-4,
            compute_time=0.1,
            slowdown={1: 2.5},
            jitter=0.1,
            run_dir=tmp_path / "run",
            quiet=True,
        )
        data = TensorDataset(torch.zeros(1000, 1), torch.zeros(1000))
        for step, (inputs, _) in enumerate(parallel.batches(data)):
            loss = module(noise_of(transport.rank, step, 60, 0.6 / len(inputs)))
            loss.backward()
            parallel.step(loss)
        x = torch.cat([part.detach() for part in list(module.parts)[::-1]])
        return x, parallel.summary

    cluster = network(hosts=2)
    results = [result for result in VirtualCluster(4, cluster).run(main) if result is not None]
    assert len(results) == 4
    module = Quadratic(60)
    first = torch.cat([part.detach() for part in list(module.parts)[::-1]])
    for x, _ in results:
        assert torch.equal(x, results[0][0])
        assert distance(x, module.optimum) < 0.1 * distance(first, module.optimum)
    summary = results[0][1]
    assert summary["gradients_computed"] == summary["gradients_applied"] >= 500
    assert summary["samples"] == 2000
