"""ALADDIN in simulation equals a direct transcription of the paper's two algorithms.

The transcription has no messages, buffers or views: it consists of plain float64 arrays and a list
of events, with the paper's lines in the paper's order. Without network delays, both must produce
the same models.
"""

from __future__ import annotations

import copy
import heapq
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from aladdin_mpi.algorithms.aladdin import AladdinServer
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_mailbox import NotesThen, ReceivedBucket
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import AladdinOptions
from aladdin_mpi.options.general import FORWARD_SHARE
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from tests.quadratic import STAGGER, Outcome, Quadratic, Setup, aladdin_options, noise_of, run

Vector = NDArray[np.float64]

SPREAD = (1.0, 1.0137, 1.0291, 1.0473, 1.0619, 1.0837)
"""Slowdown factors chosen so that no two workers ever act at the same time."""
SEND, END, BEGIN = 0, 1, 2
"""Kinds of events of one worker at one time, in order of execution."""


class Momentum:
    """Textbook momentum and weight decay."""

    def __init__(self, setup: Setup) -> None:
        self.m, self.decay, self.nesterov = setup.momentum, setup.weight_decay, setup.nesterov
        self.v: Vector = np.zeros(setup.numel)

    def direction(self, g: Vector, x: Vector, part: slice) -> Vector:
        g = g + self.decay * x
        self.v[part] = self.m * self.v[part] + g
        if not self.m:
            return g
        return g + self.m * self.v[part] if self.nesterov else self.v[part].copy()


class PaperServer:
    """Algorithm 2 of the paper, for one bucket."""

    def __init__(self, setup: Setup, part: slice, x: Vector, momentum: Momentum) -> None:
        self.setup, self.options, self.part, self.momentum = setup, setup.aladdin, part, momentum
        self.x = x[part].copy()
        self.g: Vector = np.zeros_like(self.x)
        self.c = 0  # line 1
        self.c_i = [0] * setup.workers
        self.summed = 0
        self.seen = 0
        self.seen_at_send = [0] * setup.workers

    def receive(self, i: int, g_i: Vector, lr: float) -> tuple[Vector, float] | None:
        """Execute lines 3 to 11 and return what line 10 sends."""
        self.c += 1  # line 4
        self.c_i[i] += 1
        self.seen += 1
        if self.c_i[i] < self.options.pi:  # line 5
            self.add(g_i)  # line 6
            if not self.options.lazy:
                self.update(lr)
                self.g[:] = self.summed = 0
            return None
        if self.options.trigger == "accumulate":
            self.add(g_i)
        self.update(lr)  # line 8
        alpha = self.alpha(i)  # line 9
        self.g[:] = 0  # line 11
        self.c = self.c_i[i] = self.summed = 0
        self.seen_at_send[i] = self.seen
        return self.x.copy(), alpha  # line 10

    def add(self, g_i: Vector) -> None:
        self.g += g_i
        self.summed += 1

    def update(self, lr: float) -> None:
        if not self.summed:
            return
        n = self.setup.workers
        count = self.c if self.options.lazy else self.summed
        step = self.g / {"count": count, "workers": n, "none": 1}[self.options.normalize]
        if self.options.momentum == "split":
            step = self.momentum.direction(step, self.x, self.part)
        self.x -= lr * step

    def alpha(self, i: int) -> float:
        rules = {
            "theory": self.setup.workers * self.options.pi,
            "since-last": self.seen - self.seen_at_send[i],
            "literal": self.c,
        }
        rule = self.options.alpha
        return 1 - 1 / sqrt(rules[rule]) if isinstance(rule, str) else rule


class PaperWorker:
    """Algorithm 1 of the paper, split into events: start an iteration, send its buckets, end it."""

    def __init__(self, setup: Setup, i: int, problem: Quadratic, x: Vector) -> None:
        self.setup, self.i, self.x = setup, i, x.copy()
        self.scale = problem.scale.double().numpy()
        self.optimum = problem.optimum.double().numpy()
        self.momentum = Momentum(setup)
        self.step = 0
        self.arrived: list[tuple[float, slice, Vector, float]] = []
        self.g: Vector = np.zeros(setup.numel)
        self.own: Vector = np.zeros(setup.numel)
        self.lr = 0.0

    def begin(self, start: int) -> None:
        setup = self.setup
        self.step += 1
        self.lr = setup.schedule(start)
        noise = noise_of(self.i, self.step, setup.numel, setup.noise).double().numpy()
        self.g = self.scale * (self.x - self.optimum) + noise
        self.own = self.momentum.direction(self.g, self.x, slice(None))
        if setup.aladdin.momentum == "worker":
            self.g = self.own

    def end(self, now: float) -> None:
        if self.setup.aladdin.self_update:
            self.x -= self.lr * self.own
        self.blend([reply for reply in self.arrived if reply[0] < now])
        self.arrived = [reply for reply in self.arrived if reply[0] >= now]

    def blend(self, replies: list[tuple[float, slice, Vector, float]]) -> None:
        steps = self.setup.aladdin.lookahead
        for _, part, x_global, alpha in replies:
            ahead = x_global - steps * self.lr * self.momentum.v[part]
            self.x[part] = (1 - alpha) * self.x[part] + alpha * ahead


class Transcription:
    """Both algorithms driven by a list of events, with a network that takes no time."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        problem = Quadratic(setup.numel)
        x = torch.cat([p.detach() for p in list(problem.parts)[::-1]]).double().numpy()
        momentum = Momentum(setup)
        self.buckets = [b.part for b in setup.layout.buckets]
        self.servers = [PaperServer(setup, part, x, momentum) for part in self.buckets]
        self.workers = [PaperWorker(setup, i, problem, x) for i in range(setup.workers)]
        self.next: list[tuple[int, int] | None] = [None] * setup.workers
        self.drawn = 0
        self.newest = 0
        self.events: list[tuple[float, int, int, int]] = []

    def draw(self) -> tuple[int, int]:
        size = min(self.setup.batch, self.setup.samples - self.drawn)
        self.drawn += size
        return self.drawn - size, size

    def run(self) -> Transcription:
        setup, last = self.setup, (-1.0, -1)
        for i in range(setup.workers):
            heapq.heappush(self.events, (STAGGER * (setup.servers + i + 1), BEGIN, i, 0))
        while self.events:
            now, kind, i, bucket = heapq.heappop(self.events)
            assert now > last[0] + 1e-9 or i == last[1], "two workers at one time: change SPREAD"
            last = (now, i)
            if kind == SEND:
                self.send(now, i, bucket)
            elif kind == END:
                self.workers[i].end(now)
            else:
                self.begin(now, i)
        for worker in self.workers:
            worker.lr = setup.schedule(setup.samples)
            worker.blend(worker.arrived)
        for server in self.servers:
            server.update(setup.schedule(self.newest))
        return self

    def begin(self, now: float, i: int) -> None:
        setup = self.setup
        start, size = self.next[i] or self.draw()
        if not size:
            return
        self.next[i] = self.draw()
        self.newest = max(self.newest, start)
        self.workers[i].begin(start)
        seconds = setup.seconds * setup.slowdown_of(i)
        for bucket, part in enumerate(self.buckets):
            finished = FORWARD_SHARE + (1 - FORWARD_SHARE) * part.stop / setup.numel
            heapq.heappush(self.events, (now + seconds * finished, SEND, i, bucket))
        heapq.heappush(self.events, (now + seconds, END, i, 0))
        heapq.heappush(self.events, (now + seconds, BEGIN, i, 0))

    def send(self, now: float, i: int, bucket: int) -> None:
        part, worker = self.buckets[bucket], self.workers[i]
        lr = self.setup.schedule(self.newest)
        reply = self.servers[bucket].receive(i, worker.g[part], lr)
        if reply is not None:
            worker.arrived.append((now, part, *reply))

    @property
    def everything(self) -> Vector:
        """Return the global model, followed by the workers' models."""
        return np.stack([np.concatenate([s.x for s in self.servers]), *(w.x for w in self.workers)])


def everything(outcome: Outcome) -> Vector:
    rows = torch.cat([outcome.model[None], outcome.locals])
    return rows.double().numpy()


def check(setup: Setup) -> None:
    expected = Transcription(setup).run().everything
    moved = np.abs(expected - expected[0, 0]).max()
    assert 0.1 < moved < 1e4, "a run that stands still or runs away shows nothing"
    np.testing.assert_allclose(everything(run(setup)), expected, rtol=2e-5, atol=1e-5)


UNEQUAL = (1.0, 1.4137, 2.3291)
BASE = Setup(workers=3, bucket=5, samples=121, batch=2, slowdown=UNEQUAL, momentum=0.5)
ALPHAS: tuple[Any, ...] = ("theory", "since-last", "literal", 0.3)
VARIANTS = [
    aladdin_options(pi=3, trigger=trigger, normalize=normalize, alpha=alpha, momentum=momentum)
    for trigger, normalize, alpha, momentum in product(
        ("accumulate", "drop"), ("count", "workers", "none"), ALPHAS, ("worker", "split")
    )
]


def name_of(options: AladdinOptions) -> str:
    return f"{options.trigger}-{options.normalize}-{options.alpha}-{options.momentum}"


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", VARIANTS, ids=name_of)
def test_aladdin_variant_equals_paper(options: AladdinOptions) -> None:
    check(replace(BASE, aladdin=options))


def test_aladdin_variants_differ_by_more_than_tolerance() -> None:
    ends = {
        name_of(options): Transcription(replace(BASE, aladdin=options)).run().everything
        for options in VARIANTS
    }
    for (one, x), (other, y) in combinations(ends.items(), 2):
        assert np.abs(x - y).max() > 1e-3, (one, other)


@pytest.mark.sample(6)
@pytest.mark.parametrize("momentum", ["worker", "split"])
@pytest.mark.parametrize("normalize", ["count", "workers", "none"])
@pytest.mark.parametrize(("self_update", "lazy"), [(False, True), (True, False), (False, False)])
def test_aladdin_equals_paper_without_strategies(
    self_update: bool, lazy: bool, normalize: str, momentum: str
) -> None:
    def setup(**strategies: bool) -> Setup:
        options = aladdin_options(
            pi=3, normalize=normalize, momentum=momentum, alpha="literal", **strategies
        )
        return replace(BASE, aladdin=options)

    check(setup(self_update=self_update, lazy=lazy))
    with_all = Transcription(setup()).run().everything
    without = Transcription(setup(self_update=self_update, lazy=lazy)).run().everything
    # The sum of the workers' steps does not depend on when they are added.
    alike = self_update and normalize != "count" and momentum == "worker"
    assert (np.abs(with_all - without).max() < 1e-9) == alike


@pytest.mark.parametrize("pi", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_aladdin_equals_paper_for_any_workers_and_period(workers: int, pi: int) -> None:
    setup = replace(BASE, workers=workers, samples=40 * workers, slowdown=SPREAD)
    check(replace(setup, aladdin=aladdin_options(pi=pi)))


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("servers", "bucket", "shard"),
    [(1, 100, 100), (1, 1, 100), (2, 100, 100), (2, 3, 6), (3, 4, 5), (3, 2, 2)],
)
@pytest.mark.parametrize("trigger", ["accumulate", "drop"])
def test_aladdin_equals_paper_for_any_layout(
    servers: int, bucket: int, shard: int, trigger: str
) -> None:
    options = aladdin_options(pi=2, trigger=trigger)
    check(replace(BASE, aladdin=options, servers=servers, bucket=bucket, shard=shard))


@pytest.mark.parametrize("momentum", ["worker", "split"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_aladdin_equals_paper_with_decaying_rate_and_unequal_workers(
    momentum: str, nesterov: bool
) -> None:
    check(
        replace(
            BASE,
            aladdin=aladdin_options(momentum=momentum, alpha="since-last"),
            nesterov=nesterov,
            momentum=0.8,
            weight_decay=0.05,
            schedule=partial(falling, 0.06, 130),
            slowdown=(1.0, 2.0137, 9.0291),
        )
    )


@pytest.mark.parametrize("momentum", ["worker", "split"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_aladdin_equals_paper_with_lookahead(momentum: str, nesterov: bool) -> None:
    def setup(steps: float) -> Setup:
        options = aladdin_options(pi=2, momentum=momentum, lookahead=steps)
        schedule = partial(falling, 0.06, 130)
        return replace(BASE, aladdin=options, nesterov=nesterov, schedule=schedule)

    check(setup(0.7))
    with_it, without = (Transcription(setup(steps)).run().everything for steps in (0.7, 0.0))
    assert np.abs(with_it - without).max() > 1e-3


def falling(rate: float, end: int, samples: int) -> float:
    """Return a learning-rate schedule that is 0 after ``end``."""
    return rate * (1 - samples / end)


def test_aladdin_pending_gradients_carry_over_to_next_segment() -> None:
    """A single worker that never pulls makes the same steps in five segments as in one."""
    setup = replace(BASE, workers=1, aladdin=aladdin_options(pi=4, alpha=0.0), samples=130)
    whole, cut = run(setup), run(replace(setup, segments=5))
    assert cut.workers[0].leases == whole.workers[0].leases
    assert np.array_equal(everything(cut), everything(whole))


# -- server alone, by hand -----------------------------------------------------------------


MEAN: dict[str, Any] = {"normalize": "count", "alpha": "literal"}


def serve_by_hand(transport: VirtualTransport, options: AladdinOptions) -> AladdinServer:
    setup = Setup(workers=transport.size - 1, numel=4)
    x = torch.zeros(4)
    wire = DenseWire(torch.float32, x.device)
    server = ParameterServer(transport, setup.layout, x, wire, lambda samples: 1.0)
    return AladdinServer(server, MomentumSGD(x, 0.5, 0.0), options)


class Script:
    """Sends gradients of ones from given workers and records the server's alphas."""

    def __init__(self, role: AladdinServer) -> None:
        self.role = role
        self.alphas: list[float] = []
        role.server.send_model = self.note  # type: ignore[method-assign]

    def note(
        self,
        worker: int,
        bucket: Bucket,
        alpha: float = 1.0,
        notes: NotesThen = (),
        exact: bool = False,
    ) -> None:
        self.alphas.append(alpha)

    def play(self, workers: list[int], count: int = 1) -> None:
        bucket = self.role.server.buckets[0]
        arrivals = [
            ReceivedBucket(w, bucket, count, torch.full((4,), float(count))) for w in workers
        ]
        self.role.server.gradients = lambda **_: iter(arrivals)  # type: ignore[method-assign]
        self.role.run()

    @property
    def x(self) -> float:
        return float(self.role.server.values[0][0])


def by_hand(options: AladdinOptions, workers: list[int], count: int = 1) -> Script:
    def main(transport: VirtualTransport) -> Script | None:
        if transport.rank:
            return None
        script = Script(serve_by_hand(transport, options))
        script.play(workers, count)
        return script

    script = VirtualCluster(3, Setup().cluster).run(main)[0]
    assert script is not None
    return script


def test_aladdin_drop_trigger_counts_dropped_gradient_in_mean() -> None:
    """Worker 0's second gradient triggers: three counted, two summed, x~ -= 2/3."""
    script = by_hand(aladdin_options(pi=2, trigger="drop", **MEAN), [0, 1, 0])
    assert script.x == pytest.approx(-2 / 3)
    assert script.alphas == [pytest.approx(1 - 1 / sqrt(3))]
    assert script.role.counts() == {"applied": 2, "dropped": 1}


def test_aladdin_accumulate_trigger_applies_mean() -> None:
    script = by_hand(aladdin_options(pi=2, **MEAN), [0, 1, 0])
    assert script.x == pytest.approx(-1)
    assert script.alphas == [pytest.approx(1 - 1 / sqrt(3))]
    assert script.role.counts() == {"applied": 3, "dropped": 0}


def test_aladdin_drop_with_period_one_leaves_model_unchanged() -> None:
    script = by_hand(aladdin_options(pi=1, trigger="drop", **MEAN), [0, 1, 0])
    assert (script.x, script.alphas) == (0.0, [0.0, 0.0, 0.0])
    assert script.role.counts() == {"applied": 0, "dropped": 3}


def test_aladdin_coalesced_gradient_counts_each_of_its_gradients() -> None:
    script = by_hand(aladdin_options(pi=3, alpha="since-last", normalize="count"), [0, 1, 0, 1], 2)
    # c_0: 2, then 4 >= 3, with 2 of worker 1: 6 in all. Then c_1 = 4: 8 since the start.
    assert script.alphas == [pytest.approx(1 - 1 / sqrt(6)), pytest.approx(1 - 1 / sqrt(8))]
    assert script.x == pytest.approx(-2)  # the mean of 6 ones, then of 2
    assert script.role.counts() == {"applied": 8, "dropped": 0}


@pytest.mark.parametrize("trigger", ["accumulate", "drop"])
@pytest.mark.parametrize("momentum", ["worker", "split"])
@pytest.mark.parametrize("cut_at", range(1, 7))
def test_aladdin_server_restored_at_any_point_continues_identically(
    cut_at: int, momentum: str, trigger: str
) -> None:
    options = aladdin_options(pi=2, trigger=trigger, momentum=momentum, **MEAN)
    order = [0, 1, 1, 0, 1, 0, 0, 1]

    def main(transport: VirtualTransport) -> tuple[Script, Script] | None:
        if transport.rank:
            return None
        whole, first, second = (Script(serve_by_hand(transport, options)) for _ in range(3))
        whole.play(order)
        first.play(order[:cut_at])
        second.role.load_state_dict(copy.deepcopy(first.role.state_dict()))
        second.alphas = first.alphas
        second.play(order[cut_at:])
        return whole, second

    scripts = VirtualCluster(3, Setup().cluster).run(main)[0]
    assert scripts is not None
    whole, restored = scripts
    assert restored.alphas == whole.alphas
    assert restored.role.counts() == whole.role.counts()
    for script in scripts:
        script.role.complete()
    assert restored.x == whole.x
    assert restored.role.counts() == whole.role.counts()
