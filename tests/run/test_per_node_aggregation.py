"""Per-node aggregation: a node counts as one worker with several devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS
from tests.commands import (
    EPOCH,
    checkpoint_part,
    metrics,
    refusal,
    simulate,
    summary,
    train,
    training,
)
from tests.launch import needs
from tests.messages import check_names
from tests.run.jobs import ULFM, checkpoints, kill_ranks, wait_until

ABLE = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.node_sums)
CLUSTER: list[Any] = ["--workers", 6, "--hosts", 3, "--jitter", 0.2, "--quiet"]
NODES = ["--node-sums"]


def run(folder: Path, *options: Any) -> dict[str, Any]:
    """Simulate three hosts with two workers each."""
    simulate(folder, *CLUSTER, *options)
    return summary(folder)


@pytest.mark.parametrize("algorithm", ABLE)
def test_per_node_aggregation_treats_node_as_one_worker(tmp_path: Path, algorithm: str) -> None:
    is_a_sum = algorithm in ("bsp", "ar-sgd")
    # An incomplete last round is distributed differently and has other samples.
    samples = 960 if is_a_sum else 1000
    options = ["--algorithm", algorithm, "--samples", samples, "--eval-every", 0.25]
    alone = run(tmp_path / "alone", *options)
    nodes = run(tmp_path / "nodes", *options, *NODES)
    assert nodes["samples"] == alone["samples"] == samples
    assert nodes["gradients_computed"] == nodes["gradients_applied"]
    # A node's gradient combines those of both its workers.
    halved = alone["gradients_computed"] / nodes["gradients_computed"]
    assert halved == pytest.approx(2, abs=0.15)
    assert nodes["test_accuracy"] > 0.3
    # Workers that only compute for another worker have no separate model.
    if is_a_sum:
        assert {line["model_variance"] for line in metrics(tmp_path / "nodes", "eval")} == {0.0}
        assert nodes["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        assert nodes["test_accuracy"] == alone["test_accuracy"]


@pytest.mark.parametrize("options", [["--wire", "int8"], ["--compression", "dgc"], ["--clip", 2.0]])
def test_per_node_aggregation_works_with_quantisation_compression_and_clipping(
    tmp_path: Path, options: list[Any]
) -> None:
    figures = run(tmp_path, "--algorithm", "aladdin", "--epochs", 3, *options, *NODES)
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["samples"] == 3 * EPOCH
    assert figures["test_accuracy"] > 0.5


@pytest.mark.parametrize(
    "algorithm",
    [
        "aladdin",
        pytest.param("ar-sgd", marks=pytest.mark.long),
        pytest.param("sgp", marks=pytest.mark.long),
    ],
)
def test_resumed_run_with_per_node_aggregation_equals_the_uninterrupted_one(
    tmp_path: Path, algorithm: str
) -> None:
    options = ["--algorithm", algorithm, *NODES, "--checkpoint-every", 700]
    options += ["--lr-schedule", "constant", "--warmup-epochs", 0]
    run(tmp_path / "whole", *options, "--samples", 1400)
    run(tmp_path / "half", *options, "--samples", 700)
    simulate(None, "--resume", tmp_path / "half", "--samples", 1400)
    for rank in (1, 5):  # a rank that leads no other, and one that is led
        models = [
            checkpoint_part(tmp_path / name, rank)["role"]["parameters"]
            for name in ("whole", "half")
        ]
        assert models[0].equal(models[1])
    assert summary(tmp_path / "whole") == summary(tmp_path / "half")


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--node-size", 2], ["--node-size", "--node-sums"]),
        ([*NODES, "--algorithm", "easgd"], ["--node-sums", "easgd"]),
        ([*NODES, "--workers", 5], ["--node-sums", "1 and 2", "--node-size"]),
        (
            [*NODES, "--algorithm", "sgp", "--hosts", 1],
            ["--node-sums", "2 nodes", "--algorithm sgp"],
        ),
        (
            [*NODES, "--servers", 5],
            ["--node-sums", "5 nodes", "--algorithm aladdin-ahead", "5 servers"],
        ),
        ([*NODES, "--max-loss", 9], ["--node-sums", "--max-loss"]),
        (
            [*NODES, "--algorithm", "ar-sgd", "--compression", "dgc"],
            ["--node-sums", "--compression dgc"],
        ),
        ([*NODES, "--algorithm", "bsp", "--bsp-host-first"], ["--node-sums", "--bsp-host-first"]),
    ],
)
def test_per_node_aggregation_refuses_incompatible_options(
    tmp_path: Path, options: list[Any], names: list[str]
) -> None:
    completed = simulate(tmp_path / "run", *CLUSTER, *options, check=False)
    assert completed.returncode == 2 and completed.stderr.count("error") == 1, completed
    check_names(completed.stderr, *names)


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks", "more"),
    [
        ("aladdin-ahead", 5, []),
        pytest.param("bsp", 5, [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, ["--ar-sgd-allreduce", "torch"], marks=pytest.mark.long),
    ],
)
def test_per_node_aggregation_over_mpi(
    tmp_path: Path, algorithm: str, ranks: int, more: list[str]
) -> None:
    """Two nodes of two on one host."""
    options = ["--algorithm", algorithm, *NODES, "--node-size", 2, "--epochs", 4, *more]
    train(ranks, tmp_path / "run", *options)
    figures = summary(tmp_path / "run")
    assert figures["samples"] == 4 * EPOCH
    assert figures["gradients_computed"] == figures["gradients_applied"] == 90
    assert figures["test_accuracy"] > 0.85


@needs("openmpi")
def test_per_node_aggregation_refuses_horovod(tmp_path: Path) -> None:
    options = ["--algorithm", "ar-sgd", "--ar-sgd-allreduce", "horovod", *NODES, "--node-size", 1]
    completed = train(2, tmp_path / "run", *options, check=False)
    check_names(refusal(completed), "all-reduce:", "ring or torch", "--node-sums", "horovod")


@needs("openmpi")
@pytest.mark.slow
@pytest.mark.long
def test_per_node_aggregation_run_ends_when_worker_fails(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--algorithm", "aladdin", *NODES, "--node-size", 2, "--epochs", 1000]
    options += ["--slowdown", "0=3", "--log-every", 320, "--checkpoint-every", 320]
    with training(5, folder, *options, mpirun=ULFM) as job:
        wait_until(job, lambda: checkpoints(folder) and len(metrics(folder)) >= 6)
        kill_ranks(job, [4])
        completed = job.wait(150)  # Open MPI may take long to end the remaining ranks
    assert completed.returncode != 0
    check_names(refusal(completed), "rank 4 (host ", "--node-sums", f"--resume {folder}")
