"""Requirements on every algorithm: training, resuming, timed computing, any number of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from tests.commands import checkpoint_part, metrics, summary, train
from tests.failing import Failure, Net

NAMES = sorted(ALGORITHMS)
COMPRESSING = sorted(name for name in NAMES if find_algorithm(name).compresses)
# One algorithm of each kind; tests/mpi covers all of them over MPI.
EVERYDAY = ("ar-sgd", "bsp")
OVER_MPI = ["ad-psgd", "adsp", "ar-sgd", "bsp"]
GOSSIPS = ("sgp", "osgp", "gosgd", "ad-psgd")
DGC = ["--compression", "dgc", "--dgc-ratio", 0.05, "--dgc-warmup-epochs", 1]
VARIANTS: dict[str, list[object]] = {
    # Gossip algorithms are resumed in tests/gossip/test_gossip_runs.py.
    **{name: ["--algorithm", name] for name in NAMES if name not in GOSSIPS},
    **{f"{name} dgc": ["--algorithm", name, *DGC] for name in ("aladdin", "ar-sgd", "bsp")},
    "ssp on-bound": ["--algorithm", "ssp", "--ssp-pull", "on-bound"],
    "aladdin int8": ["--algorithm", "aladdin", "--wire", "int8", "--servers", 2],
    "easgd int4": ["--algorithm", "easgd", "--wire", "int4"],
    "ashl int8": ["--algorithm", "ashl", "--wire", "int8", "--ashl-coarse-rate", 0.1],
    "adsp int4": ["--algorithm", "adsp", "--wire", "int4"],
    "async-diloco grace": [
        *("--algorithm", "async-diloco", "--async-diloco-steps", 3, "--async-diloco-grace", 0.02),
        *("--async-diloco-spread", 0.5, "--async-diloco-weights", "samples-per-step"),
    ],
    "async-diloco int4": [
        *("--algorithm", "async-diloco", "--async-diloco-steps", 3, "--wire", "int4")
    ],
    "ar-sgd int4": ["--algorithm", "ar-sgd", "--wire", "int4"],
    "ar-sgd powersgd": ["--algorithm", "ar-sgd", "--compression", "powersgd"],
    "local-sgd int2": ["--algorithm", "local-sgd", "--wire", "int2"],
    "diloco powersgd": [
        *("--algorithm", "diloco", "--compression", "powersgd", "--powersgd-rank", 1),
        *("--diloco-steps", 4, "--diloco-fragments", 2, "--diloco-overlap", 1),
    ],
    "asp server": ["--algorithm", "asp", "--asp-momentum", "server"],
    "bsp host-first": ["--algorithm", "bsp", "--bsp-host-first"],
    "asp by layers": ["--algorithm", "asp", "--sharding", "layer", "--servers", 2],
    "aladdin late": ["--algorithm", "aladdin", "--no-wait-free", "--servers", 2],
}
each = pytest.mark.parametrize("variant", VARIANTS.values(), ids=list(VARIANTS))


def start(*words: object) -> dict[str, Any]:
    return simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))


@pytest.mark.sample(4)
@each
def test_resumed_run_of_every_algorithm_is_bit_identical(
    tmp_path: Path, variant: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ["--model", "tests.failing:build", "--workers", 5, "--hosts", 2, "--epochs", 2]
    plan += ["--seed", 5, "--jitter", 0.3, "--slowdown", "1=2", "--delay-us", 500, "--quiet"]
    plan += ["--log-every", 300, "--eval-every", 1, "--checkpoint-every", 700, "--shard-mb", 0.01]
    whole, failed = tmp_path / "whole", tmp_path / "failed"
    start(*plan, *variant, "--run-dir", whole)
    monkeypatch.setattr(Net, "steps", 0)
    monkeypatch.setattr(Net, "last", 75)  # of 90
    with pytest.raises(Failure):
        start(*plan, *variant, "--run-dir", failed)
    assert checkpoint_part(failed, 0)["drawn"] > 0
    start("--resume", failed)
    for name in ("metrics.jsonl", "model.pt", "summary.json"):
        assert (whole / name).read_bytes() == (failed / name).read_bytes(), name


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", NAMES)
def test_algorithm_runs_with_any_number_of_workers_from_least(tmp_path: Path, name: str) -> None:
    """Odd numbers too, from the minimum on; fewer workers are refused with the minimum."""
    least = find_algorithm(name).least_workers
    plan = ["--compute", "timed", "--model", "size:0.02", "--samples", 300, "--batch-size", 8]
    plan += ["--algorithm", name, "--hosts", 3, "--slowdown", "0=4", "--jitter", 0.2, "--quiet"]
    for workers in [least, 3, 5, 8]:
        completed = start(
            *plan, "--workers", workers, "--run-dir", tmp_path / f"{workers}", "--overwrite"
        )
        assert completed["samples"] == 300
        assert completed["gradients_applied"] == completed["gradients_computed"] > 0
    if least > 1:
        with pytest.raises(UserError, match=f"--workers {least}"):
            start(*plan, "--workers", least - 1, "--run-dir", tmp_path / "few")


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",  # tests/mpi/test_algorithms.py runs every algorithm over MPI
    [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.long) for name in OVER_MPI],
)
def test_algorithm_trains_over_mpi(tmp_path: Path, name: str) -> None:
    plan = ["--algorithm", name, "--epochs", 2, "--lr-scaling", "none", "--lr", 0.05]
    train(3, tmp_path / "run", *plan)
    end = summary(tmp_path / "run")
    assert end["samples"] == 2 * 1437
    assert end["gradients_applied"] == end["gradients_computed"]
    assert end["test_accuracy"] > 0.75
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["easgd"], r"\beasgd\b"),
        (["asp", "--asp-momentum", "server"], "--asp-momentum server"),
        (["aladdin", "--aladdin-momentum", "split"], "--aladdin-momentum split"),
        (["bsp", "--bsp-host-first"], "--bsp-host-first"),
    ],
)
def test_compression_rejects_unsuitable_algorithm_or_option(
    tmp_path: Path, words: list[str], cause: str
) -> None:
    with pytest.raises(UserError, match=f"--compression dgc .*{cause}"):
        start("--compression", "dgc", "--algorithm", *words, "--run-dir", tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["sgp"], r"\(adsp, aladdin, .*\bsgp\b.*--wire bf16"),
        (["gosgd"], r"\bgosgd\b"),
        (["multistep"], r"\bmultistep\b"),
        (["bsp", "--bsp-host-first"], "--bsp-host-first"),
        (["asp", "--compression", "dgc"], "--compression dgc"),
    ],
)
def test_quantised_wire_rejects_unsuitable_algorithm_or_option(
    tmp_path: Path, words: list[str], cause: str
) -> None:
    with pytest.raises(UserError, match=f"--wire int8 .*{cause}"):
        start("--wire", "int8", "--algorithm", *words, "--run-dir", tmp_path / "run")


def test_aladdin_lookahead_requires_momentum(tmp_path: Path) -> None:
    words = ["--algorithm", "aladdin", "--aladdin-lookahead", 0.5, "--momentum", 0]
    with pytest.raises(UserError, match=r"--aladdin-lookahead requires a momentum"):
        start(*words, "--run-dir", tmp_path / "run")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", COMPRESSING)
def test_compression_sends_fewer_bytes(tmp_path: Path, name: str) -> None:
    sent = {}
    for how in ("none", "dgc"):
        plan = ["--algorithm", name, "--workers", 3, "--samples", 960, "--quiet"]
        plan += ["--compression", how, "--dgc-ratio", 0.01, "--dgc-warmup-epochs", 0]
        sent[how] = start(*plan, "--run-dir", tmp_path / how)["bytes_sent_per_step"]
    assert sent["dgc"] < 0.25 * sent["none"]
