"""SGP and Overlap SGP: sum of weights, mixing, trajectories and complete runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms.sgp import SgpWorker, _Push, hops
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.transport.base import Request, Transport
from tests.gossip_lab import Spy, any_job, large, noises, run_spied, starts
from tests.quadratic import Quadratic, network
from tests.roles import Job, Outcome, any_network, run

ORDERS = ("add-first", "push-first")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("sgp", {}),
    ("sgp", {"sgp": {"graph": "ring"}}),
    *(("osgp", {"osgp": {"tau": tau, "order": order}}) for tau in (1, 3) for order in ORDERS),
    ("osgp", {"osgp": {"tau": 1, "order": "add-first", "optimize": "numerator"}}),
]
SLOW = network(latency_us=5e5, local_latency_us=5e5)
"""Half a step on the wire."""


def role(outcome: Outcome, worker: int) -> SgpWorker:
    result = outcome.workers[worker].role
    assert isinstance(result, SgpWorker)
    return result


# -- the graph ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("n", "expected"),
    [(2, [1]), (3, [1, 2]), (4, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4]), (24, [1, 2, 4, 8, 16])],
)
def test_sgp_exponential_graph_has_powers_of_two(n: int, expected: list[int]) -> None:
    assert hops(n, "exponential") == expected


def mixed(n: int, steps: int, algorithm: str = "sgp", **job: Any) -> tuple[Tensor, Tensor]:
    """Return the mixing matrix and the weights after a number of steps without gradients."""
    numel = max(n, 6)
    outcome = run(
        Job(
            algorithm,
            workers=n,
            numel=numel,
            samples=n * steps,
            batch=1,
            schedule=lambda samples: 0.0,
            start=lambda rank: torch.eye(numel)[rank],
            **job,
        )
    )
    w = torch.tensor([role(outcome, i).w for i in range(n)], dtype=torch.float64)
    return outcome.locals[:, :n].double() * w[:, None], w


@pytest.mark.sample(6)
@pytest.mark.parametrize("n", range(2, 17))
def test_sgp_mixing_is_doubly_stochastic(n: int) -> None:
    for steps in (1, 2, len(hops(n, "exponential"))):
        matrix, w = mixed(n, steps)
        assert w.tolist() == [1.0] * n
        assert torch.allclose(matrix.sum(0), torch.ones(n).double(), atol=1e-6)
        assert torch.allclose(matrix.sum(1), torch.ones(n).double(), atol=1e-6)
    assert (matrix > 0).all()  # after one period every worker has received from every other


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_sgp_average_is_exact_after_log2_n_steps(n: int) -> None:
    period = round(log2(n))
    assert torch.equal(mixed(n, period)[0], torch.full((n, n), 1 / n).double())
    if period > 1:
        assert not torch.equal(mixed(n, period - 1)[0], torch.full((n, n), 1 / n).double())


@pytest.mark.sample(6)
@pytest.mark.parametrize("n", [8, 16])
@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize(
    "uneven",
    [{}, {"cluster": SLOW}, {"cluster": SLOW, "jitter": 0.03}, {"slowdown": {0: 1.3}}],
    ids=["at-once", "slow", "jitter", "one-is-late"],  # other messages arrive too early for it
)
def test_osgp_mixes_in_log2_n_steps_only_with_add_first(
    n: int, tau: int, uneven: dict[str, Any]
) -> None:
    """If models are sent before received messages are added, these propagate one step later."""
    away = {}
    for order in ORDERS:
        options = {"osgp": {"tau": tau, "order": order}}
        matrix, w = mixed(n, round(log2(n)), "osgp", settings=options, **uneven)
        assert sum(w.tolist()) == n
        away[order] = (matrix / w[:, None] - 1 / n).norm() / (torch.eye(n) - 1 / n).norm()
    assert away["add-first"] == 0
    assert away["push-first"] > 0.1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_osgp_mixing_is_column_stochastic(n: int, order: str) -> None:
    uneven = {"slowdown": {0: 3.0}, "jitter": 0.5, "cluster": network(latency_us=6e5)}
    matrix, w = mixed(n, 7, "osgp", settings={"osgp": {"order": order}}, **uneven)
    assert torch.allclose(matrix.sum(0), torch.ones(n).double(), atol=1e-5)
    assert torch.allclose(matrix.sum(1), w, atol=1e-5)
    assert sum(w.tolist()) == pytest.approx(n, abs=1e-12)


# -- sum of weights at any moment -------------------------------------------------------------
class Mass:
    """Sums all weights w: those of the workers and of messages not added yet."""

    def __init__(self, n: int, path: list[int]) -> None:
        self.n, self.path = n, path
        self.roles: dict[int, SgpWorker] = {}
        self.sent: dict[int, list[float]] = defaultdict(list)
        self.posted: dict[int, int] = defaultdict(int)
        self.checks = self.seen_in_flight = 0

    def check(self) -> None:
        total = 0.0
        for rank in range(self.n):
            known = self.roles.get(rank)
            total += known.w if known else 1.0
            waiting = len(known.incoming) if known else self.posted[rank]
            in_flight = self._in_flight(rank, self.posted[rank] - waiting)
            total += in_flight
            self.seen_in_flight += in_flight > 0
        self.checks += 1
        assert total == pytest.approx(self.n, abs=1e-9)

    def _in_flight(self, rank: int, added: int) -> float:
        total = 0.0
        for step in range(added, max(map(len, self.sent.values()), default=0)):
            row = self.sent[(rank - self.path[step % len(self.path)]) % self.n]
            total += row[step] if step < len(row) else 0.0
        return total


@pytest.mark.sample(4)
@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
@pytest.mark.parametrize("seed", range(8))
def test_sgp_weights_sum_to_n_at_any_moment(
    algorithm: str, settings: dict[str, Any], seed: int
) -> None:
    job = any_job(algorithm, seed, **settings)
    graph = settings.get(algorithm, {}).get("graph", "exponential")
    mass = Mass(job.workers, hops(job.workers, graph))

    class Weigher(Spy):
        def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
            mass.posted[self.rank] += tag == Tag.PUSH and buffer.dtype == torch.float64
            return super().irecv(buffer, source, tag)

        def sent(self, buffer: Tensor, dest: int, tag: int) -> None:
            if tag == Tag.PUSH and buffer.dtype == torch.float64:
                path = mass.path
                step = len(mass.sent[self.rank])
                assert dest == (self.rank + path[step % len(path)]) % self.size
                mass.sent[self.rank].append(buffer.item())

        def switched(self) -> None:
            mass.check()

    def meet(transport: Transport, worker: object, lease: SampleLease) -> None:
        assert isinstance(worker, SgpWorker)
        mass.roles[transport.rank] = worker

    def make(inner: Transport) -> Spy:
        return Weigher(inner)

    outcome = run_spied(replace(job, probe=meet, samples=20 * job.workers), make)
    assert mass.checks > 10 * job.workers
    assert mass.seen_in_flight
    end = [role(outcome, i).w for i in range(job.workers)]
    assert sum(end) == pytest.approx(job.workers, abs=1e-12)
    if algorithm == "sgp":
        assert end == [1.0] * job.workers


# -- trajectories ------------------------------------------------------------------------------
Added = dict[int, list[tuple[list[int], list[int]]]]
"""For each worker and step: the steps whose messages it adds before and after it sends."""


def transcribed(job: Job, outcome: Outcome, graph: str, added: Added) -> Tensor:
    """Apply the paper's rules in float64."""
    n, problem, options = job.workers, Quadratic(job.numel), job.options
    scale, optimum = problem.scale.double(), problem.optimum.double()
    path = hops(n, graph)
    by_numerator = job.settings.get("osgp", {}).get("optimize") == "numerator"
    all_noise = [noises(job, outcome, i) for i in range(n)]
    x = [starts(i, job.numel).double() for i in range(n)]
    w, v = [1.0] * n, [torch.zeros(job.numel).double() for _ in range(n)]
    sent: list[list[tuple[Tensor, float]]] = []

    def add(i: int, steps: list[int]) -> None:
        for step in steps:
            values, weight = sent[step][(i - path[step % len(path)]) % n]
            x[i], w[i] = x[i] + values, w[i] + weight

    for k in range(len(all_noise[0])):
        for i in range(n):
            z = x[i] / w[i]
            # The authors' code has x in the parameters when it calls torch.optim.SGD's step().
            decayed = x[i] if by_numerator else z
            g = scale * (z - optimum) + all_noise[i][k] + options.weight_decay * decayed
            v[i] = options.momentum * v[i] + g
            x[i] = x[i] - job.schedule(outcome.workers[i].leases[k].start) * v[i]
            add(i, added[i][k][0])
            x[i], w[i] = x[i] / 2, w[i] / 2
        sent.append([(x[i], w[i]) for i in range(n)])
        for i in range(n):
            add(i, added[i][k][1])
    return torch.stack([x[i] / w[i] for i in range(n)])


def log_additions(added: Added) -> Callable[[Transport, object, SampleLease], None]:
    """Return a probe that records what each worker adds in each step."""

    def probe(transport: Transport, worker: object, lease: SampleLease) -> None:
        assert isinstance(worker, SgpWorker)
        rows = added[transport.rank]
        rows.append(([], []))
        if worker.steps:
            return
        add, send = worker._add, worker._push
        pushes = 0

        def logged_push(dest: int) -> None:
            nonlocal pushes
            pushes += 1
            send(dest)

        def logged_add(push: _Push) -> None:
            rows[-1][pushes == len(rows)].append(push.step)
            add(push)

        worker._push = logged_push  # type: ignore[method-assign]
        worker._add = logged_add  # type: ignore[method-assign]

    return probe


@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
def test_sgp_trajectory_matches_paper(algorithm: str, settings: dict[str, Any], seed: int) -> None:
    n = [2, 3, 6, 8, 11, 16][seed]
    added: Added = defaultdict(list)
    job = Job(
        algorithm,
        workers=n,
        bucket=5,
        batch=2,
        samples=2 * n * 11,
        settings={"momentum": 0.8, "weight_decay": 0.01, **settings},
        schedule=lambda samples: 0.1 / (1 + samples / 20),
        jitter=0.4,
        cluster=any_network(seed, n),
        start=lambda rank: starts(rank, 17),
        probe=log_additions(added),
        seed=seed,
    )
    outcome = run(job)
    own = settings.get(algorithm, {})
    tau = 0 if algorithm == "sgp" else own["tau"]
    for rows in added.values():  # every message once, in order, and at most tau steps late
        assert [step for row in rows for part in row for step in part] == list(range(11))
        assert all(0 <= k - step <= tau for k, row in enumerate(rows) for step in row[0] + row[1])
        assert all(step < k for k, row in enumerate(rows) for step in row[0])
    if own.get("order") != "add-first":
        assert not any(row[0] for rows in added.values() for row in rows)
    elif seed == 3:
        assert any(row[0] for rows in added.values() for row in rows)
    expected = transcribed(job, outcome, own.get("graph", "exponential"), added).float()
    assert torch.allclose(outcome.locals, expected, rtol=1e-5, atol=1e-5)


# -- complete runs -----------------------------------------------------------------------------
@pytest.mark.sample(12)
@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
@pytest.mark.parametrize("seed", range(10))
def test_sgp_counters_balance_under_any_conditions(
    algorithm: str, settings: dict[str, Any], seed: int
) -> None:
    job = any_job(algorithm, 100 + seed, **settings)
    outcome = run(large(job) if seed % 5 == 0 else job)
    outcome.check_accounts()
    weights = [role(outcome, i).w for i in range(job.workers)]
    assert sum(weights) == pytest.approx(job.workers, abs=1e-12)
    steps = {role(outcome, i).steps for i in range(job.workers)}
    assert len(steps) == 1  # in lockstep, including the empty parts of the last round
    assert not any(role(outcome, i).incoming for i in range(job.workers))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
@pytest.mark.parametrize("n", [5, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 8))])
def test_sgp_converges(algorithm: str, settings: dict[str, Any], n: int) -> None:
    job = Job(
        algorithm,
        workers=n,
        samples=4 * n * 300,
        settings={"weight_decay": 0.0, **settings},
        schedule=lambda samples: 0.05 / (1 + samples / (400 * n)),
        jitter=0.3,
        start=lambda rank: starts(rank, 17),
    )
    outcome = run(job)
    optimum = Quadratic(17).optimum
    assert (outcome.model - optimum).norm() < 0.05 * optimum.norm()
    assert (outcome.locals - optimum).norm(dim=1).max() < 0.1 * optimum.norm()


def test_osgp_does_not_wait_for_messages_of_current_step() -> None:
    """SGP waits for them in every step, Overlap SGP in none."""
    job = Job("sgp", workers=4, samples=4 * 4 * 50, cluster=SLOW)
    waiting = {
        name: max(r.traffic.waiting for r in run(replace(job, algorithm=name)).workers)
        for name in ("sgp", "osgp")
    }
    assert waiting["sgp"] > 20  # 0.5 s in each of 50 steps
    assert waiting["osgp"] < 5


@pytest.mark.parametrize("seed", range(10))
def test_osgp_add_first_costs_no_time(seed: int) -> None:
    """Messages are sent and awaited at the same moments on any network."""
    waiting = []
    for order in ORDERS:
        job = any_job("osgp", 200 + seed, osgp={"tau": 1 + seed % 2, "order": order})
        waiting.append([worker.traffic.waiting for worker in run(job).workers])
    assert waiting[0] == waiting[1]
