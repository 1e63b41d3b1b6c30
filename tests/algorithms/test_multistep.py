"""Multistep: equality with one process that has all batches, traffic and waiting."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms import registry
from aladdin_mpi.algorithms.multistep import MultistepWorker
from aladdin_mpi.algorithms.multistep_hooks import choose, cut_at_layers
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import DenseLayer, Replica, outline
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.run import trainer
from tests import loop_lab
from tests.checks import check_killed_and_resumed
from tests.commands import simulate, summary
from tests.multistep_lab import CLASSES, Job, Result, alone, run, small
from tests.quadratic import network

GRADIENTS = {"multistep": {"exchange": "gradients"}}
ACTIVATIONS = {"multistep": {"exchange": "activations"}}
MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}
PLAIN = {"momentum": 0.0, "weight_decay": 0.0}
TINY = {"bucket_mb": 200e-6}  # 50 values: several buckets for a layer
WHOLE = {"bucket_mb": 10.0}  # one bucket for all layers


def assert_equal(results: list[Result], expected: Tensor, tolerance: float = 1e-5) -> None:
    """Check that all ranks have the same bits, close to the expected values."""
    for result in results[1:]:
        assert torch.equal(result.x, results[0].x)
    assert torch.allclose(results[0].x, expected, rtol=tolerance, atol=tolerance)


def moved(job: Job) -> float:
    return (alone(job) - Replica(job.module()).parameters).abs().max().item()


# -- equal to one process -----------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
@pytest.mark.parametrize(
    "workers", [1, 2, 3, 8, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 5))]
)
def test_multistep_equals_one_process(workers: int, exchange: dict[str, Any]) -> None:
    # The last round is uneven, and with 8 workers there are fewer samples than workers.
    job = Job(workers, 4, workers * 4 * 6 + 7, settings={**MOMENTUM, **TINY, **exchange})
    assert moved(job) > 0.05
    results = run(job)
    assert_equal(results, alone(job))
    last = [result.leases[-1].size for result in results]
    assert workers == 1 or min(last) < max(last) or len({len(r.leases) for r in results}) > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
@pytest.mark.parametrize("buckets", [TINY, WHOLE, {"bucket_mb": 0.003}], ids=["tiny", "one", "few"])
@pytest.mark.parametrize(
    "sgd",
    [PLAIN, pytest.param(MOMENTUM, marks=pytest.mark.long), {**MOMENTUM, "nesterov": True}],
    ids=["plain", "momentum", "nesterov"],
)
def test_multistep_equals_one_process_for_any_optimizer_and_buckets(
    sgd: dict[str, Any], buckets: dict[str, Any], exchange: dict[str, Any]
) -> None:
    job = Job(3, 4, 100, settings={**sgd, **buckets, **exchange})
    assert_equal(run(job), alone(job))


@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
def test_multistep_equals_one_process_with_segments_and_passes(exchange: dict[str, Any]) -> None:
    job = Job(3, 6, 150, segments=3, passes=3, settings={**MOMENTUM, **exchange})
    results = run(job)
    assert_equal(results, alone(job))
    assert all(piece.by_errors for piece in results[0].role.dense)


def test_multistep_equals_one_process_in_run_shorter_than_a_round() -> None:
    job = Job(4, 4, 2, settings={**PLAIN, **ACTIVATIONS})
    assert_equal(run(job), alone(job))


def test_multistep_keeps_double_precision_in_weights() -> None:
    job = Job(3, 4, 60, dtype=torch.float64, settings={**MOMENTUM, **GRADIENTS})
    results = run(job)
    assert_equal(results, alone(job), 1e-6)
    assert not torch.equal(results[0].x, results[0].x.float().double())


@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
def test_multistep_rounds_gradients_but_not_weights_to_bf16(exchange: dict[str, Any]) -> None:
    job = Job(3, 4, 60, wire=torch.bfloat16, settings={**MOMENTUM, **exchange})
    results = run(job)
    assert_equal(results, alone(job), 0.05)
    x = results[0].x
    assert (x - alone(job)).abs().max() > 1e-6  # gradients are rounded
    assert (x != x.bfloat16().float()).float().mean() > 0.9  # weights are not


def test_multistep_shards_momentum() -> None:
    results = run(Job(4, 4, 50, settings={**MOMENTUM, **GRADIENTS}))
    lengths = [result.state["optimizer"]["velocity"].numel() for result in results]
    assert sum(lengths) == results[0].x.numel()
    assert max(lengths) <= -(-results[0].x.numel() // 4) + len(results[0].role.pieces)
    assert all(result.state["optimizer"]["velocity"].abs().max() > 0 for result in results)


# -- unusual models --------------------------------------------------------------------------
class Tied(nn.Module):
    """Two dense layers share one weight; a third is frozen, a fourth is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(9, 9)
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(36, 36).requires_grad_(False)
        self.head = nn.Linear(36, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.second(self.first(images.flatten(1)).tanh()).tanh()
        return self.head(self.frozen(hidden))


class One(nn.Module):
    """A single parameter of few values, used by no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.zeros(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.scores * images.mean((1, 2, 3))[:, None]


class Functional(nn.Module):
    """Uses a layer's parameters without calling it, and rows that are not samples."""

    def __init__(self) -> None:
        super().__init__()
        self.borrowed = nn.Linear(36, 6)
        self.rows = nn.Linear(6, 6)
        self.twice = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES)
        self.head.weight.requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        start = nn.functional.linear(images.flatten(1), self.borrowed.weight, self.borrowed.bias)
        rows = self.rows(images[:, 0]).mean(1)
        return self.head(self.twice(self.twice((start + rows).tanh())))


def first_layer_alone() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))


def one_matrix() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES, bias=False))


@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
@pytest.mark.parametrize("build", [Tied, One, Functional, first_layer_alone, one_matrix])
def test_multistep_trains_unusual_models(
    build: Callable[[], nn.Module], exchange: dict[str, Any]
) -> None:
    job = Job(4, 4, 70, build=build, settings={**MOMENTUM, **exchange, **TINY}, lr=0.05)
    results = run(job)
    # torch.optim skips parameters without a gradient; here weight decay acts on them too.
    used = torch.ones_like(results[0].x, dtype=torch.bool)
    if build is Tied:
        used[-90:] = False
    for result in results:
        result.role.x[~used] = 0.0
    expected = alone(job)
    expected[~used] = 0.0
    assert_equal(results, expected)


def exchanging(build: Callable[[], nn.Module]) -> dict[str, bool | None]:
    (result, *_) = run(Job(2, 4, 50, build=build, settings={**PLAIN, **ACTIVATIONS}))
    return {piece.layer.name: piece.exchanging for piece in result.role.dense}


def test_multistep_exchanges_gradients_of_unsupported_layers() -> None:
    assert exchanging(small) == {"7": True, "5": True, "3": True}
    assert exchanging(Tied) == {"head": True, "unused": False}
    assert exchanging(Functional) == {"twice": False, "rows": False, "borrowed": False}


def test_multistep_exchanges_gradients_if_one_rank_reuses_layer() -> None:
    built: list[nn.Module] = []

    class Uneven(nn.Module):
        """The first instance calls its layer twice."""

        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, CLASSES)
            built.append(self)

        def forward(self, images: Tensor) -> Tensor:
            output: Tensor = self.head(images.flatten(1))
            return output + 0 * self.head(images.flatten(1)) if self is built[0] else output

    job = Job(3, 4, 60, build=Uneven, settings={**MOMENTUM, **ACTIVATIONS})
    results = run(job)
    assert [piece.exchanging for result in results for piece in result.role.dense] == [False] * 3
    assert_equal(results, alone(job))


def test_multistep_ignores_rank_without_samples() -> None:
    job = Job(4, 4, 6, segments=2, settings={**MOMENTUM, **ACTIVATIONS})
    results = run(job)
    assert min(len(result.leases) for result in results) < 2
    assert all(piece.by_errors for result in results for piece in result.role.dense)
    assert_equal(results, alone(job))


def test_multistep_rejects_layer_whose_use_changes() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, CLASSES)
            self.calls = 0

        def forward(self, images: Tensor) -> Tensor:
            self.calls += 1
            values = images.flatten(1)
            return self.head(values) + (self.head(values) if self.calls > 3 else 0)

    with pytest.raises(UserError, match=r"layer head: .*--multistep-exchange gradients"):
        run(Job(2, 4, 100, build=Changing, settings={**PLAIN, **ACTIVATIONS}))


def test_multistep_rejects_second_use_of_weight() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(36, CLASSES)

        def forward(self, images: Tensor) -> Tensor:
            output: Tensor = self.head(images.flatten(1))
            return output + self.head.weight.sum()

    with pytest.raises(UserError, match=r"layer head: .*\bweight\b"):
        run(Job(2, 4, 100, build=Beside, settings={**PLAIN, **ACTIVATIONS}))


def test_multistep_leaves_module_and_copies_without_hooks() -> None:
    copies: list[nn.Module] = []
    outputs: list[Tensor] = []

    def probe(role: MultistepWorker) -> None:
        module = role.worker.model.module
        assert module is not None
        if not copies:
            copies.append(copy.deepcopy(module))
            for parameter in copies[0].parameters():
                parameter.data.zero_()
            next(copies[0].children())._forward_hooks.clear()  # this probe
            outputs.append(copies[0](torch.ones(2, 1, 6, 6)))

    (result, *_) = results = run(Job(2, 4, 50, settings=ACTIVATIONS, probe=probe))
    assert outputs[0].abs().max() == 0  # the copy has used its own parameters
    assert_equal(results, alone(Job(2, 4, 50, settings=ACTIVATIONS)))
    module = result.role.worker.model.module
    assert module is not None
    assert not any(part._forward_pre_hooks for part in module.modules())
    assert all(parameter.requires_grad for parameter in module.parameters())


# -- options that act on the whole gradient ----------------------------------------------------
@pytest.mark.parametrize("settings", [{"clip": 0.1}, {"max_loss": 9.0}, {"wait_free": False}])
def test_multistep_exchanges_gradients_with_options_on_whole_gradient(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Matches ``bsp``, which clips each worker's gradient too."""
    job = Job(settings={**PLAIN, **settings})
    assert not run(job)[0].role.dense
    assert run(Job(settings=PLAIN))[0].role.dense
    multistep, bsp = (
        loop_lab.train(tmp_path / name, name, **settings) for name in ("multistep", "bsp")
    )
    assert multistep.moved > 1e-3
    assert torch.allclose(multistep.x, bsp.x, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"clip": 0.1}, {"max_loss": 9.0}, {"wait_free": False}],
    ids=lambda settings: next(iter(settings)),
)
def test_multistep_rejects_activations_with_options_on_whole_gradient(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    (name,) = settings
    with pytest.raises(UserError, match=rf"exchange.*activations .*\b{name}\b"):
        loop_lab.train(tmp_path / "run", "multistep", **{**ACTIVATIONS, **settings})


def test_multistep_exchanges_gradients_if_loop_clips_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = [
        loop_lab.train(tmp_path / name, name, clipping, **settings)
        for name, settings in (("multistep", {"quiet": False, **ACTIVATIONS}), ("bsp", {}))
    ]
    assert torch.allclose(trained[0].x, trained[1].x, atol=1e-6)
    assert re.search(r"\b0 .*gradients\b.*\bclips\b", capsys.readouterr().err)


def test_multistep_resumed_loop_must_not_start_clipping(tmp_path: Path) -> None:
    loop_lab.train(tmp_path / "run", "multistep")
    with pytest.raises(UserError, match=r"run\.clip_grad_norm_\(\) .*gradients.*activations"):
        loop_lab.train(tmp_path / "run", "multistep", clipping, samples=96, resume="auto")


def clipping(run: Any, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    loss = loop_lab.loss_of(model, inputs, labels)
    loss.backward()
    run.clip_grad_norm_(0.1)
    run.step(loss)


# -- bytes -------------------------------------------------------------------------------------
def sent(job: Job) -> int:
    """Return the bytes sent by one rank's collectives in a step of full batches."""
    totals = []
    for rounds in (4, 6):
        job.samples = rounds * job.workers * job.batch
        totals.append(run(job)[-1].traffic.bytes_sent)
    return (totals[1] - totals[0]) // 2


DENSE = [(64, 50), (50, 7), (7, CLASSES)]


def divisible() -> nn.Module:
    """Return a model whose layers can be split among 2 or 4 ranks without padding."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False), nn.Flatten(), nn.Linear(64, 40), nn.Linear(40, CLASSES + 1)
    )


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_multistep_gradient_exchange_costs_an_all_reduce(workers: int) -> None:
    job = Job(workers, 4, build=divisible, settings={**PLAIN, **GRADIENTS})
    values = 36 + 64 * 40 + 40 + 40 * 4 + 4
    assert sent(job) == 4 * 2 * (workers - 1) * values // workers


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 4])
def test_multistep_activations_cost_matches_formula(workers: int, batch: int) -> None:
    job = Job(workers, batch, build=divisible, settings={**PLAIN, **ACTIVATIONS})
    others = workers - 1
    values = 2 * others * 36 / workers
    for inputs, outputs in [(64, 40), (40, 4)]:
        values += others / workers * batch * inputs + others * batch * outputs
        values += others / workers * inputs * outputs
    assert sent(job) == 4 * values


def test_multistep_sends_weights_in_full_precision() -> None:
    job = Job(4, 4, build=divisible, settings={**PLAIN, **GRADIENTS}, wire=torch.bfloat16)
    assert sent(job) == (2 + 4) * 3 * (36 + 64 * 40 + 40 + 40 * 4 + 4) // 4


@pytest.mark.parametrize("batch", [1, 2, 4, 7, 8, 9, 16, 64])
@pytest.mark.parametrize("workers", [2, 4, 8])
def test_multistep_auto_exchange_follows_formula(batch: int, workers: int) -> None:
    dense = outline(small()).dense
    chosen = choose(dense, "auto", workers, batch)
    names = {layer.name for layer in chosen}
    for name, (inputs, outputs) in zip(["3", "5", "7"], DENSE, strict=True):
        assert (name in names) == (batch * (inputs + workers * outputs) < inputs * outputs)
    assert choose(dense, "gradients", workers, batch) == []
    assert choose(dense, "activations", workers, batch) == list(dense)


def test_multistep_auto_exchange_sends_least() -> None:
    def bytes_of(exchange: str, batch: int) -> int:
        settings = {**PLAIN, "multistep": {"exchange": exchange}}
        return sent(Job(2, batch, build=divisible, settings=settings))

    # 4 (64 + 2*40) < 64 * 40, but 4 (40 + 2*4) > 40 * 4: a mixture.
    auto, gradients, activations = (bytes_of(e, 4) for e in ("auto", "gradients", "activations"))
    assert auto < activations < gradients
    assert bytes_of("auto", 64) == bytes_of("gradients", 64) < bytes_of("activations", 64)


# -- buckets aligned with layers -----------------------------------------------------------
def bounds(layers: list[int], most: int, apart: tuple[DenseLayer, ...] = ()) -> list[int]:
    layout = cut_at_layers(layers, apart, sum(layers), (most + 0.5) * 4e-6)
    assert [bucket.index for bucket in layout.buckets] == list(range(len(layout.buckets)))
    assert all(a.stop == b.start for a, b in pairwise(layout.buckets))
    assert layout.buckets[0].start == 0 and layout.buckets[-1].stop == sum(layers)
    return [bucket.stop for bucket in layout.buckets]


def test_layer_cut_joins_small_layers_and_splits_large_ones() -> None:
    assert bounds([3, 4, 5], 100) == [12]
    assert bounds([3, 4, 5], 7) == [7, 12]
    assert bounds([3, 4, 5], 6) == [3, 7, 12]
    assert bounds([2, 21, 2], 10) == [2, 9, 16, 23, 25]
    assert bounds([2, 10, 2], 10) == [2, 12, 14]


def test_layer_cut_gives_separate_layers_their_own_buckets() -> None:
    layer = DenseLayer("fc", 2, 20, slice(5, 45), slice(3, 5))
    assert bounds([3, 42, 2, 2], 10, (layer,)) == [3, 5, 45, 49]
    bare = DenseLayer("fc", 2, 20, slice(0, 40), None)
    assert bounds([40, 2], 10, (bare,)) == [40, 42]


# -- waiting ------------------------------------------------------------------------------------
SLOW = network(local_bandwidth_gbit=1e-3)


def deep() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(36, 100)]
    for _ in range(6):
        layers += [nn.Tanh(), nn.Linear(100, 100)]
    return nn.Sequential(*layers, nn.Linear(100, CLASSES))


def waiting_job(**settings: Any) -> Job:
    return Job(
        2,
        4,
        160,
        build=deep,
        seconds=3.0,
        cluster=SLOW,
        settings={**PLAIN, **GRADIENTS, "bucket_mb": 0.0405, **settings},
    )


class Impatient(MultistepWorker):
    """Waits for all layers at the start of the forward pass."""

    def forward(self, bucket: Any) -> None:
        self.finish_all()
        super().forward(bucket)


def use_worker(monkeypatch: pytest.MonkeyPatch, kind: type[MultistepWorker]) -> None:
    """Make the next runs use this class of workers."""
    registered = registry.implementation(find_algorithm("multistep"))
    monkeypatch.setitem(registry._IMPLEMENTATIONS, "multistep", replace(registered, worker=kind))


def test_multistep_layer_waits_only_for_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    patient = run(waiting_job())
    use_worker(monkeypatch, Impatient)
    impatient = run(waiting_job())
    assert isinstance(impatient[0].role, Impatient)
    assert torch.equal(patient[0].x, impatient[0].x)
    # 20 steps of 3 s, a third of which is the forward pass. It hides most of the gathers,
    # which take 1 s.
    assert patient[0].seconds < impatient[0].seconds - 20 * 0.7
    assert patient[0].traffic.waiting < impatient[0].traffic.waiting - 20 * 0.7
    assert patient[0].seconds > 20 * 3.0


def test_multistep_forward_pass_waits_for_parameters() -> None:
    """Received parameters are in place when their layer is computed."""
    seen: list[int] = []

    def probe(role: MultistepWorker) -> None:
        seen.append(role.gathering)

    run(Job(2, 4, 80, settings=GRADIENTS, cluster=SLOW, probe=probe))
    assert seen and not any(seen)


# -- no interleaving hangs -------------------------------------------------------------------
@pytest.mark.sample(2)
@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
@pytest.mark.parametrize("seed", range(6))
def test_multistep_completes_under_any_interleaving(seed: int, exchange: dict[str, Any]) -> None:
    workers = [2, 3, 5, 7, 11, 16][seed]
    job = Job(
        workers,
        2,
        workers * 2 * 5 + 3,
        settings={**MOMENTUM, **exchange, **(TINY if seed % 2 else {})},
        cluster=network(delay_us=300_000, bandwidth_gbit=0.001, hosts=min(workers, 4)),
        slowdown={0: 3.0, workers - 1: 1.7},
        jitter=0.5,
        seed=seed,
        build=Tied if seed == 2 else small,
    )
    results = run(job)
    for result in results[1:]:
        assert torch.equal(result.x, results[0].x)
    if job.build is small:
        assert_equal(results, alone(job))
    traffic = [result.traffic for result in results]
    assert sum(t.bytes_sent for t in traffic) == sum(t.bytes_received for t in traffic)


# -- the model between steps -----------------------------------------------------------------
ASKED = 500


@pytest.mark.long
def test_multistep_model_copy_belongs_to_one_step() -> None:
    """The copy is requested while only some layers have their new parameters."""
    shots: list[Tensor] = []
    late: list[bool] = []

    def shoot(role: MultistepWorker) -> None:
        layout = role.worker.layout
        shots.append(torch.cat([role.part(bucket) for bucket in layout.buckets]).clone())

    def probe(role: MultistepWorker) -> None:
        transport = role.worker.transport
        if transport.rank == 0 and role.worker.computed == 0:

            def asked(source: int, message: Tensor) -> None:
                before = len(shots)
                role.when_whole(lambda: shoot(role))
                late.append(len(shots) == before)

            transport.on_message(ASKED, 1, asked)
        elif transport.rank == 1:
            for rank in (0, 0):
                transport.isend(torch.zeros(1, dtype=torch.uint8), rank, ASKED)

    slow = network(local_bandwidth_gbit=2e-4, delay_us=100_000)
    job = Job(3, 4, 240, seconds=1.0, jitter=0.5, cluster=slow, probe=probe)
    job.settings = {**PLAIN, **GRADIENTS, **TINY}
    results = run(job)
    assert_equal(results, alone(job))
    steps = []
    for rounds in range(21):
        job.samples = rounds * 12
        steps.append(alone(job))
    assert len(shots) == 2 * 20
    assert any(late) and not all(late)
    for shot in shots:
        assert min((shot - step).abs().max().item() for step in steps) < 1e-5
    assert min((a - b).abs().max().item() for a, b in pairwise(steps)) > 1e-4


# -- from the command line --------------------------------------------------------------------
PLAN: list[object] = [
    "--algorithm",
    "multistep",
    "--workers",
    3,
    "--hosts",
    2,
    "--epochs",
    3,
    "--seed",
    5,
]
PLAN += ["--model", "mortal:build", "--jitter", 0.3, "--slowdown", "1=2", "--delay-us", 500]
PLAN += ["--batch-size", 24, "--log-every", 300, "--eval-every", 0.5]


@pytest.mark.sample(1)
@pytest.mark.parametrize("exchange", ["auto", "activations"])
def test_multistep_resumed_run_is_bit_identical(tmp_path: Path, exchange: str) -> None:
    # Step 45 of one worker; the run has 60 steps.
    whole = check_killed_and_resumed(tmp_path, 45, *PLAN, "--multistep-exchange", exchange)
    assert summary(whole)["test_accuracy"] > 0.9


BIG = "tests.algorithms.programs.big_model:build"
TIMED: list[object] = ["--algorithm", "multistep", "--compute", "timed", "--model", BIG]
TIMED += ["--samples", 64 * 4 * 200, "--batch-size", 64, "--workers", 4, "--bucket-mb", 0.5]


@pytest.mark.long
def test_multistep_timed_computing_uses_layers_of_model(tmp_path: Path) -> None:
    outcome = {}
    for exchange in ("auto", "gradients"):
        run_dir = tmp_path / exchange
        completed = simulate(run_dir, *TIMED, "--multistep-exchange", exchange)
        assert ("(1000 x 2000)" in completed.stderr) == (exchange == "auto")
        outcome[exchange] = summary(run_dir)["bytes_sent_per_step"]
    rest = 64 * 1000 + 2000 * 10
    # The workers' last reports do not include the end of the last step.
    assert outcome["gradients"] == pytest.approx(4 * 2 * 3 / 4 * (rest + 2_000_000), rel=0.005)
    others = 64 * 1000 * 3 / 4 + 64 * 2000 * 3 + 2_000_000 * 3 / 4
    assert outcome["auto"] == pytest.approx(4 * (2 * 3 / 4 * rest + others), rel=0.005)
    assert outcome["auto"] < outcome["gradients"]


class Late(MultistepWorker):
    """Sends activations only when backward begins."""

    def forward(self, bucket: Any) -> None:
        self.finish(self.pieces[bucket.index])


def test_multistep_sends_activations_during_forward_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"local_bandwidth_gbit": 0.2}
    seconds = {}
    for kind in (MultistepWorker, Late):
        use_worker(monkeypatch, kind)
        options = SimulateOptions(
            algorithm="multistep",
            compute="timed",
            model=BIG,
            samples=64 * 2 * 10,
            batch_size=64,
            workers=2,
            compute_time=1.0,
            forward_share=0.9999,  # otherwise backward would hide them as well
            cluster=Cluster.model_validate(cluster),
            run_dir=tmp_path / kind.__name__,
            quiet=True,
        )
        seconds[kind] = trainer.simulate(options)["seconds"]
    # Half of 64 x 1000 activations of 4 bytes take 5 ms.
    assert seconds[MultistepWorker] < seconds[Late] - 10 * 0.004
