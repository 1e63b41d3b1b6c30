"""Local SGD: equivalent processes, times of averaging, counters and bytes."""

from __future__ import annotations

import random
from collections import defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.options.algorithms import LocalSgdOptions, own
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.run.trainer import simulate
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role, TrainingWorker
from tests.drawn_jobs import any_lockstep_job
from tests.quadratic import Quadratic, network
from tests.roles import Job, any_network, flat, flat_start, noise_of_samples, run, single_process

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}


class Plain:
    """Algorithm 1 in float64, with models averaged directly.

    ``models`` are the workers' models, ``trace`` is worker 0's model after each change.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.problem = Quadratic(job.numel)
        self.models = [flat_start(job.numel).double() for _ in range(job.workers)]
        self.velocities = [torch.zeros_like(model) for model in self.models]
        self.used: list[list[SampleLease]] = [[] for _ in self.models]
        self.trace = [self.models[0]]
        drawn = 0
        for segment in range(job.segments):
            end = job.samples * (segment + 1) // job.segments
            steps = 0
            while drawn < end:
                whole = min(job.batch * job.workers, end - drawn)
                self.step(SampleLease(drawn, 0, whole))
                steps += 1
                if (
                    drawn < own(job.options, LocalSgdOptions).post
                    or steps == own(job.options, LocalSgdOptions).steps
                ):
                    self.average()
                    steps = 0
                drawn += whole
            self.average()

    def step(self, whole: SampleLease) -> None:
        options, n = self.job.options, self.job.workers
        for i, x in enumerate(self.models):
            lease = whole._replace(size=whole.size_of(i, n))
            gradient = torch.zeros_like(x)
            if lease.size:
                noise = noise_of_samples(self.job, i, self.used[i], lease)
                gradient = self.problem.scale * (x - self.problem.optimum) + noise
                gradient *= lease.size * n / lease.whole
                self.used[i].append(lease)
            gradient = gradient + options.weight_decay * x
            velocity = self.velocities[i] = options.momentum * self.velocities[i] + gradient
            direction = gradient + options.momentum * velocity if options.nesterov else velocity
            self.models[i] = x - self.job.schedule(lease.start) * direction
        self.trace.append(self.models[0])

    def average(self) -> None:
        mean = torch.stack(self.models).mean(0)
        self.models = [mean for _ in self.models]
        self.trace.append(mean)


def assert_all_equal(locals_: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(locals_[0], expected.float(), rtol=1e-4, atol=1e-5)
    for mine in locals_:
        assert torch.equal(mine, locals_[0])


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("settings", [PLAIN, MOMENTUM, {**MOMENTUM, "nesterov": True}], ids=str)
def test_local_sgd_averaging_every_step_equals_single_process(
    workers: int, settings: dict[str, Any]
) -> None:
    job = Job(
        "local-sgd",
        workers=workers,
        numel=50,
        bucket=11,
        samples=20 * workers + 3,  # the last round is uneven, or too small for some workers
        settings={**settings, "local_sgd": {"steps": 1}},
        schedule=lambda samples: 0.05 if samples < 40 else 0.01,
        slowdown={0: 2.0},
        cluster=any_network(workers, workers),
    )
    end = run(job)
    end.check_accounts()
    assert_all_equal(end.locals, single_process(job))


@pytest.mark.sample(12)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("local", "segments"),
    [({"steps": 3}, 1), ({}, 1), ({"steps": 3}, 3), ({"steps": 4, "post": 70}, 2)],
    ids=str,
)
@pytest.mark.parametrize("settings", [MOMENTUM, {**MOMENTUM, "nesterov": True}], ids=str)
def test_local_sgd_equals_algorithm_of_paper(
    workers: int, local: dict[str, int], segments: int, settings: dict[str, Any]
) -> None:
    job = Job(
        "local-sgd",
        workers=workers,
        numel=50,
        bucket=11,
        samples=60 * workers + 3,
        segments=segments,
        settings={**settings, "local_sgd": local},
        schedule=lambda samples: 0.05 if samples < 100 else 0.02,
        slowdown={0: 2.0},
        jitter=0.3,
        cluster=any_network(workers + 10, workers),
        seed=workers,
    )
    end = run(job)
    end.check_accounts()
    assert_all_equal(end.locals, Plain(job).models[0])


def test_local_sgd_averages_models_when_due() -> None:
    """Compares the workers' models before each step; post-local SGD switches."""
    seen: dict[int, list[Tensor]] = defaultdict(list)

    def probe(transport: Transport, role: Role, lease: SampleLease) -> None:
        seen[lease.start].append(flat(role, job.layout))

    job = Job("local-sgd", workers=3, batch=2, samples=6 * 12, probe=probe)
    job.settings = {**MOMENTUM, "local_sgd": {"steps": 4, "post": 6 * 3}}
    run(job)
    same = [all(torch.equal(x, models[0]) for x in models) for _, models in sorted(seen.items())]
    averaged = [0, 1, 2, 3, 7, 11]
    assert same == [step in averaged for step in range(12)]


def draw_settings(r: random.Random) -> dict[str, Any]:
    return {"local_sgd": {"steps": r.randint(1, 9), "post": r.choice([0, r.randint(1, 100)])}}


@pytest.mark.parametrize("seed", range(32))
def test_local_sgd_counters_balance_under_any_conditions(seed: int) -> None:
    end = run(any_lockstep_job("local-sgd", seed, draw_settings))
    end.check_accounts()
    assert_all_equal(end.locals, end.model)


@pytest.mark.sample(1)
@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_local_sgd_converges_to_known_minimum(wire: str) -> None:
    """In bf16, too, in which a parameter near 1 has steps of 0.008."""
    job = Job("local-sgd", workers=4, samples=8000, noise=0.0, schedule=lambda samples: 0.2)
    job.settings = {"momentum": 0.5, "weight_decay": 0.0, "wire": wire}
    assert (run(job).model - Quadratic(job.numel).optimum).abs().max() < 1e-4


def test_local_sgd_does_not_round_unmoved_model() -> None:
    job = Job("local-sgd", segments=2, schedule=lambda samples: 0.0)
    job.settings = {**PLAIN, "wire": "bf16", "local_sgd": {"steps": 3}}
    for mine in run(job).locals:
        assert torch.equal(mine, flat_start(job.numel))


ASKED = 500


def test_local_sgd_model_copy_belongs_to_one_step() -> None:
    """The copy is requested at any moment, also while models are being summed."""
    shots: list[Tensor] = []

    def probe(transport: Transport, role: Role, lease: SampleLease) -> None:
        if transport.rank == 1:
            # In the middle of a step, while rank 0 waits for this slower worker.
            for delay in (0.5, 1.0, 1.0):
                transport.sleep(delay)
                transport.isend(torch.zeros(1, dtype=torch.uint8), 0, ASKED)
        elif transport.rank == 0 and lease.start == 0:
            transport.on_message(ASKED, 1, lambda *message: shots.append(flat(role, job.layout)))

    slow = network(bandwidth_gbit=3e-7, local_bandwidth_gbit=3e-7, hosts=3)
    job = Job("local-sgd", workers=3, bucket=5, samples=3 * 4 * 8, cluster=slow, probe=probe)
    job.settings = {**MOMENTUM, "local_sgd": {"steps": 2}}
    run(job)
    trace = torch.stack(Plain(job).trace).float()
    assert len(shots) == 3 * 8
    for shot in shots:
        assert (trace - shot).abs().amax(1).min() < 1e-5


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_local_sgd_sends_two_models_every_h_steps(workers: int, wire: str, width: int) -> None:
    job = Job("local-sgd", workers=workers, numel=40_000, samples=workers * 4 * 12)
    job.bucket = 10_000
    job.settings = {**PLAIN, "wire": wire, "local_sgd": {"steps": 3}}
    sent = [worker.traffic.bytes_sent / 12 for worker in run(job).workers]
    mean = sum(sent) / workers  # a tree loads some ranks more than others
    expected = 2 * (workers - 1) / workers * 40_000 * width / 3
    assert mean == pytest.approx(expected, abs=100)  # sample leases: 72 bytes per step


def test_local_sgd_timed_computing_sends_the_same_bytes(tmp_path: Path) -> None:
    sent = {}
    for name, steps in (("ar-sgd", 1), ("local-sgd", 4)):
        for wire in ("fp32", "bf16"):
            options = SimulateOptions.model_validate(
                {
                    "algorithm": name,
                    "local_sgd": {"steps": steps},
                    "compute": "timed",
                    "model": "size:0.5",
                    "samples": 4 * 8 * 200,
                    "batch_size": 8,
                    "workers": 4,
                    "wire": wire,
                    "run_dir": tmp_path / name / wire,
                    "quiet": True,
                }
            )
            sent[name, wire] = simulate(options)["bytes_sent_per_step"]
    for wire in ("fp32", "bf16"):
        assert sent["local-sgd", wire] == pytest.approx(sent["ar-sgd", wire] / 4, rel=0.02)
    assert sent["local-sgd", "bf16"] == pytest.approx(sent["local-sgd", "fp32"] / 2, rel=0.02)


@pytest.mark.parametrize("algorithm", ["local-sgd", "diloco"])
def test_state_from_before_sums_could_be_quantised_is_restored(algorithm: str) -> None:
    role = run(Job(algorithm, workers=2, samples=32)).workers[0].role
    assert isinstance(role, TrainingWorker)
    state = deepcopy(role.state_dict())
    assert state.pop("codec") == {}
    expected = role.x.clone()
    role.x.zero_()
    role.load_state_dict(state)
    assert torch.equal(role.x, expected)
