"""DiLoCo: an independent transcription, local SGD as a special case, and fragments."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.diloco import DilocoWorker, fragments
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.options.algorithms import DilocoOptions, own
from aladdin_mpi.options.checks import checked_algorithm
from aladdin_mpi.options.run import RunOptions, SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from tests.drawn_jobs import any_lockstep_job
from tests.quadratic import Quadratic
from tests.roles import Job, any_network, flat_start, noise_of_samples, run
from tests.run.test_takeover import Schedule, play

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}


class Transcription:
    """The published algorithms in float64, with torch's own SGD as the outer optimizer.

    Fragments are ranges of the flat model. ``sent`` holds, for the fragment in progress, the step
    at which it was sent and the workers' values then.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.options = own(job.options, DilocoOptions)
        self.problem = Quadratic(job.numel)
        start = flat_start(job.numel).double()
        self.models = [start.clone() for _ in range(job.workers)]
        self.velocities = [torch.zeros_like(start) for _ in self.models]
        self.used: list[list[SampleLease]] = [[] for _ in self.models]
        count = self.options.fragments
        ends = [job.numel * k // count for k in range(count + 1)]
        self.ranges = [slice(a, b) for a, b in pairwise(ends)]
        self.outer = [nn.Parameter(start[part].clone()) for part in self.ranges]
        self.optimizers = [self.make_outer(part) for part in self.outer]
        self.sent: tuple[int, int, list[Tensor]] | None = None
        drawn = 0
        for segment in range(job.segments):
            end = job.samples * (segment + 1) // job.segments
            drawn = self.train(drawn, end)

    def make_outer(self, parameter: nn.Parameter) -> torch.optim.SGD:
        momentum = self.options.outer_momentum
        return torch.optim.SGD(
            [parameter], lr=self.options.outer_lr, momentum=momentum, nesterov=momentum > 0
        )

    def train(self, drawn: int, end: int) -> int:
        steps = 0
        while drawn < end:
            whole = min(self.job.batch * self.job.workers, end - drawn)
            self.inner_step(SampleLease(drawn, 0, whole))
            steps += 1
            drawn += whole
            self.exchange(steps)
        self.receive()
        for fragment, part in enumerate(self.ranges):
            mean = torch.stack([x[part] for x in self.models]).mean(0)
            self.outer[fragment].data = mean.clone()
            self.optimizers[fragment].param_groups[0]["params"][0].data = mean.clone()
            for x in self.models:
                x[part] = mean
        return drawn

    def inner_step(self, whole: SampleLease) -> None:
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
            self.velocities[i] = options.momentum * self.velocities[i] + gradient
            x -= self.job.schedule(lease.start) * self.velocities[i]

    def exchange(self, step: int) -> None:
        interval = self.options.steps // self.options.fragments
        if self.sent is not None and step - self.sent[0] == self.options.overlap:
            self.receive()
        if step % interval == 0:
            fragment = (step // interval - 1) % self.options.fragments
            part = self.ranges[fragment]
            self.sent = (step, fragment, [x[part].clone() for x in self.models])
            if self.options.overlap == 0:
                self.receive()

    def receive(self) -> None:
        if self.sent is None:
            return
        _, fragment, values = self.sent
        self.sent = None
        outer = self.outer[fragment]
        outer.grad = outer.data - torch.stack(values).mean(0)
        self.optimizers[fragment].step()
        for x in self.models:
            own_share = self.options.blend * x[self.ranges[fragment]]
            x[self.ranges[fragment]] = own_share + (1 - self.options.blend) * outer.data


def job(workers: int, diloco: dict[str, Any], **how: Any) -> Job:
    how = {"samples": 60 * workers + 3, "settings": MOMENTUM, **how}
    return Job(
        "diloco",
        workers=workers,
        numel=50,
        bucket=11,
        schedule=lambda samples: 0.05 if samples < 100 else 0.02,
        slowdown={0: 2.0},
        jitter=0.3,
        cluster=any_network(workers + 10, workers),
        seed=workers,
        **{**how, "settings": {**how["settings"], "diloco": diloco}},
    )


RULES = [
    {"steps": 3},
    {"steps": 3, "outer_lr": 0.4, "outer_momentum": 0.0},
    {"steps": 6, "fragments": 3},
    {"steps": 6, "fragments": 3, "overlap": 1},
    {"steps": 6, "fragments": 2, "overlap": 3, "blend": 0.5, "outer_lr": 0.4},
    {"steps": 4, "fragments": 4, "overlap": 1, "blend": 1.0},
]


@pytest.mark.sample(8)
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_diloco_equals_independent_transcription(
    workers: int, segments: int, rule: dict[str, Any]
) -> None:
    this = job(workers, rule, segments=segments)
    end = run(this)
    end.check_accounts()
    expected = Transcription(this).models[0].float()
    torch.testing.assert_close(end.locals[0], expected, rtol=1e-4, atol=1e-5)
    for mine in end.locals:
        assert torch.equal(mine, end.locals[0])


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_diloco_with_rate_one_and_no_momentum_equals_local_sgd(workers: int, segments: int) -> None:
    averaging = {"steps": 4, "outer_lr": 1.0, "outer_momentum": 0.0}
    ours = run(job(workers, averaging, segments=segments))
    theirs = job(workers, {}, segments=segments)
    theirs.algorithm = "local-sgd"
    theirs.settings = {**MOMENTUM, "local_sgd": {"steps": 4}}
    for mine, other in zip(ours.locals, run(theirs).locals, strict=True):
        assert torch.equal(mine, other)


def test_trained_model_with_rate_one_and_no_momentum_is_that_of_local_sgd(tmp_path: Path) -> None:
    """The model of local SGD is collected as a mean, which fp32 may round for equal values too."""
    options = {"diloco": {"steps": 4, "outer_lr": 1.0, "outer_momentum": 0.0}}
    options["local_sgd"] = {"steps": 4}
    models = []
    for name in ("diloco", "local-sgd"):
        settings = {"checkpoint_every": "never", "lr": 0.05, **options}
        plan = Schedule(name, 3, 0, 0, 240, {}, settings, 0, 3, False)
        models.append(play(plan, tmp_path / name).models[0])
    assert torch.equal(*models)


@pytest.mark.parametrize("seed", range(200))
def test_fragments_contain_every_value_once(seed: int) -> None:
    """Layouts with tensors larger than a fragment, and with thousands of small ones."""
    r = random.Random(seed)
    numel = r.choice([r.randint(1, 60), r.randint(1, 100_000)])
    layout = cut(numel, 1, r.choice([1e-6, 1e-5, 1e-4, 0.01, 4.0]), 16.0)
    number = r.randint(1, min(numel, 40))
    parts = fragments(layout, number)
    flat = [bucket for fragment in parts for bucket in fragment]
    assert [bucket.index for bucket in flat] == list(range(len(flat)))
    assert flat[0].start == 0 and flat[-1].stop == numel
    assert all(a.stop == b.start for a, b in pairwise(flat))
    sizes = [sum(bucket.numel for bucket in fragment) for fragment in parts]
    assert len(sizes) == number and max(sizes) - min(sizes) <= 1
    assert max(bucket.numel for bucket in flat) <= layout.largest


def test_workers_that_never_move_keep_their_model() -> None:
    still = job(3, {"steps": 4, "fragments": 2, "overlap": 1}, settings=PLAIN)
    still.schedule = lambda samples: 0.0
    for mine in run(still).locals:
        assert torch.equal(mine, flat_start(still.numel))


def draw_settings(r: random.Random) -> dict[str, Any]:
    number = r.randint(1, 4)
    steps = number * r.randint(1, 4)
    blend = r.choice([0.0, 0.5])
    overlap = r.randint(0, steps // number - (number == 1 and not blend))
    momentum = r.choice([0.0, 0.9])
    return {
        "diloco": {
            "steps": steps,
            "fragments": number,
            "overlap": overlap,
            "blend": blend,
            "outer_momentum": momentum,
        }
    }


@pytest.mark.parametrize("seed", range(32))
def test_diloco_counters_balance_under_any_conditions(seed: int) -> None:
    end = run(any_lockstep_job("diloco", seed, draw_settings))
    end.check_accounts()
    for mine in end.locals:
        assert torch.equal(mine, end.locals[0])


@pytest.mark.long
def test_diloco_converges_to_known_minimum() -> None:
    this = Job("diloco", workers=4, samples=8000, noise=0.0, schedule=lambda samples: 0.2)
    this.settings = {"momentum": 0.5, "weight_decay": 0.0, "diloco": {"steps": 5}}
    assert (run(this).model - Quadratic(this.numel).optimum).abs().max() < 1e-3


@pytest.mark.parametrize(("wire", "width"), [("fp32", 4), ("bf16", 2)])
@pytest.mark.parametrize("number", [1, 3])
def test_diloco_sends_two_models_every_h_steps(number: int, wire: str, width: int) -> None:
    workers = 4
    this = Job("diloco", workers=workers, numel=40_000, samples=workers * 4 * 12)
    this.bucket = 10_000
    this.settings = {**PLAIN, "wire": wire, "diloco": {"steps": 3, "fragments": number}}
    sent = [worker.traffic.bytes_sent / 12 for worker in run(this).workers]
    models = 4 if number == 1 else 5  # the end of the segment averages what fragments have left
    expected = 2 * (workers - 1) / workers * 40_000 * width * models / 12
    assert sum(sent) / workers == pytest.approx(expected, abs=150)  # sample leases: 72 bytes


def test_overlap_hides_the_sum_behind_computing() -> None:
    """Links on which a fragment's sum takes as long as two steps."""
    times = {}
    for overlap in (0, 3):
        this = Job("diloco", workers=2, numel=40_000, samples=2 * 4 * 24, jitter=0.0)
        this.settings = {**PLAIN, "diloco": {"steps": 6, "fragments": 2, "overlap": overlap}}
        this.cluster = any_network(0, 2).model_copy(
            update={
                "hosts": 2,
                "bandwidth_gbit": 20_000 * 32 / 2e9,
                "latency_us": 0.0,
                "delay_us": 0.0,
                "message_overhead_us": 0.0,
                "pauses": (),
            }
        )
        times[overlap] = sum(worker.traffic.waiting for worker in run(this).workers)
    assert times[3] < 0.3 * times[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"steps": 10, "fragments": 4},
            "--diloco-steps 10 must be a multiple of --diloco-fragments 4. Use "
            "--diloco-steps 8 or 12.",
        ),
        ({"steps": 2, "fragments": 3}, "must be a multiple of --diloco-fragments 3. Use .* 3[.]"),
        ({"steps": 8, "fragments": 4, "overlap": 3}, "Use --diloco-overlap 2 or less"),
        ({"steps": 8, "overlap": 8}, "Use --diloco-overlap 7 or less, or a larger --diloco-blend"),
    ],
)
def test_diloco_rejects_rounds_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        checked_algorithm(RunOptions.model_validate({"algorithm": "diloco", "diloco": options}), 4)


def test_new_group_continues_from_the_mean_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure may interrupt a round, in which their models differ."""
    saved, merged = [], []
    state_dict, resize = DilocoWorker.state_dict, DilocoWorker.resize

    def note_saved(worker: DilocoWorker) -> dict[str, Any]:
        saved.append(worker.x.clone())
        return state_dict(worker)

    def note_merged(worker: DilocoWorker, state: MergedState) -> None:
        resize(worker, state)
        merged.append((len(saved), worker.x.clone()))

    monkeypatch.setattr(DilocoWorker, "state_dict", note_saved)
    monkeypatch.setattr(DilocoWorker, "resize", note_merged)
    words = ["--algorithm", "diloco", "--diloco-steps", "1000", "--wire", "int8", "--workers", "4"]
    words += ["--failures", "3=2.5", "--compute-time", "1", "--samples", "1280", "--quiet"]
    simulate(parse(SimulateOptions, [*words, "--run-dir", str(tmp_path / "run")], "", ""))
    count, start = merged[0]
    models = torch.stack(saved[count - 3 : count])
    assert not torch.allclose(models[0], models[1])
    torch.testing.assert_close(start, models.mean(0))
