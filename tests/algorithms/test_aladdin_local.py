"""aladdin-local: the account of own steps, an independent transcription, and the link's share."""

from __future__ import annotations

import random
from dataclasses import replace
from math import cos, pi
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms.aladdin_local import LocalInbox, LocalWorker
from aladdin_mpi.codec import signs
from aladdin_mpi.codec.quantise import Scratch
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.link_control import (
    DECREASE,
    FIRST_SHARE,
    LARGEST_SHARE,
    SMALLEST_SHARE,
    LinkControl,
)
from aladdin_mpi.exchange.own_steps import OwnSteps
from aladdin_mpi.exchange.worker_mailbox import Model
from aladdin_mpi.options.algorithms import AladdinLocalOptions, own
from aladdin_mpi.options.checks import checked_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import RunOptions, parse
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.worker.role import Role
from tests.drawn_jobs import any_served_job
from tests.quadratic import Quadratic
from tests.roles import Job, Outcome, flat_start, noise_of_samples, run

PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
ALONE: dict[str, Any] = {"aladdin_local": {"mix": 0.0}, "momentum": 0.9, "weight_decay": 0.01}


def draw_options(r: random.Random) -> dict[str, Any]:
    share = r.choice(["auto", "auto", 0.1, 0.5, 1.0])
    return {"share": share, "keep": r.choice([0.0, 0.5, 1.0]), "mix": r.choice([0.0, 0.3])}


def any_job(seed: int) -> Job:
    job = any_served_job("aladdin-local", seed, draw_options)
    settings = {"aladdin_local": job.settings["aladdin-local"]}
    return replace(job, numel=job.numel + 30, bucket=job.bucket + 15, settings=settings)


class Account:
    """The sum of all own steps of each worker, and its model without them: what it received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.totals: dict[int, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        add, put = OwnSteps.add, LocalInbox.put

        def note_step(steps: OwnSteps, change: Tensor, alpha: float = 1.0) -> None:
            total = self.totals.setdefault(id(steps), torch.zeros(len(change)).double())
            total.add_(change.double(), alpha=alpha)
            add(steps, change, alpha)

        def note_model(inbox: LocalInbox, x: Tensor, model: Model, values: Tensor) -> None:
            start = flat_start(len(x))
            mine = model.bucket.of(self.received.setdefault(id(inbox), start))
            if values.numel() == model.bucket.numel:
                mine.copy_(values)
            else:
                signs.add(values, mine)
            put(inbox, x, model, values)

        monkeypatch.setattr(OwnSteps, "add", note_step)
        monkeypatch.setattr(LocalInbox, "put", note_model)

    def check(self, transport: Transport, role: Role, lease: SampleLease) -> None:
        """Assert that the model is the received one plus all own steps that it lacks."""
        assert isinstance(role, LocalWorker)
        # A new group takes over what is left, and adds it to the model.
        assert role.steps.remaining is not None or not role.steps.left.any()
        taken_over = role.state_dict()["parameters"] + role.steps.left
        torch.testing.assert_close(taken_over, role.x, rtol=0, atol=1e-5)
        expected = self.received.get(id(role.inbox), flat_start(len(role.x))) + role.steps.left
        for bucket in role.layout.buckets:
            mine = bucket.of(expected)
            for message in role.steps.parts_under_way(bucket):
                signs.add(message, mine)
            share, kept = role.inbox._kept[bucket.index]
            for message in kept:
                signs.add(message, mine, share)
        torch.testing.assert_close(role.x, expected, rtol=0, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(16))
def test_model_is_the_received_one_plus_all_own_steps_it_lacks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = Account(monkeypatch)
    job = replace(any_job(seed), probe=account.check)
    outcome = run(job)
    _check_end(job, outcome, account)


def _check_end(job: Job, outcome: Outcome, account: Account) -> None:
    """Assert that the model contains every step once, and that every worker has it."""
    roles: list[Any] = [rank.role for rank in outcome.workers]  # of LocalWorker
    expected = flat_start(job.numel).double()
    for role in roles:
        expected += account.totals.get(id(role.steps), torch.zeros_like(expected)) / job.workers
    torch.testing.assert_close(outcome.model.double(), expected, rtol=0, atol=1e-4)
    computed = sum(role.counts()["computed"] for role in roles)
    for server in outcome.servers:
        assert server.role.counts() == {"applied": computed, "dropped": 0}
    for role in roles:
        assert torch.equal(role.x, outcome.model)
        assert not role.steps.left.any()


def test_a_single_worker_trains_as_without_servers() -> None:
    job = Job("aladdin-local", workers=1, numel=200, samples=400, settings=ALONE)
    alone = run(replace(job, algorithm="local-sgd", settings={**ALONE, "local_sgd": {"steps": 1}}))
    torch.testing.assert_close(run(job).model, alone.model, rtol=0, atol=1e-5)


STEPS = 20


class Transcription:
    """The rule for workers in step; only the encoding is shared.

    Without latency, an answer is there before the next step but one. Sums are computed in the order
    of the rule: many of the server's differences are equal, and rounding decides which are sent.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.options = own(job.options, AladdinLocalOptions)
        n = self.n = job.workers
        self.problem = Quadratic(job.numel)
        self.model = flat_start(job.numel)
        self.workers = [self.model.clone() for _ in range(n)]
        self.copies = [self.model.clone() for _ in range(n)]
        self.left = [torch.zeros(job.numel) for _ in range(n)]
        self.velocity = [torch.zeros(job.numel) for _ in range(n)]
        self.kept: list[list[Tensor]] = [[] for _ in range(n)]
        self.answers: list[list[tuple[list[Tensor], list[Tensor], int]]] = [[] for _ in range(n)]
        """The messages of each worker with their answers, and the gradients in the model."""
        self.count, self.counts = 0, [0] * n
        self.used: list[list[SampleLease]] = [[] for _ in range(n)]
        self.seen: list[list[Tensor]] = [[] for _ in range(n)]
        """Each worker's model at the start of its steps."""
        for step in range(STEPS):
            for i in range(n):
                self.step(i, step)

    def encoded(self, left: Tensor) -> list[Tensor]:
        """Return the messages T(left), of every bucket; the rest stays in ``left``."""
        parts = [bucket.of(left) for bucket in self.job.layout.buckets]
        return [signs.encode(part, self.share, memory(part), Scratch()) for part in parts]

    def answered(self, i: int) -> list[Tensor]:
        """Return the server's messages to a worker, and update its copy."""
        vectors = [(b.of(self.model), b.of(self.copies[i])) for b in self.job.layout.buckets]
        return [
            signs.encode_difference(model, copy, self.share, memory(copy), Scratch())
            for model, copy in vectors
        ]

    @property
    def share(self) -> float:
        assert isinstance(self.options.share, float)
        return self.options.share

    def put(self, messages: list[Tensor], target: Tensor, alpha: float = 1.0) -> Tensor:
        """Add messages to ``target``, and return it."""
        for bucket, message in zip(self.job.layout.buckets, messages, strict=False):
            signs.add(message, bucket.of(target), alpha)
        return target

    def step(self, i: int, step: int) -> None:
        job, n, rate = self.job, self.n, self.job.schedule(0)
        if step >= 2:
            self.receive(i, *self.answers[i][step - 2])
        x, v = self.workers[i], self.velocity[i]
        self.seen[i].append(x.clone())
        lease = SampleLease(0, job.batch, job.batch * n)
        noise = noise_of_samples(job, i, self.used[i], lease)
        self.used[i].append(lease)
        leaf = x.clone().requires_grad_()
        (
            0.5 * self.problem.scale * (leaf - self.problem.optimum) ** 2 + noise * leaf
        ).sum().backward()
        assert leaf.grad is not None
        v.mul_(job.options.momentum).add_(leaf.grad + job.options.weight_decay * x)
        x.sub_(v, alpha=rate)
        self.left[i].sub_(v, alpha=rate)
        messages = self.encoded(self.left[i])
        self.put(messages, self.model, 1 / n)
        self.count += 1
        self.answers[i].append((messages, self.answered(i), self.count))

    def receive(self, i: int, mine: list[Tensor], answer: list[Tensor], count: int) -> None:
        keep = self.options.keep * (1 - 1 / self.n)
        x = self.workers[i]
        self.put(answer, x)
        rounds = (count - self.counts[i]) / self.n
        self.counts[i] = count
        movement = self.put(answer, torch.zeros_like(x), 1 / rounds)
        self.velocity[i].lerp_(movement / -self.job.schedule(0), self.options.mix)
        self.put(self.kept[i], x, -keep)
        self.put(mine, x, keep - 1.0)
        self.kept[i] = mine


def memory(part: Tensor) -> Tensor:
    """Return memory for a message about ``part``."""
    return torch.empty(signs.longest_message(len(part)))


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("options", [(0.3, 0.5, 0.3), (0.1, 0.0, 0.0), (1.0, 1.0, 0.5)])
def test_equals_a_transcription_of_the_rule(
    workers: int, options: tuple[float, float, float]
) -> None:
    share, keep, mix = options
    local = {"share": share, "keep": keep, "mix": mix}
    settings = {"momentum": 0.9, "weight_decay": 0.01, "aladdin_local": local}
    seen: dict[int, list[Tensor]] = {}

    def note(transport: Transport, role: Role, lease: SampleLease) -> None:
        assert isinstance(role, LocalWorker)
        seen.setdefault(role.index, []).append(role.x.clone())

    job = Job(
        "aladdin-local",
        workers=workers,
        numel=150,
        bucket=60,
        batch=2,
        samples=2 * workers * (STEPS + 2),  # the last leases may go to any worker
        settings=settings,
        probe=note,
    )
    run(job)
    for worker, models in enumerate(Transcription(job).seen):
        for ours, theirs in zip(seen[worker], models, strict=False):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


NUMEL = 40_000
CAPACITY = NUMEL * 4 / 50
"""Bytes per second of a worker's link: 1/50 of a gradient in a step."""
SLOW = Cluster(hosts=9, bandwidth_gbit=8e-9 * CAPACITY, latency_us=5e5, links={0: 100.0})


@pytest.mark.long
def test_workers_never_wait_and_links_are_busy() -> None:
    job = Job(
        "aladdin-local",
        workers=8,
        numel=NUMEL,
        bucket=NUMEL // 8,
        samples=8 * 70 * 4,
        settings=PLAIN,
        cluster=SLOW,
        slowdown={0: 10.0},
        jitter=0.05,
    )
    times: dict[int, list[tuple[float, float, int]]] = {}

    def note(transport: Transport, role: Role, lease: SampleLease) -> None:
        traffic = transport.traffic
        mine = times.setdefault(transport.rank, [])
        mine.append((transport.now(), traffic.waiting, traffic.bytes_sent))

    run(replace(job, probe=note))
    for rank, each in times.items():
        # By then leases are requested early enough, and the share has been found.
        (start, before, first), (end, after, last) = each[min(30, len(each) // 2)], each[-1]
        assert after - before < 0.01 * (end - start)
        if rank > 1:  # the slow worker's messages are as large as they get
            assert 0.75 < (last - first) / (end - start) / CAPACITY < 1.02


def test_rest_is_in_one_place_while_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a failure interrupts it, a server may have a part, which must not be sent again."""
    kept: list[Tensor | None] = []
    send_all = OwnSteps.send_all

    def watched(steps: OwnSteps) -> None:
        wait = steps._transport.wait

        def noted(*requests: Request) -> None:
            kept.append(steps.remaining)
            wait(*requests)

        with monkeypatch.context() as patch:
            patch.setattr(steps._transport, "wait", noted)
            send_all(steps)

    monkeypatch.setattr(OwnSteps, "send_all", watched)
    run(Job("aladdin-local", workers=2, samples=80))
    assert kept == [None, None]


@pytest.mark.long
def test_moment_is_usable_after_a_schedule_that_ends_at_zero() -> None:
    """A cosine over 60 rounds; then another, as if the run were resumed for more epochs."""
    workers, rounds, seen = 4, 60, []

    def cosine(samples: float) -> float:
        return 0.02 * (1 + cos(pi * (samples / (4 * workers) % rounds) / rounds))

    def note(transport: Transport, role: Role, lease: SampleLease) -> None:
        velocity = role.optimizer.velocity  # type: ignore[attr-defined]
        seen.append((lease.start, float(velocity.norm())))

    case = Job(
        "aladdin-local",
        workers=workers,
        numel=NUMEL,
        bucket=NUMEL,
        samples=2 * rounds * 4 * workers,
        segments=2,
        schedule=cosine,
        probe=note,
        settings={"momentum": 0.9, "weight_decay": 0.0},
        cluster=Cluster(hosts=5, bandwidth_gbit=6.4e-9 * NUMEL, latency_us=1e5),
    )
    end = run(case)
    middle = max(norm for start, norm in seen if rounds / 4 < start / 16 < rounds / 2)
    assert max(norm for start, norm in seen if start / 16 > rounds / 2) < 10 * middle
    optimum = Quadratic(NUMEL).optimum
    assert float((end.model - optimum).norm()) < 0.2 * float((end.first - optimum).norm())


def test_share_grows_once_per_round_trip_until_the_link_is_full() -> None:
    link = LinkControl(None)
    assert link.end_step(oldest=0.0, now=0.0, step=1.0)
    assert not link.end_step(oldest=0.0, now=1.0, step=1.0)  # the length of the way is not known
    assert link.share == FIRST_SHARE
    link.answered(2.0)
    assert link.end_step(oldest=2.0, now=2.0, step=1.0)
    grown = link.share
    assert grown > FIRST_SHARE
    for now in (3.0, 4.0):
        assert link.end_step(oldest=2.0, now=now, step=1.0)
        assert link.share == grown
    assert link.end_step(oldest=3.0, now=5.0, step=1.0)
    assert link.share > grown


def test_share_falls_with_each_message_left_out_but_by_half_per_round_trip() -> None:
    link = LinkControl(None)
    link.answered(2.0)
    for now in range(50):
        assert link.end_step(oldest=now, now=now, step=1.0)
    assert link.share == LARGEST_SHARE
    assert link.end_step(oldest=50.0, now=53.9, step=1.0)
    assert not link.end_step(oldest=50.0, now=54.1, step=1.0)
    assert link.share == pytest.approx(DECREASE * LARGEST_SHARE)
    for now in range(55, 80):
        assert not link.end_step(oldest=50.0, now=now, step=1.0)
    assert link.share == 0.5 * LARGEST_SHARE
    # Messages that were sent before say nothing about the smaller share.
    assert not link.end_step(oldest=54.0, now=80.0, step=1.0)
    assert link.share == 0.5 * LARGEST_SHARE
    assert not link.end_step(oldest=54.2, now=80.0, step=1.0)
    assert link.share == pytest.approx(0.5 * DECREASE * LARGEST_SHARE)
    for sent in range(100, 6000, 50):
        assert not link.end_step(oldest=sent, now=sent + 40.0, step=1.0)
        link.shortest = 2.0
    assert link.share == SMALLEST_SHARE


def test_a_longer_way_is_learned_once_the_share_cannot_fall() -> None:
    link = LinkControl(None)
    link.answered(1.0)
    times = [20.0 * k for k in range(1, 100)]
    sent = [link.end_step(oldest=t - 9, now=t, step=1.0) for t in times]
    assert not sent[0]
    assert sent[-1]


def test_a_fixed_share_stays() -> None:
    link = LinkControl(0.3)
    link.answered(1.0)
    assert not link.end_step(oldest=0.0, now=9.0, step=1.0)
    assert link.end_step(oldest=9.0, now=9.0, step=1.0)
    assert link.share == 0.3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_rejected(dtype: torch.dtype) -> None:
    job = Job("aladdin-local", workers=1, problem=lambda numel: Quadratic(numel).to(dtype))
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(UserError, match=rf"{name}.*model\.float\(\)"):
        run(job)


def test_steps_of_a_former_group_are_sent_by_a_worker_without_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = LocalWorker.run

    def inherit(worker: LocalWorker) -> None:
        worker.steps.remaining = torch.ones_like(worker.x)
        worker.x.add_(1.0)
        begin(worker)

    monkeypatch.setattr(LocalWorker, "run", inherit)
    job = Job("aladdin-local", workers=3, samples=4, schedule=lambda samples: 0.0)
    outcome = run(job)
    computed = [rank.role.counts()["computed"] for rank in outcome.workers]
    assert 0 in computed and sum(computed) > 0
    torch.testing.assert_close(outcome.model, flat_start(job.numel) + 1.0)


@pytest.mark.parametrize("wire", ["bf16", "int8", "int4", "int2"])
def test_other_wires_are_rejected(wire: str) -> None:
    with pytest.raises(UserError, match=f"--wire {wire} .*Leave the option out"):
        words = ["--algorithm", "aladdin-local", "--wire", wire]
        checked_algorithm(parse(RunOptions, words, "", ""), 3)
