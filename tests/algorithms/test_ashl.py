"""ASHL: plan, two stages, staleness bound and counters."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from aladdin_mpi.algorithms.ashl import (
    AshlServer,
    AshlWorker,
    Phase,
    PlannedShare,
    Stage,
    Times,
    TopK,
    TrainingPlanner,
    local_steps,
    make_plan,
    rates,
    shares,
)
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.exchange.worker_mailbox import Outbox
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.hooks.recorder import rounded
from aladdin_mpi.transport.base import Transport
from tests.checks import check_converges, check_resumed
from tests.commands import checkpoint_part, simulate, summary, train
from tests.drawn_jobs import any_served_job
from tests.launch import needs
from tests.quadratic import NO_DELAY, network
from tests.roles import Job, Outcome, run, single_process

CPU = torch.device("cpu")
TIMES = [
    Times(step=1.0, push=2.0, pull=1.0, compress=0.5),
    Times(step=0.5, push=1.0, pull=1.0, compress=0.25),
    Times(step=0.25, push=4.0, pull=2.0, compress=0.75),
]


# -- the plan ------------------------------------------------------------------------------
def test_ashl_local_steps_match_hand_computation() -> None:
    # 8 + 3 = 11, 4 + 2 = 6, 2 + 6 = 8 seconds: all workers get 11.
    assert local_steps(TIMES, 8) == [8, 18, 20]
    assert shares([8, 18, 20]) == [8 / 46, 18 / 46, 20 / 46]


def test_ashl_fine_stage_plan_matches_hand_computation() -> None:
    # Communication takes 1.7, 1.35 and 3.15 s; with two more steps at most 3.7 s.
    steps = local_steps(TIMES, 2, rate=0.1)
    assert steps == [2, 5, 2]
    # Besides the push: 3.5, 3.75 and 3.25; at most 3.85 with it, which leaves 0.35, 0.1 and 0.6.
    assert rates(TIMES, steps, 0.1) == pytest.approx([0.175, 0.1, 0.15])


def test_ashl_plan_has_coarse_and_fine_stage() -> None:
    plan = make_plan(TIMES, 8, 2, 1.0, 0.1)
    assert plan[1].coarse == Stage(18 / 46, 18, 1.0)
    assert plan[1].fine == pytest.approx(Stage(5 / 9, 5, 0.1))


def test_ashl_assigns_few_steps_to_slow_workers_and_slow_links() -> None:
    slow_to_step = Times(step=10.0, push=0.0, pull=0.0, compress=0.0)
    slow_to_talk = Times(step=1.0, push=30.0, pull=2.0, compress=0.0)
    assert local_steps([slow_to_step, slow_to_talk], 1) == [3, 1]
    assert local_steps([slow_to_step._replace(step=100.0), slow_to_talk], 1) == [1, 68]


def test_ashl_sends_free_push_uncompressed() -> None:
    times = [Times(1, 0, 0, 0), Times(1, 2, 0, 0)]
    assert rates(times, [1, 1], 0.01) == pytest.approx([1.0, 0.01])
    assert rates(TIMES, [9, 1, 1], 1.0) == [1.0] * 3


seconds = st.floats(1e-4, 100)
some_times = st.lists(st.builds(Times, seconds, seconds, seconds, seconds), min_size=1, max_size=9)


@given(some_times, st.integers(1, 20), st.floats(0.001, 0.99))
def test_ashl_plan_equalises_worker_times(times: list[Times], preset: int, rate: float) -> None:
    steps = local_steps(times, preset)
    needed = [t.step * h + t.push + t.pull for t, h in zip(times, steps, strict=True)]
    longest = max(t.step * preset + t.push + t.pull for t in times)
    for own, t, h in zip(needed, times, steps, strict=True):
        assert abs(own - longest) <= t.step * 0.5001
        assert h >= preset
    assert sum(shares(steps)) == pytest.approx(1)
    result = rates(times, steps, rate)
    rest = [t.step * h + t.compress + t.pull for t, h in zip(times, steps, strict=True)]
    longest = max(r + rate * t.push for r, t in zip(rest, times, strict=True))
    for own, r, t in zip(result, rest, times, strict=True):
        assert rate <= own <= 1
        assert r + own * t.push <= longest * 1.0001
        assert own == 1 or r + own * t.push == pytest.approx(longest)


# -- pushes ----------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_k_pushes_largest_values_of_every_bucket_and_drops_rest(dtype: torch.dtype) -> None:
    layout = cut(60, 1, 20.5 * 4e-6, 100)
    codec = TopK(DenseWire(dtype, CPU), layout)
    reader = TopK(DenseWire(dtype, CPU), layout)
    moved = torch.randn(60, generator=torch.Generator().manual_seed(1))
    for _ in range(2):  # nothing remains for a second push
        codec.rate = 0.1
        for bucket in layout.buckets:
            part = moved[bucket.part]
            message, _event = codec.compress(bucket, part, 0, torch.empty(20, dtype=dtype))
            assert message.numel() == 2 * (1 + 4 // dtype.itemsize)
            target = torch.zeros(20)
            reader.add(bucket, message, target, 0.5)
            largest = part.abs().topk(2).indices
            expected = torch.zeros(20)
            expected[largest] = 0.5 * part[largest].to(dtype).float()
            torch.testing.assert_close(target, expected)
        assert codec.left is not None and codec.left.abs().sum() > 0
        codec.discard()
        assert codec.left.abs().sum() == 0


# -- the ranks of a run ------------------------------------------------------------------------
def ashl(**options: Any) -> dict[str, Any]:
    return {"momentum": 0.0, "weight_decay": 0.0, "ashl": options}


def worker_of(end: Outcome, index: int) -> AshlWorker:
    role = end.workers[index].role
    assert isinstance(role, AshlWorker)
    return role


def head_of(end: Outcome) -> TrainingPlanner:
    role = end.servers[0].role
    assert isinstance(role, AshlServer) and role.head is not None
    return role.head


@pytest.mark.parametrize("servers", [1, 3])
def test_ashl_ranks_share_one_plan(servers: int) -> None:
    slow = {0: 4.0, 2: 2.0}
    job = Job("ashl", workers=4, servers=servers, bucket=5, slowdown=slow, samples=800)
    job.settings = ashl(stage="fine", coarse_steps=4)
    end = run(job)
    plan = head_of(end).plan
    assert [worker_of(end, i).plan for i in range(4)] == plan
    assert [share.coarse.steps for share in plan] == [4, 16, 8, 16]
    assert [share.coarse.share for share in plan] == [4 / 44, 16 / 44, 8 / 44, 16 / 44]
    assert [share.fine.steps for share in plan] == [2, 8, 4, 8]
    for server in end.servers[1:]:
        assert isinstance(server.role, AshlServer) and server.role.head is None


def test_ashl_slow_worker_gets_proportional_steps() -> None:
    end = run(Job("ashl", workers=4, slowdown={0: 4.0}, samples=1600, settings=ashl()))
    steps = [worker_of(end, i).worker.computed for i in range(4)]
    others = sum(steps[1:]) / 3
    assert steps[0] == pytest.approx(others / 4, rel=0.1)


def test_ashl_measured_times_match_network() -> None:
    numel = 12_500  # 50 kB: 50 ms at 1 MB/s, and 20 ms of latency
    slow = network(hosts=2, bandwidth_gbit=8e-3, latency_us=2e4)
    job = Job("ashl", workers=1, numel=numel, bucket=numel, samples=80, cluster=slow, seconds=0.3)
    job.settings = ashl(stage="coarse")
    times = Times(*head_of(run(job)).times[0])
    assert times.step == pytest.approx(0.3)
    assert times.push == pytest.approx(0.07, rel=0.1)
    assert times.pull == pytest.approx(0.07, rel=0.1)


@pytest.mark.parametrize("stage", ["coarse", "fine"])
def test_ashl_with_one_worker_equals_plain_sgd(stage: str) -> None:
    job = Job("ashl", workers=1, settings=ashl(stage=stage, fine_rate=1.0))
    torch.testing.assert_close(run(job).model, single_process(job))


@pytest.fixture
def pushes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[tuple[Any, Tensor]]]]:
    """Record every worker's pushes: steps, notes and the change of its model."""
    result: dict[int, list[tuple[Any, Tensor]]] = defaultdict(list)
    push = LocalDifference.push

    def recording(self: LocalDifference, *notes: float) -> None:
        result[self.worker.index].append(((*notes, self.steps), self.x - self.base))
        push(self, *notes)

    monkeypatch.setattr(LocalDifference, "push", recording)
    yield result


def test_ashl_weights_differences_by_shares(
    pushes: dict[int, list[tuple[Any, Tensor]]],
) -> None:
    job = Job("ashl", workers=3, slowdown={1: 3.0}, samples=600, servers=2, bucket=4)
    job.settings = ashl(coarse_steps=3)
    end = run(job)
    every = [each for own in pushes.values() for each in own]
    moved = torch.stack([notes[0] * difference for notes, difference in every]).sum(0)
    torch.testing.assert_close(end.model - end.first, moved, rtol=1e-4, atol=1e-5)
    # The worker that received the last answer has the global model.
    assert (end.locals - end.model).norm(dim=1).min() < 1e-5
    plan = head_of(end).plan
    for worker, own in pushes.items():
        weights = {notes[0] for notes, _ in own}
        assert weights == {1 / 3, plan[worker].coarse.share}
        assert [len(notes) for notes, _ in own[:6]] == [4, 4, 4, 4, 8, 4]
        planned = [notes[-1] for notes, _ in own if notes[0] == plan[worker].coarse.share]
        assert set(planned[:-1]) == {plan[worker].coarse.steps}


def test_ashl_stage_follows_loss_and_never_returns_to_coarse(
    pushes: dict[int, list[tuple[Any, Tensor]]],
) -> None:
    job = Job("ashl", workers=3, servers=2, bucket=5, samples=2000, noise=2.0)
    job.settings = ashl(loss=0.8, coarse_steps=4)
    end = run(job)
    head = head_of(end)
    assert head.phase == Phase.FINE
    assert head.fine_from is not None and 100 < head.fine_from < 1900
    for own in pushes.values():
        phases = [notes[1] for notes, _ in own]
        assert phases == sorted(phases)
        assert set(phases) == {Phase.COARSE, Phase.FINE}
        fine = [notes[-1] for notes, _ in own if notes[1] == Phase.FINE]
        assert set(fine[:-1]) == {2}
        assert set(notes[-1] for notes, _ in own[5:] if notes[1] == Phase.COARSE) == {4}
    losses = [notes[2] for own in pushes.values() for notes, _ in own if notes[1] == Phase.FINE]
    assert max(losses) > 0.8  # otherwise a return to the coarse stage would not have been tried


@pytest.mark.parametrize(
    ("options", "phase"),
    [
        ({"loss": 0.0}, Phase.COARSE),
        ({"loss": 1e9}, Phase.FINE),
        ({"loss": 1e9, "stage": "coarse"}, Phase.COARSE),
        ({"loss": 0.0, "stage": "fine"}, Phase.FINE),
    ],
)
def test_ashl_stage_option_forces_stage(options: dict[str, Any], phase: Phase) -> None:
    end = run(Job("ashl", samples=800, settings=ashl(**options)))
    assert head_of(end).phase == phase
    assert {worker_of(end, i).phase for i in range(4)} == {phase}


def test_ashl_has_no_plan_before_all_workers_have_measured() -> None:
    end = run(Job("ashl", samples=4 * 4 * 3, settings=ashl(loss=1e9)))
    assert head_of(end).plan == []
    assert head_of(end).phase == Phase.COARSE
    assert head_of(end).facts() == {"plan": [], "fine_from": None}


def test_ashl_plans_without_worker_that_fails_before_it_has_measured() -> None:
    """The others have measured by then; the slow worker makes two of five iterations."""
    cluster = NO_DELAY.model_copy(update={"failures": {3: 9.5}})
    job = Job("ashl", workers=3, slowdown={2: 4.0}, samples=400, cluster=cluster)
    job.settings = ashl(stage="fine", coarse_steps=4)
    end = run(job)
    head = head_of(end)
    assert [share.fine.steps for share in head.plan] == [2, 2, 2]
    assert head.phase == Phase.FINE
    assert [worker_of(end, i).plan for i in range(2)] == head.plan[:2]


@pytest.mark.parametrize("feedback", [False, True])
def test_ashl_drops_unpushed_values_without_error_feedback(feedback: bool) -> None:
    job = Job("ashl", workers=2, samples=400)
    job.settings = ashl(stage="fine", coarse_rate=0.2, fine_rate=0.2, error_feedback=feedback)
    # Pushing takes longer for no worker: both push only the share.
    end = run(replace(job, cluster=network(hosts=3, latency_us=1e5)))
    for index in range(2):
        left = worker_of(end, index).top_k.left
        assert left is not None
        assert bool(left.any()) == feedback


# -- staleness bound -----------------------------------------------------------------------
class BoundWatch:
    """Counts every worker's fine pushes and checks that no step begins too far ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, workers: int, bound: int) -> None:
        self.fine = [0] * workers
        self.ended: set[int] = set()
        self.bound = bound
        self.furthest = 0
        push, flush = LocalDifference.push, Outbox.flush

        def counting(role: LocalDifference, *notes: float) -> None:
            self.fine[role.worker.index] += notes[1] == Phase.FINE
            push(role, *notes)

        def ending(box: Outbox) -> None:
            self.ended.add(box._transport.rank - box._layout.servers)
            flush(box)

        monkeypatch.setattr(LocalDifference, "push", counting)
        monkeypatch.setattr(Outbox, "flush", ending)

    def step(self, transport: Transport, role: Any, lease: Any) -> None:
        running = [n for worker, n in enumerate(self.fine) if worker not in self.ended]
        ahead = self.fine[role.worker.index] - min(running)
        self.furthest = max(self.furthest, ahead)
        assert ahead <= self.bound


def draw_options(r: random.Random) -> dict[str, Any]:
    return {
        "profile": r.randint(2, 6),
        "coarse_steps": r.randint(1, 8),
        "fine_steps": r.randint(1, 3),
        "coarse_rate": r.choice([1.0, 0.3]),
        "fine_rate": r.choice([1.0, 0.1]),
        "bound": r.randint(0, 3),
        "loss": r.choice([0.0, 1e9, 1e9, 5.0]),
        "stage": r.choice(["auto", "auto", "coarse", "fine"]),
        "error_feedback": r.random() < 0.3,
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("group", range(4))
def test_ashl_bound_holds_under_any_conditions(monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    reached = 0
    for seed in range(group * 8, group * 8 + 8):
        job = any_served_job("ashl", seed, draw_options)
        bound = job.settings["ashl"]["bound"]
        with monkeypatch.context() as patch:
            watch = BoundWatch(patch, job.workers, bound)
            job.segments, job.probe = 1, watch.step
            job.settings["ashl"] |= {"stage": "fine", "profile": 2}
            job.samples = max(job.samples, 200)
            run(job)
        reached += watch.furthest == bound and job.workers > 1
    assert reached >= 3  # otherwise no worker was ever blocked


@pytest.mark.parametrize("seed", range(100, 132))
def test_ashl_counters_balance_under_any_conditions(seed: int) -> None:
    run(any_served_job("ashl", seed, draw_options)).check_accounts()


# -- convergence ---------------------------------------------------------------------------
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "options",
    [
        {"stage": "coarse"},
        {"stage": "fine", "fine_rate": 1.0},
        {"stage": "fine", "fine_rate": 0.2},
        {"stage": "fine", "fine_rate": 0.2, "error_feedback": True},
        {"loss": 1.0},
    ],
    ids=str,
)
def test_ashl_converges_to_minimum(options: dict[str, Any]) -> None:
    job = Job("ashl", workers=4, servers=2, bucket=5, slowdown={0: 3.0}, samples=6000, noise=0.0)
    job.settings = ashl(**options)
    check_converges(job)


# -- the commands --------------------------------------------------------------------------
@pytest.mark.long
def test_ashl_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    options = ["--ashl-fine-rate", 0.1, "--ashl-error-feedback", "--ashl-loss", 1.0]
    check_resumed(tmp_path, "ashl", *options)


def test_ashl_summary_has_plan(tmp_path: Path) -> None:
    simulate(tmp_path, "--algorithm", "ashl", "--workers", 4, "--epochs", 3, "--slowdown", "0=4")
    run_summary = summary(tmp_path)
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"] == 135
    plan = run_summary["ashl"]["plan"]
    assert [worker["coarse"]["steps"] for worker in plan] == [8, 32, 32, 32]


def test_ashl_timed_computing_stays_coarse_by_default(tmp_path: Path) -> None:
    timed = ["--compute", "timed", "--model", "size:100", "--samples", 6400, "--workers", 4]
    timed += ["--servers", 2, "--bandwidth-gbit", 10]
    for stage, phase in (("auto", Phase.COARSE), ("fine", Phase.FINE)):
        run_dir = tmp_path / stage
        simulate(run_dir, "--algorithm", "ashl", *timed, "--ashl-stage", stage)
        assert checkpoint_part(run_dir, 0)["role"]["head"]["phase"] == phase
        sizes = summary(run_dir)
        assert sizes["gradients_applied"] == 200
    coarse, fine = (summary(tmp_path / stage)["bytes_sent_per_step"] for stage in ("auto", "fine"))
    assert coarse > 1e7 and fine > 1e6


@pytest.mark.long
@needs("openmpi")
@pytest.mark.parametrize("wire", ["fp32", pytest.param("bf16", marks=pytest.mark.long)])
def test_ashl_trains_over_mpi(tmp_path: Path, wire: str) -> None:
    options = ["--epochs", 4, "--servers", 2, "--ashl-loss", 2.0, "--slowdown", "1=3"]
    train(5, tmp_path, "--algorithm", "ashl", *options, "--wire", wire, "--bucket-mb", 0.005)
    run_summary = summary(tmp_path)
    assert run_summary["gradients_applied"] == run_summary["gradients_computed"]
    assert run_summary["ashl"]["fine_from"] > 0
    rows = [
        PlannedShare(Stage(**row["coarse"]), Stage(**row["fine"]))
        for row in run_summary["ashl"]["plan"]
    ]
    for index, row in enumerate(rows):
        plan = checkpoint_part(tmp_path, 2 + index)["role"]["plan"]
        # The summary's figures are rounded, those of the checkpoint are not.
        assert rounded(plan) == [float(value) for stage in row for value in stage]
    assert run_summary["test_accuracy"] > 0.5
