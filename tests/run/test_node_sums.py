"""--node-sums: a node as one worker with several devices."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS
from tests.commands import EPOCH, checkpoint_part, metrics, simulate, summary, train, training
from tests.launch import needs

ABLE = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.node_sums)
CLUSTER: list[Any] = ["--workers", 6, "--hosts", 3, "--jitter", 0.2, "--quiet"]
NODES = ["--node-sums"]


def run(folder: Path, *options: Any) -> dict[str, Any]:
    """In virtual time, three hosts with two workers each."""
    simulate(folder, *CLUSTER, *options)
    return summary(folder)


@pytest.mark.parametrize("algorithm", ABLE)
def test_a_node_is_a_worker(tmp_path: Path, algorithm: str) -> None:
    is_a_sum = algorithm in ("bsp", "ar-sgd")
    # A last round that is not full is dealt otherwise, so other samples are in it.
    samples = 960 if is_a_sum else 1000
    options = ["--algorithm", algorithm, "--samples", samples, "--eval-every", 0.25]
    alone = run(tmp_path / "alone", *options)
    found = run(tmp_path / "nodes", *options, *NODES)
    assert found["samples"] == alone["samples"] == samples
    assert found["gradients_computed"] == found["gradients_applied"]
    # A gradient of a node is that of both its workers.
    halved = alone["gradients_computed"] / found["gradients_computed"]
    assert halved == pytest.approx(2, abs=0.15)
    assert found["test_accuracy"] > 0.3
    # Workers that only compute for another one have no model of their own that could differ.
    if is_a_sum:
        assert {line["model_variance"] for line in metrics(tmp_path / "nodes", "eval")} == {0.0}
        assert found["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        assert found["test_accuracy"] == alone["test_accuracy"]


@pytest.mark.parametrize("options", [["--wire", "int8"], ["--compression", "dgc"], ["--clip", 2.0]])
def test_with_all_that_changes_gradients(tmp_path: Path, options: list[Any]) -> None:
    found = run(tmp_path, "--algorithm", "aladdin", "--epochs", 3, *options, *NODES)
    assert found["gradients_computed"] == found["gradients_applied"]
    assert found["samples"] == 3 * EPOCH
    assert found["test_accuracy"] > 0.5


@pytest.mark.parametrize(
    "algorithm",
    [
        "aladdin",
        pytest.param("ar-sgd", marks=pytest.mark.long),
        pytest.param("sgp", marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, algorithm: str) -> None:
    options = ["--algorithm", algorithm, *NODES, "--checkpoint-every", 700]
    options += ["--lr-schedule", "constant", "--warmup-epochs", 0]
    run(tmp_path / "whole", *options, "--samples", 1400)
    run(tmp_path / "half", *options, "--samples", 700)
    simulate(None, "--resume", tmp_path / "half", "--samples", 1400)
    for rank in (1, 5):  # they lead nobody, or are led
        models = [
            checkpoint_part(tmp_path / name, rank)["role"]["parameters"]
            for name in ("whole", "half")
        ]
        assert models[0].equal(models[1])
    assert summary(tmp_path / "whole") == summary(tmp_path / "half")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--node-size", 2], "--node-size: expected with --node-sums"),
        ([*NODES, "--algorithm", "easgd"], "expected an algorithm whose worker can be a node ("),
        ([*NODES, "--workers", 5], "expected as many workers on every node, got 1 and 2; start as"),
        ([*NODES, "--algorithm", "sgp", "--hosts", 1], "expected at least 2 nodes for"),
        ([*NODES, "--servers", 5], "expected at least 5 nodes for --algorithm aladdin-ahead with"),
        ([*NODES, "--max-loss", 9], "expected without --max-loss, which"),
        ([*NODES, "--algorithm", "ar-sgd", "--compression", "dgc"], "without --compression dgc"),
        ([*NODES, "--algorithm", "bsp", "--bsp-host-first"], "without --bsp-host-first"),
    ],
)
def test_what_does_not_go_with_it(tmp_path: Path, options: list[Any], words: str) -> None:
    done = simulate(tmp_path / "run", *CLUSTER, *options, check=False)
    assert done.returncode == 2 and done.stderr.count("error") == 1, done
    assert words in done.stderr


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks", "more"),
    [
        ("aladdin-ahead", 5, []),
        pytest.param("bsp", 5, [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, ["--ar-sgd-allreduce", "torch"], marks=pytest.mark.long),
    ],
)
def test_over_mpi(tmp_path: Path, algorithm: str, ranks: int, more: list[str]) -> None:
    """Two nodes of two on one host."""
    options = ["--algorithm", algorithm, *NODES, "--node-size", 2, "--epochs", 4, *more]
    train(ranks, tmp_path / "run", *options)
    found = summary(tmp_path / "run")
    assert found["samples"] == 4 * EPOCH
    assert found["gradients_computed"] == found["gradients_applied"] == 90
    assert found["test_accuracy"] > 0.85


@needs("openmpi")
def test_horovod_takes_all_ranks(tmp_path: Path) -> None:
    options = ["--algorithm", "ar-sgd", "--ar-sgd-allreduce", "horovod", *NODES, "--node-size", 1]
    done = train(2, tmp_path / "run", *options, check=False)
    assert "expected ring or torch with --node-sums" in done.stderr


@needs("openmpi")
@pytest.mark.slow
@pytest.mark.long
def test_a_death_ends_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--algorithm", "aladdin", *NODES, "--node-size", 2, "--epochs", 1000]
    options += ["--slowdown", "0=3", "--log-every", 320, "--checkpoint-every", 320]
    with training(5, folder, *options, mpirun=["--with-ft", "ulfm"]) as job:
        end = time.monotonic() + 60
        while not (folder / "checkpoint").exists() or len(metrics(folder)) < 6:
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.05)
        os.kill(job.pid(4), signal.SIGKILL)
        done = job.wait(150)  # Open MPI may take long to end what is left
    assert done.returncode != 0
    assert done.stderr.count("--node-sums needs every worker; resume with: --resume ") == 1, done
    assert "Traceback" not in done.stderr, done
