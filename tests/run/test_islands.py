"""Islands: several ranks that are one worker of the algorithm."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.session.islands import Islands
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
from tests.run.jobs import ULFM, kill_ranks, samples_so_far, wait_until
from tests.run.program_runs import PROGRAMS

ABLE = sorted(name for name, algorithm in ALGORITHMS.items() if algorithm.islands)
CLUSTER: list[Any] = ["--workers", 6, "--hosts", 3, "--jitter", 0.2, "--quiet"]
ISLANDS = ["--island", 2]
"""The two workers of a host."""
SERVED = [name for name in ABLE if ALGORITHMS[name].has_servers]
OFTEN = ("aladdin-ahead", "ar-sgd", "bsp", "sgp")
"""One algorithm of each kind."""


def often(*values: Any, usual: bool) -> Any:
    """Return a parameter that `make test` has only if it is ``usual``."""
    return pytest.param(*values, marks=() if usual else pytest.mark.long)


def kinds(names: list[str]) -> list[Any]:
    """Return all ``names``, of which one of each kind is usual."""
    return [often(name, usual=name in OFTEN) for name in names]


def run(folder: Path, *options: Any) -> dict[str, Any]:
    """Simulate three hosts with two workers each."""
    simulate(folder, *CLUSTER, *options)
    return summary(folder)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "servers"),
    [
        *(often(name, 1, usual=name in OFTEN) for name in ABLE),
        *(often(name, 2, usual=name == "aladdin-ahead") for name in SERVED),
    ],
)
def test_island_is_one_worker(tmp_path: Path, algorithm: str, servers: int) -> None:
    """With one server, or none, the members own no lane of their own, or all of them."""
    is_a_sum = algorithm in ("bsp", "ar-sgd")
    # An incomplete last round is distributed differently and has other samples.
    samples = 960 if is_a_sum else 1000
    options = ["--algorithm", algorithm, "--samples", samples, "--eval-every", 0.25]
    options += ["--servers", servers]
    alone = run(tmp_path / "alone", *options)
    nodes = run(tmp_path / "nodes", *options, *ISLANDS)
    assert nodes["samples"] == alone["samples"] == samples
    assert nodes["gradients_computed"] == nodes["gradients_applied"]
    # An island's gradient combines those of both its members.
    halved = alone["gradients_computed"] / nodes["gradients_computed"]
    assert halved == pytest.approx(2, abs=0.15)
    assert nodes["test_accuracy"] > 0.3
    # The members of an island have one model.
    if is_a_sum:
        assert {line["model_variance"] for line in metrics(tmp_path / "nodes", "eval")} == {0.0}
        assert nodes["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-4)
        assert nodes["test_accuracy"] == alone["test_accuracy"]


WORKERS: list[Any] = ["--workers", 3, "--batch-size", 16, "--slowdown", "0=1.7321", "1=1.2361"]
PAIRS: list[Any] = ["--workers", 6, "--batch-size", 8, "--slowdown", "0=1.7321", "2=1.2361"]
"""The same as islands of two, of which the first member determines the speed."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("aladdin-ahead", ["--wire", "fp32", "--aladdin-ahead-sync-rounds", 0]),
        # In synchronous rounds, the order in which workers draw samples, and so their rates, is
        # determined by ties.
        ("aladdin-ahead", ["--wire", "fp32", "--lr-schedule", "constant"]),
        ("aladdin", []),
        pytest.param("async-diloco", ["--wire", "fp32"], marks=pytest.mark.long),
        ("easgd", []),
        pytest.param("sgp", [], marks=pytest.mark.long),
        ("diloco", ["--clip", 1.0, "--diloco-steps", 4]),
    ],
)
def test_islands_equal_workers_with_larger_batches(
    tmp_path: Path, algorithm: str, options: list[Any]
) -> None:
    """To rounding, with workers of three speeds and asynchronous algorithms."""
    common = ["--algorithm", algorithm, *options, "--hosts", 3, "--quiet", "--samples", 960]
    common += ["--dataset", "equal_samples:data", "--model", "equal_samples:model"]
    common += ["--lr-scaling", "none", "--lr", 0.01, "--eval-every", 0]
    common += ["--local-latency-us", 0, "--local-bandwidth-gbit", 1e5]
    islands = [*PAIRS, *ISLANDS, "--servers", 2 if ALGORITHMS[algorithm].has_servers else 1]
    models = []
    for name, ranks in (("workers", WORKERS), ("islands", islands)):
        simulate(tmp_path / name, *common, *ranks, modules=PROGRAMS)
        state = torch.load(tmp_path / name / "model.pt")
        models.append(torch.cat([each.flatten() for each in state.values()]))
    assert (models[0] - models[1]).norm() < 1e-6 * models[0].norm()
    assert summary(tmp_path / "islands")["test_loss"] < 1.0  # it was 2.3 before


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["ar-sgd", "local-sgd", "sgp", "bsp", "diloco"])
def test_islands_equal_such_workers_after_a_failure(tmp_path: Path, algorithm: str) -> None:
    """Workers with samples in a round have the same weights as before."""
    common = ["--algorithm", algorithm, "--hosts", 4, "--quiet", "--samples", 1920]
    common += ["--dataset", "equal_samples:data", "--model", "equal_samples:model"]
    common += ["--lr-scaling", "none", "--lr", 0.01, "--eval-every", 0]
    common += ["--local-latency-us", 0, "--local-bandwidth-gbit", 1e5, "--clip", 0.5]
    first = 1 if algorithm in SERVED else 0
    servers = ["--servers", 2 * first or 1]
    workers = ["--workers", 4, "--batch-size", 16, "--failures", f"{first + 2}=1.3"]
    islands = ["--workers", 8, "--batch-size", 8, *ISLANDS, *servers]
    islands += ["--failures", f"{2 * first + 5}=1.3"]
    models = []
    for name, ranks in (("workers", workers), ("islands", islands)):
        simulate(tmp_path / name, *common, *ranks, modules=PROGRAMS)
        state = torch.load(tmp_path / name / "model.pt")
        models.append(torch.cat([each.flatten() for each in state.values()]))
        figures = summary(tmp_path / name)
        assert 0 < figures["samples_lost"] <= 128 and figures["test_loss"] < 1.5
    assert (models[0] - models[1]).norm() < 1e-5 * models[0].norm()


def test_grants_are_divided_among_the_members() -> None:
    islands = Islands(1, [[1, 3], [2, 4]], 2)
    assert islands.divided([0, 9, 4, 0, 0]) == [0, 5, 2, 4, 2]


def values_in(state: Any) -> int:
    """Return the number of values of all vectors in a role's state."""
    if isinstance(state, torch.Tensor):
        return state.numel() if state.numel() > 64 else 0
    each = state.values() if isinstance(state, dict) else state if isinstance(state, list) else []
    return sum(map(values_in, each))


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", ["aladdin-ahead", "ar-sgd", "easgd", "diloco"])
def test_vectors_exist_once_per_island(tmp_path: Path, algorithm: str) -> None:
    """The model, momentum, and whatever else the algorithm keeps, at workers and servers."""
    options = ["--algorithm", algorithm, "--samples", 640, "--checkpoint-every", 320, "--quiet"]
    servers = 2 if ALGORITHMS[algorithm].has_servers else 0
    totals = []
    for workers, more in ((2, []), (4, ISLANDS)):
        run_dir = tmp_path / str(workers)
        simulate(run_dir, *options, "--workers", workers, *more, "--hosts", 2, "--servers", 2)
        roles = [checkpoint_part(run_dir, rank)["role"] for rank in range(servers + workers)]
        for role in roles:  # each lane pads its messages to whole blocks
            role.get("outbox", {}).pop("former", None)
        held = [values_in(role) for role in roles]
        totals.append((sum(held[:servers]), sum(held[servers:])))
    assert totals[0] == totals[1]
    model = summary(tmp_path / "4")["parameters"]
    assert totals[0][1] >= 2 * 2 * model  # at least parameters and momentum of two workers


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [["--wire", "int8"], ["--compression", "dgc"], ["--clip", 2.0]])
def test_islands_work_with_quantisation_compression_and_clipping(
    tmp_path: Path, options: list[Any]
) -> None:
    figures = run(tmp_path, "--algorithm", "aladdin", "--epochs", 3, *options, *ISLANDS)
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["samples"] == 3 * EPOCH
    assert figures["test_accuracy"] > 0.5


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    [
        "aladdin",
        pytest.param("ar-sgd", marks=pytest.mark.long),
        pytest.param("sgp", marks=pytest.mark.long),
    ],
)
def test_resumed_run_with_islands_equals_the_uninterrupted_one(
    tmp_path: Path, algorithm: str
) -> None:
    options = ["--algorithm", algorithm, "--servers", 2, *ISLANDS, "--checkpoint-every", 700]
    options += ["--lr-schedule", "constant", "--warmup-epochs", 0]
    run(tmp_path / "whole", *options, "--samples", 1400)
    run(tmp_path / "half", *options, "--samples", 700)
    simulate(None, "--resume", tmp_path / "half", "--samples", 1400)
    for rank in (3, 5):
        models = [
            checkpoint_part(tmp_path / name, rank)["role"]["parameters"]
            for name in ("whole", "half")
        ]
        assert models[0].equal(models[1])
    assert summary(tmp_path / "whole") == summary(tmp_path / "half")


USUAL = {("sgp", 2), ("ar-sgd", 4), ("aladdin-ahead", 4), ("aladdin-ahead", 8)}
CHANGES = [
    often(name, workers, usual=(name, workers) in USUAL) for name in ABLE for workers in (2, 4, 8)
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("algorithm", "workers"), CHANGES)
def test_number_of_islands_changes(tmp_path: Path, algorithm: str, workers: int) -> None:
    """Each lane is merged by itself; nothing is lost, and the model is the same at first."""
    options = ["--algorithm", algorithm, *ISLANDS, "--servers", 2, "--quiet", "--eval-every", 0]
    options += ["--hosts", 3, "--workers", 6, "--wire", "fp32", "--samples", 480]
    options += ["--lr-scaling", "none"]
    simulate(tmp_path, *options)
    before = summary(tmp_path)
    models = [torch.load(tmp_path / "model.pt")]
    more = ["--resume", tmp_path, "--allow-resize", "--workers", workers, "--hosts", workers // 2]
    if workers < 2 * ALGORITHMS[algorithm].least_workers:
        completed = simulate(None, *more, "--samples", 480, check=False)
        check_names(refusal(completed), "--island", "at least 2 islands")
        return
    simulate(None, *more, "--samples", 480)
    models.append(torch.load(tmp_path / "model.pt"))
    if algorithm != "aladdin":  # it applies the rest of its sums at the end, divided by n
        assert all(torch.allclose(models[0][n], each, atol=1e-6) for n, each in models[1].items())
    simulate(None, *more, "--samples", 960)
    after = summary(tmp_path)
    assert after["samples"] == 960 and after["workers"] == workers
    assert after["gradients_computed"] == after["gradients_applied"] > before["gradients_computed"]
    assert after["test_loss"] < 2.3  # chance


def of_size(island: int, workers: int, servers: int) -> list[Any]:
    """Return the options of a cluster whose islands are its hosts."""
    sizes = ["--island", island, "--workers", workers, "--hosts", workers // island]
    return [*sizes, "--servers", servers]


SINGLE = ["--island", 1, "--workers", 4, "--hosts", 2, "--servers"]
SIZES = {
    "to single": (of_size(2, 4, 2), [*SINGLE, 2]),
    "from single": ([*SINGLE, 2], of_size(2, 4, 2)),
    "larger": (of_size(2, 8, 2), of_size(4, 8, 2)),
    "smaller": (of_size(4, 8, 4), of_size(2, 8, 2)),
    "members without a lane": (of_size(4, 8, 1), of_size(4, 12, 1)),
    "other servers": (of_size(4, 8, 1), of_size(4, 8, 4)),
}
USUAL_SIZES = {
    ("aladdin-ahead", "to single"),
    ("aladdin-ahead", "members without a lane"),
    ("ar-sgd", "larger"),
    ("sgp", "smaller"),
}
SIZE_CHANGES = [
    often(name, size, usual=(name, size) in USUAL_SIZES) for name in ABLE for size in SIZES
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("algorithm", "change"), SIZE_CHANGES)
def test_size_of_islands_changes(tmp_path: Path, algorithm: str, change: str) -> None:
    """Nothing is lost, and the model is the same at first."""
    former, now = SIZES[change]
    options = ["--algorithm", algorithm, *former, "--quiet", "--eval-every", 0, "--wire", "fp32"]
    simulate(tmp_path, *options, "--samples", 480, "--lr-scaling", "none")
    before = summary(tmp_path)
    models = [torch.load(tmp_path / "model.pt")]
    more = ["--resume", tmp_path, "--allow-resize", *now]
    simulate(None, *more, "--samples", 480)
    models.append(torch.load(tmp_path / "model.pt"))
    if algorithm != "aladdin":  # it applies the rest of its sums at the end, divided by n
        assert all(torch.allclose(models[0][n], each, atol=1e-6) for n, each in models[1].items())
    samples = 2400 if algorithm == "aladdin" else 960  # its first models are worse
    simulate(None, *more, "--samples", samples)
    after = summary(tmp_path)
    assert after["samples"] == samples and after["workers"] == now[now.index("--workers") + 1]
    assert after["gradients_computed"] == after["gradients_applied"] > before["gradients_computed"]
    assert after["test_loss"] < 2.3  # chance


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "change"),
    [
        often(name, change, usual=(name, change) in {("ar-sgd", "smaller"), ("bsp", "to single")})
        for name in ("ar-sgd", "bsp")
        for change in ("to single", "larger", "smaller")
    ],
)
def test_other_islands_continue_with_the_momentum(
    tmp_path: Path, algorithm: str, change: str
) -> None:
    """Models equal those of single workers, whose number of servers changes instead."""
    former, now = SIZES[change]
    workers = former[former.index("--workers") + 1]
    single = ["--workers", workers, "--hosts", 2, "--servers"]
    for folder, name, first, then in (
        (tmp_path / "single", "bsp", [*single, 2], [*single, 1]),
        (tmp_path / "islands", algorithm, former, now),
    ):
        options = ["--algorithm", name, *first, "--quiet", "--eval-every", 0, "--wire", "fp32"]
        simulate(folder, *options, "--samples", 480)
        simulate(None, "--resume", folder, "--allow-resize", *then, "--samples", 960)
    models = [torch.load(tmp_path / each / "model.pt") for each in ("single", "islands")]
    assert all(torch.allclose(models[0][n], each, atol=1e-5) for n, each in models[1].items())


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--node-size", 2], ["--node-size", "--node-sums"]),
        ([*ISLANDS, "--node-sums"], ["--island", "--node-sums", "--island node"]),
        ([*ISLANDS, "--algorithm", "gosgd"], ["--island", "gosgd", "ar-sgd"]),
        (["--island", "node", "--workers", 5], ["--island", "1 and 2"]),
        (["--node-sums", "--workers", 5], ["--node-sums", "1 and 2", "--node-size"]),
        (["--island", 3], ["--island", "3 workers", "got 2"]),
        (
            ["--island", "node", "--algorithm", "sgp", "--hosts", 1],
            ["--island", "2 islands", "--algorithm sgp"],
        ),
        (
            [*ISLANDS, "--servers", 5],
            ["--island", "5 islands", "--algorithm aladdin-ahead", "5 servers"],
        ),
        ([*ISLANDS, "--max-loss", 9], ["--island", "--max-loss"]),
        (
            [*ISLANDS, "--algorithm", "ar-sgd", "--compression", "dgc"],
            ["--island", "--compression dgc"],
        ),
        (
            [*ISLANDS, "--algorithm", "aladdin", "--servers", 2, "--compression", "dgc"],
            ["--island", "--compression dgc", "2 parts"],
        ),
        (
            [*ISLANDS, "--algorithm", "ar-sgd", "--bucket-mb", 4e-6],
            ["--island", "--bucket-mb"],
        ),
        ([*ISLANDS, "--algorithm", "bsp", "--bsp-host-first"], ["--island", "--bsp-host-first"]),
    ],
)
def test_islands_refuse_incompatible_options(
    tmp_path: Path, options: list[Any], names: list[str]
) -> None:
    completed = simulate(tmp_path / "run", *CLUSTER, *options, check=False)
    assert completed.returncode == 2 and completed.stderr.count("error") == 1, completed
    check_names(completed.stderr, *names)


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks", "more"),
    [
        ("aladdin-ahead", 6, ["--servers", 2]),
        pytest.param("aladdin-ahead", 5, [], marks=pytest.mark.long),
        pytest.param("bsp", 5, [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, ["--ar-sgd-allreduce", "torch"], marks=pytest.mark.long),
    ],
)
def test_islands_over_mpi(tmp_path: Path, algorithm: str, ranks: int, more: list[str]) -> None:
    """Two islands of two on one host."""
    options = ["--algorithm", algorithm, *ISLANDS, "--epochs", 4, *more]
    train(ranks, tmp_path / "run", *options)
    figures = summary(tmp_path / "run")
    assert figures["samples"] == 4 * EPOCH
    assert figures["gradients_computed"] == figures["gradients_applied"] == 90
    assert figures["test_accuracy"] > 0.85


@needs("openmpi")
def test_islands_refuse_horovod(tmp_path: Path) -> None:
    options = ["--algorithm", "ar-sgd", "--ar-sgd-allreduce", "horovod", *ISLANDS]
    completed = train(2, tmp_path / "run", *options, check=False)
    check_names(refusal(completed), "all-reduce:", "ring or torch", "--island", "horovod")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kind", "algorithm", "servers", "samples"),
    [
        ("clip", "bsp", 1, 96),  # a member without a lane
        ("clip", "ar-sgd", 1, 99),  # members without samples in the last round
        pytest.param("clip", "sgp", 1, 99, marks=pytest.mark.long),
        ("break", "ar-sgd", 1, 480),
        pytest.param("break", "aladdin", 2, 480, marks=pytest.mark.long),
        ("project", "bsp", 1, 96),
        ("epochs", "ar-sgd", 1, 97),  # only one member has a sample in the second epoch
        ("epochs", "aladdin-ahead", 2, 97),
        ("epochs", "ar-sgd", 1, 288),
    ],
)
def test_loop_of_a_script_trains_on_islands(
    tmp_path: Path, kind: str, algorithm: str, servers: int, samples: int
) -> None:
    options = ["--workers", 6, "--hosts", 3, *ISLANDS, "--servers", servers]
    script = PROGRAMS / "island_loop.py"
    options = [script, "--run-dir", tmp_path / "run", *options, "--", kind, algorithm, samples]
    completed = simulate(None, *options)
    lines = completed.stdout.splitlines()
    drawn, computed, applied, largest = next(line for line in lines if "rank" not in line).split()
    assert computed == applied and float(largest) < (0.11 if kind == "project" else 1)
    assert int(drawn) < samples if kind == "break" else int(drawn) == samples
    if kind == "epochs":
        of_workers = [line for line in lines if not line.endswith(": 0 True")]
        assert len(of_workers) == 6 + 1 and sum(": 6 " in line for line in of_workers) == 6
        # Where models are equal, every worker has the trained one after the last epoch.
        assert algorithm != "ar-sgd" or "False" not in completed.stdout


FAILED = ["--failures", "4=1.3", "--eval-every", 0.25, "--checkpoint-every", 960]
"""A member of the island (1, 4), or (4, 7) with two servers, in the fifth round or so."""


@pytest.mark.sample(1)
@pytest.mark.parametrize("algorithm", kinds(ABLE))
def test_failed_rank_ends_its_island_only(tmp_path: Path, algorithm: str) -> None:
    """The others train to the end, and a resumed run has all islands again."""
    servers = 2 if algorithm in SERVED else 0
    options = ["--algorithm", algorithm, "--servers", 2, *ISLANDS]
    figures = run(tmp_path, *options, "--samples", 1920, *FAILED)
    failures = {failure["rank"]: failure for failure in figures["failures"]}
    mate = 7 if servers else 1
    assert failures.keys() == {4, mate}
    assert (failures[4]["what"], failures[mate]["what"]) == ("died", "left out")
    lost = sum(failure["samples_lost"] for failure in failures.values())
    assert lost == figures["samples_lost"] > 0
    assert figures["gradients_computed"] == figures["gradients_applied"] <= 30
    assert figures["test_accuracy"] > 0.5
    simulate(None, "--resume", tmp_path, "--samples", 3840)
    resumed = summary(tmp_path)
    assert len(resumed["failures"]) == 2
    assert resumed["gradients_computed"] == figures["gradients_computed"] + 30
    if algorithm in ("ar-sgd", "bsp"):  # the island that is back has the same model
        assert {line["model_variance"] for line in metrics(tmp_path, "eval")} == {0.0}


def check_continued(figures: dict[str, Any], failed: set[int], samples: int = 1920) -> None:
    """Check that a run completed with exact accounts after ranks failed."""
    assert {failure["rank"] for failure in figures["failures"]} == failed
    lost = sum(failure["samples_lost"] for failure in figures["failures"])
    assert lost == figures["samples_lost"]
    dropped = figures.get("gradients_lost", 0)
    assert figures["gradients_computed"] == figures["gradients_applied"] + dropped
    assert figures["samples"] == samples


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("algorithm", kinds([name for name in ABLE if name not in SERVED]))
def test_run_continues_without_the_island_of_rank_0(
    tmp_path: Path, algorithm: str, rank: int
) -> None:
    options = ["--algorithm", algorithm, *ISLANDS, "--samples", 1920, "--checkpoint-every", 960]
    figures = run(tmp_path, *options, "--failures", f"{rank}=1.3")
    check_continued(figures, {0, 3})
    whats = {failure["rank"]: failure["what"] for failure in figures["failures"]}
    assert whats == {rank: "died", 3 - rank: "left out"}
    assert figures["workers"] == 4 and figures["test_accuracy"] > 0.5
    assert checkpoint_part(tmp_path, 3) is not None
    simulate(None, "--resume", tmp_path, "--samples", 2560)
    assert summary(tmp_path)["gradients_computed"] > figures["gradients_computed"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("algorithm", kinds(SERVED))
def test_islands_continue_without_a_server(tmp_path: Path, algorithm: str, rank: int) -> None:
    """The other server then has both lanes."""
    options = ["--algorithm", algorithm, *ISLANDS, "--servers", 2, "--samples", 1920]
    figures = run(tmp_path, *options, "--failures", f"{rank}=1.3")
    check_continued(figures, {rank})
    assert (figures["workers"], figures["servers"]) == (6, 1)
    assert figures["test_loss"] < 2.3  # chance


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["aladdin", "async-diloco"])
def test_losses_do_not_depend_on_the_lane_of_the_failed_server(
    tmp_path: Path, algorithm: str
) -> None:
    """A spare rank replaces it, so each lane keeps its values."""
    options = ["--algorithm", algorithm, *ISLANDS, "--servers", 2, "--spares", 1]
    lost = []
    for rank in (0, 1):
        folder = tmp_path / str(rank)
        figures = run(folder, *options, "--samples", 640, "--failures", f"{rank}=1.3")
        check_continued(figures, {rank}, 640)
        lost.append(figures["gradients_lost"])
    assert lost[0] > 0 and lost[1] > 0


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        ["ar-sgd", "--workers", 3, "--samples", 192, "--failures", "0=1.16"],
        ["local-sgd", *CLUSTER, *ISLANDS, "--samples", 320, "--seed", 25, "--failures", "0=1.184"],
        ["aladdin", *CLUSTER, *ISLANDS, "--samples", 640, "--failures", "3=1.3", "0=1.32"],
    ],
    ids=["single ranks", "rank 0", "a server and a worker"],
)
def test_run_whose_last_samples_fail_can_be_resumed(tmp_path: Path, options: list[Any]) -> None:
    """The new group has no samples left, but a checkpoint to write."""
    servers = ["--servers", 3 if options[0] == "aladdin" else 1]
    simulate(tmp_path, "--jitter", 0.2, "--algorithm", *options, *servers)
    before = summary(tmp_path)
    samples = before["samples"]
    assert before["failures"]
    simulate(None, "--resume", tmp_path, "--samples", 2 * samples)
    after = summary(tmp_path)
    assert after["samples"] == 2 * samples
    assert after["gradients_computed"] > before["gradients_computed"]


def test_islands_end_with_the_last_server(tmp_path: Path) -> None:
    """A worker that took its place would leave its island."""
    options = ["--algorithm", "bsp", *ISLANDS, "--samples", 1920, "--failures", "0=1.3"]
    completed = simulate(tmp_path, *CLUSTER, *options, check=False)
    check_names(refusal(completed), "rank 0 ", "too few ranks remain")


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("algorithm", ["aladdin-ahead", "bsp", "ar-sgd", "sgp", "diloco"])
def test_islands_fail_at_any_time(tmp_path: Path, algorithm: str, seed: int) -> None:
    """Also that of rank 0, or one of the servers."""
    draw = random.Random(seed)
    first = 2 if algorithm in SERVED else 0
    # Not both of the coordinator's island, or server, and its standby's.
    without = draw.choice([{0, 4}, {1, 5}]) if first == 0 else {0}
    ranks = draw.sample([rank for rank in range(first + 8) if rank not in without], 2)
    moments = [f"{rank}={draw.uniform(1.0, 1.8):.4f}" for rank in ranks]
    options = ["--algorithm", algorithm, "--servers", 2, "--workers", 8, "--hosts", 4]
    options += [*ISLANDS, "--samples", 2560, "--eval-every", 0.25, "--seed", seed]
    figures = run(tmp_path, *options, "--failures", *moments)
    failed = {failure["rank"] for failure in figures["failures"]}
    assert failed >= set(ranks) and len(failed) <= 4
    check_continued(figures, failed, 2560)


def test_run_ends_with_the_islands_of_the_coordinator_and_its_standby(tmp_path: Path) -> None:
    options = ["--algorithm", "ar-sgd", *ISLANDS, "--samples", 1920]
    moments = ["--failures", "0=1.3", "1=1.31"]
    completed = simulate(tmp_path, *CLUSTER, *options, *moments, check=False)
    check_names(refusal(completed), "rank 0 ", "standby", "both failed")


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "ranks", "options", "killed", "mate"),
    [
        pytest.param("aladdin-ahead", 6, ["--servers", 2], 5, 4, marks=pytest.mark.long),
        pytest.param("aladdin", 5, [], 4, 3, marks=pytest.mark.long),
        ("ar-sgd", 4, [], 0, 1),
        pytest.param("ar-sgd", 4, [], 1, 0, marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, [], 2, 3, marks=pytest.mark.long),
    ],
)
def test_failed_rank_ends_its_island_only_over_mpi(
    tmp_path: Path, algorithm: str, ranks: int, options: list[Any], killed: int, mate: int
) -> None:
    folder = tmp_path / "run"
    plan = ["--algorithm", algorithm, *options, *ISLANDS, "--epochs", 12, "--slowdown", "0=3"]
    with training(ranks, folder, *plan, "--log-every", 320, mpirun=ULFM) as job:
        wait_until(job, lambda: samples_so_far(folder) >= 2 * EPOCH, seconds=100)
        kill_ranks(job, [killed])
        completed = job.wait(150)
    assert completed.returncode == 0, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    check_names(completed.stderr, f"rank {mate} ", f"rank {killed} of its island has failed")
    figures = summary(folder)
    assert sorted(failure["rank"] for failure in figures["failures"]) == sorted([killed, mate])
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["samples"] == 12 * EPOCH
    assert figures["test_accuracy"] > 0.85


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_islands_continue_without_a_server_over_mpi(tmp_path: Path, killed: int) -> None:
    folder = tmp_path / "run"
    plan = ["--algorithm", "aladdin-ahead", "--servers", 2, *ISLANDS, "--epochs", 12]
    with training(6, folder, *plan, "--log-every", 320, "--slowdown", "0=3", mpirun=ULFM) as job:
        wait_until(job, lambda: samples_so_far(folder) >= 2 * EPOCH, seconds=100)
        kill_ranks(job, [killed])
        completed = job.wait(150)
    assert completed.returncode == 0, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    figures = summary(folder)
    check_continued(figures, {killed}, 12 * EPOCH)
    assert figures["servers"] == 1 and figures["test_accuracy"] > 0.85
