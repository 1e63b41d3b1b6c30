"""A learning rate set by a script applies to the same step as in torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.launch import needs
from tests.run.program_runs import run_program
from tests.run.rates_by_hand import (
    BETWEEN,
    RATES,
    train,
    train_by_scheduler,
    train_with_scheduler_made_in_loop,
    train_with_short_last_round,
)

OF_ANY_OPTIMIZER = sorted(
    name for name, a in ALGORITHMS.items() if a.optimizers not in ("own", "sgd")
)
"""The other algorithms support only momentum SGD, whose rates are options."""
USED_IN_BACKWARD = ("aladdin", "aladdin-ahead", "asp", "bsp", "shat", "ssp")
"""Algorithms that use the rate before run.step(), during backward."""
Case = tuple[str, bool]
"""An algorithm, and whether gradients are sent during backward."""
CASES: list[Case] = [
    ("bsp", True),
    ("asp", True),
    ("asp", False),
    ("aladdin-ahead", True),
    ("ar-sgd", True),
]
MORE_CASES: list[Case] = [
    (algorithm, wait_free)
    # With two ranks, each of their workers makes the same number of steps.
    for algorithm in (
        *USED_IN_BACKWARD,
        "adsp",
        "ar-sgd",
        "ashl",
        "async-diloco",
        "diloco",
        "local-sgd",
        "osgp",
        "sgp",
    )
    for wait_free in (True, False)
    if (algorithm, wait_free) not in CASES
]


def simulated(
    algorithm: str, make: Any, folder: Path, cluster: Cluster | None = None, **settings: Any
) -> Any:
    results = {}
    workers = 2 if ALGORITHMS[algorithm].lockstep else 1
    servers = 0 if not ALGORITHMS[algorithm].has_servers else 1

    def main(transport: Transport) -> None:
        results[transport.rank] = make(
            workers,
            transport=transport,
            algorithm=algorithm,
            run_dir=folder,
            compute_time=0.01,
            jitter=0,
            **settings,
        )

    VirtualCluster(servers + workers, cluster or Cluster(hosts=2), 0).run(main)
    return results[0]


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("algorithm", OF_ANY_OPTIMIZER)
def test_learning_rate_applies_to_the_step_it_is_set_for(tmp_path: Path, algorithm: str) -> None:
    rates, _ = simulated(algorithm, train, tmp_path / "run")
    expected = RATES
    if algorithm == "easgd":  # the model's share of a step depends on later exchanges
        expected = simulated(algorithm, train_by_scheduler, tmp_path / "reference")
    assert rates == pytest.approx(expected)


def test_bsp_ignores_learning_rate_of_worker_without_samples(tmp_path: Path) -> None:
    """It has not reached the line that sets the rate, and its message arrives last."""
    slow = Cluster(hosts=3, links={1: 1e-5})
    assert simulated("bsp", train_with_short_last_round, tmp_path, cluster=slow) == RATES


@pytest.mark.parametrize("algorithm", ["bsp", "ar-sgd", "asp"])
def test_learning_rate_of_scheduler_created_in_the_loop_is_used(
    tmp_path: Path, algorithm: str
) -> None:
    rates = simulated(algorithm, train_with_scheduler_made_in_loop, tmp_path)
    assert rates == pytest.approx(RATES)


@needs("openmpi")
@pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.long)])
def test_learning_rate_set_after_its_use_is_refused(tmp_path: Path, cases: list[Case]) -> None:
    words = json.dumps(cases)
    run_program(tmp_path, "rates_by_hand_cases", words, ranks=2, timeout=120)
    for algorithm, wait_free in cases:
        # The last rank is a worker.
        result = json.loads((tmp_path / f"{algorithm}-{wait_free}-1.json").read_text())
        is_late = wait_free and algorithm in USED_IN_BACKWARD
        expected = list(RATES)
        if is_late:
            expected[BETWEEN] = RATES[BETWEEN - 1]
        assert result == [pytest.approx(expected), is_late], (algorithm, wait_free)
