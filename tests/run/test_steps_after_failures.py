"""Size of every step after workers have failed, in simulation.

The loss is linear, so a worker's gradient is the same at every model, and the steps of plain SGD
have a known size.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain, combinations, pairwise
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from aladdin_mpi.worker.role import Role
from tests.quadratic import NO_DELAY, network
from tests.roles import Job, flat, run

LR = 2.0**-4
WORKERS = 5
LOST = {"one lost": {4: 5.3}, "two lost": {3: 5.3, 4: 7.6}}
"""Failure times of workers in seconds; a step takes one second."""
SLOPES = [1.0, 8.0, 64.0, 512.0, 4096.0]
"""Slope of each worker's loss: no two sets of workers have the same mean."""

SYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "bsp": ("bsp", {}),
    "ar-sgd": ("ar-sgd", {}),
    "ar-sgd clipped": ("ar-sgd", {"clip": 1e9}),
    "local-sgd": ("local-sgd", {"local_sgd": {"steps": 1}}),
    "diloco": ("diloco", {"diloco": {"steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}}),
}
AT_SERVERS: dict[str, dict[str, Any]] = {
    "aladdin": {},
    "aladdin-ahead": {},
    "aladdin-local": {},
    "adsp": {},
    "ashl": {"ashl": {"profile": 2, "coarse_steps": 2}},
    "asp": {},
    "async-diloco": {"async_diloco": {"steps": 1, "outer_lr": 1.0, "outer_momentum": 0.0}},
    "shat": {},
    "ssp": {},
}
ELASTIC = ("easgd", "eamsgd")
PUSH_SUM = ("sgp", "osgp")
PEERS = ("gosgd", "ad-psgd")
NEW_GROUP = ("multistep",)


class Line(nn.Module):
    """``loss = (slope x).sum()``, with x in three parameters that start at 0."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        sizes = [numel // 3, numel // 2, numel - numel // 3 - numel // 2]
        self.parts = nn.ParameterList([torch.zeros(size) for size in sizes])

    def forward(self, slope: Tensor) -> Tensor:
        """Return the loss; its gradient is ``slope``."""
        x = torch.cat([part.view(-1) for part in list(self.parts)[::-1]])
        return (slope * x).sum()


def job(algorithm: str, lost: dict[int, float], steps: int = 14, **settings: Any) -> Job:
    """Return a run on :class:`Line` with five equally fast workers."""
    first = 1 if find_algorithm(algorithm).has_servers else 0
    failures = {first + worker: second for worker, second in lost.items()}
    return Job(
        algorithm,
        workers=WORKERS,
        bucket=5,
        samples=4 * WORKERS * steps,
        noise=0.0,
        settings={"momentum": 0.0, "weight_decay": 0.0, **settings},
        schedule=lambda samples: LR,
        cluster=NO_DELAY.model_copy(update={"failures": failures}),
        problem=Line,
        spoil=lambda worker, step: 1.0,
    )


def test_table_of_step_sizes_has_every_algorithm() -> None:
    synchronous = [algorithm for algorithm, _ in SYNCHRONOUS.values()]
    listed = {*synchronous, *AT_SERVERS, *ELASTIC, *PUSH_SUM, *PEERS, *NEW_GROUP}
    assert listed == set(ALGORITHMS)


# -- synchronous algorithms ---------------------------------------------------------------
class Rounds:
    """Samples of every worker in each round, and the models before and after it."""

    def __init__(self, job: Job) -> None:
        self.first = job.served_by
        self.sizes: dict[int, dict[int, int]] = defaultdict(dict)
        self.models: list[Tensor] = []
        job.probe = self._note
        job.spoil = lambda worker, step: SLOPES[worker]
        outcome = run(job)
        self.buckets = job.layout.buckets
        self.survivors = [w for w in range(WORKERS) if outcome.ranks[self.first + w] is not None]
        self.models.append(outcome.model)

    def _note(self, transport: Transport, role: Role, lease: SampleLease) -> None:
        worker = transport.rank - self.first
        if lease.start not in self.sizes:  # all have the same model at this time
            self.models.append(flat(role, role.layout))  # type: ignore[attr-defined]
        self.sizes[lease.start][worker] = lease.size

    def check(self, one_mean: bool) -> list[int]:
        """Compare the steps with means of gradients; return the number of possible means of each.

        Args:
            one_mean: whether all buckets of a round have the same mean.
        """
        counts = []
        for sizes, (before, after) in zip(self.sizes.values(), pairwise(self.models), strict=True):
            step = (before - after) / LR
            means = torch.tensor(self._means(sizes))
            fits = torch.stack([(step - mean).abs() <= 1e-4 * mean.abs() for mean in means])
            by_bucket = torch.stack([fits[:, bucket.part].all(1) for bucket in self.buckets])
            assert by_bucket.any(1).all(), (sizes, step, means)
            assert by_bucket.all(0).any() or not one_mean, (sizes, step, means)
            counts.append(len(means))
        return counts

    def _means(self, sizes: dict[int, int]) -> list[float]:
        """Return means over surviving workers and any that fail later in the same round."""
        mortal = [worker for worker in sizes if worker not in self.survivors]
        sets = chain.from_iterable(combinations(mortal, n) for n in range(len(mortal) + 1))
        after = any(worker in sizes for worker in mortal)
        return [
            sum(sizes[w] * SLOPES[w] for w in workers) / max(1, sum(sizes[w] for w in workers))
            for chosen in (sets if after else [()])
            for workers in [[w for w in sizes if w in self.survivors or w in chosen]]
        ]


@pytest.mark.sample(5)
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("variant", SYNCHRONOUS)
def test_synchronous_step_is_mean_over_surviving_workers(variant: str, lost: str) -> None:
    algorithm, settings = SYNCHRONOUS[variant]
    rounds = Rounds(job(algorithm, LOST[lost], **settings))
    candidates = rounds.check(one_mean=algorithm != "bsp")
    assert candidates[-4:] == [1] * 4
    assert len(candidates) > 14  # rounds became smaller


@pytest.mark.sample(4)
@pytest.mark.parametrize(("worker", "extra"), [(1, 1), (1, 7), (4, 3)])
@pytest.mark.parametrize("variant", ["bsp", "ar-sgd", "ar-sgd clipped"])
def test_every_sample_has_equal_weight_in_a_small_last_round(
    variant: str, worker: int, extra: int
) -> None:
    """The last round was distributed to all workers in unequal parts before one failed."""
    algorithm, settings = SYNCHRONOUS[variant]
    plan = job(algorithm, {worker: 3.5}, steps=4, **settings)
    plan.samples += extra
    rounds = Rounds(plan)
    assert rounds.check(one_mean=algorithm != "bsp")[-1] == 1


@pytest.mark.parametrize("second", [2.5, 2.9, 3.1])
@pytest.mark.parametrize("servers", [1, 2])
def test_bsp_averages_received_gradients_of_each_bucket_after_a_failure(
    servers: int, second: float
) -> None:
    """In the round of the failure; in all other rounds, every bucket has the same mean."""
    plan = job("bsp", {}, steps=6)
    plan.servers = servers
    plan.cluster = network(
        hosts=8,
        latency_us=1e5,
        bandwidth_gbit=16e-7,  # a tenth of a second per bucket
        failures={servers + 4: second},
    )
    candidates = Rounds(plan).check(one_mean=False)
    assert candidates[-2:] == [1, 1]


# -- asynchronous algorithms --------------------------------------------------------------
@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("lost", "scaling"),
    [("one lost", "none"), ("two lost", "none"), ("two lost", "linear"), ("two lost", "sqrt")],
)
@pytest.mark.parametrize("algorithm", AT_SERVERS)
def test_gradient_weight_after_failures_counts_surviving_workers(
    algorithm: str, lost: str, scaling: str
) -> None:
    """With the linear scaling rule, fewer workers have a lower rate, which compensates."""
    steps: list[tuple[float, float, int]] = []
    last = {"x": 0.0, "applied": 0}

    def watch(role: ServerAlgorithm, bucket: Bucket) -> None:
        shards = getattr(role, "shards", None)
        applied = shards[0].applied if shards else role.applied[0]
        x = role.server.values[0][0].item()
        if applied > last["applied"]:
            now = role.server.transport.now()
            steps.append((now, (last["x"] - x) / LR, int(applied - last["applied"])))
        last.update(x=x, applied=applied)

    plan = job(algorithm, LOST[lost], steps=24, lr_scaling=scaling, **AT_SERVERS[algorithm])
    plan.watch = watch
    run(plan)
    before = [move / count for now, move, count in steps if now < 5.0]
    # An ashl worker receives its share with the next model.
    after = [move / count for now, move, count in steps if now > 12.0]
    assert before == pytest.approx([1 / WORKERS] * len(before), rel=1e-4)
    survivors = WORKERS - len(LOST[lost])
    rate_of_survivors = {"none": 1.0, "linear": survivors / WORKERS}
    rate = rate_of_survivors.get(scaling, sqrt(survivors / WORKERS))
    assert after == pytest.approx([rate / survivors] * len(after), rel=1e-4)
    assert len(after) > 3


@pytest.mark.sample(4)
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("algorithm", ["easgd", "eamsgd", "aladdin", "shat"])
def test_models_are_blended_by_number_of_surviving_workers(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, lost: str
) -> None:
    alphas: list[tuple[float, float]] = []
    plan = job(algorithm, LOST[lost], steps=24)

    def watch(role: ServerAlgorithm, bucket: Bucket) -> None:
        server = role.server
        if server.send_model != kept.get(server):  # at the first arrival
            send = server.send_model

            def sent(worker: int, of: Bucket, alpha: float = 1.0, **others: Any) -> None:
                alphas.append((server.transport.now(), alpha))
                send(worker, of, alpha, **others)

            kept[server] = sent
            monkeypatch.setattr(server, "send_model", sent)

    kept: dict[Any, Any] = {}
    plan.watch = watch
    run(plan)
    n = WORKERS - len(LOST[lost])
    expected = {
        "easgd": 0.9 / n,
        "eamsgd": 0.9 / n,
        "aladdin": 1 - 1 / sqrt(n * 4),
        "shat": max(0.0, 1 - n / (n - 1) / log(n)),
    }
    after = [alpha for now, alpha in alphas if 14.0 < now < 22.0]
    assert after == pytest.approx([expected[algorithm]] * len(after))
    assert len(after) > 10


# -- algorithms without servers -----------------------------------------------------------
@pytest.mark.sample(6)
@pytest.mark.parametrize("slowdown", [1.0, 1.3])
@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("algorithm", [*PUSH_SUM, *PEERS])
def test_peer_to_peer_step_keeps_its_size_after_failures(
    algorithm: str, lost: str, slowdown: float
) -> None:
    models: dict[int, list[float]] = defaultdict(list)
    plan = job(algorithm, LOST[lost], steps=24)
    plan.slowdown = dict.fromkeys(LOST[lost], slowdown)
    plan.probe = lambda transport, role, lease: models[transport.rank].append(
        flat(role, plan.layout)[0].item() / LR
    )
    workers = run(plan).workers
    if algorithm in PUSH_SUM:
        assert sum(worker.role.w for worker in workers) == len(workers)  # type: ignore[attr-defined]
    survivors = [worker for worker in range(WORKERS) if worker not in LOST[lost]]
    moved = sum(models[worker][-5] - models[worker][-1] for worker in survivors)
    assert moved / len(survivors) / 4 == pytest.approx(1.0, rel=0.02)


# -- in the next group --------------------------------------------------------------------
IN_NEW_GROUP = [
    *("bsp", "ar-sgd", "local-sgd", "diloco", "sgp", "osgp", "multistep"),
    *("asp", "ssp", "shat", "gosgd", "ad-psgd"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize("algorithm", IN_NEW_GROUP)
def test_step_size_is_kept_by_the_next_group(algorithm: str, tmp_path: Path) -> None:
    """All slopes are 1, so each round of all workers moves each model by the rate."""
    servers = 1 if find_algorithm(algorithm).has_servers else 0
    lost = LOST["two lost" if algorithm == "multistep" else "one lost"]
    failures = {servers + worker: second for worker, second in lost.items()}
    models: dict[tuple[int, int], list[float]] = defaultdict(list)

    def train(transport: Transport) -> None:
        module = nn.Linear(3, 4, bias=False)
        nn.init.zeros_(module.weight)
        run = DataParallel(
            module,
            transport=transport,
            algorithm=algorithm,
            evaluate=lambda module: {"test_loss": 0.0},
            samples=2 * WORKERS * 24,
            batch_size=2,
            lr=LR,
            lr_scaling="none",
            lr_schedule="constant",
            warmup_epochs=0,
            momentum=0.0,
            weight_decay=0.0,
            bucket_mb=2e-5,
            compute_time=1.0,
            checkpoint_every=2 * WORKERS * 12,
            run_dir=tmp_path / "run",
            quiet=True,
        )
        for epoch in run.epochs(list(range(40))):
            for _ in epoch:
                seen = models[transport.rank, run.groups]
                seen.append(-module.weight[0, 0].item() / LR)
                loss = module.weight.sum()
                loss.backward()
                run.step(loss)

    cluster = Cluster(hosts=1, failures=failures).placed(servers)
    VirtualCluster(servers + WORKERS, cluster).run(train)
    newest = max(groups for _, groups in models)
    last = [seen for (_, groups), seen in models.items() if groups == newest > 1]
    assert len(last) == WORKERS - len(lost)
    for seen in last:
        # Workers have not exchanged models at first, and some have already stopped at the end.
        steps = [after - before for before, after in pairwise(seen[3:-1])]
        assert sum(steps) / len(steps) == pytest.approx(1.0, rel=0.05)
