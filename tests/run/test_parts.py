"""Models whose parts are stepped one after another in each batch, such as a GAN's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.messages import check_names

SAMPLES, BATCH = 48, 4
POINTS = TensorDataset(
    torch.randn(SAMPLES, 2, generator=torch.Generator().manual_seed(1)) + torch.tensor([3.0, -2.0]),
    torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(2)),
)
"""Points, and the generator's inputs."""
CANNOT = ("eamsgd", "multistep")
"""Algorithms that step every parameter."""

Optimizers = list[torch.optim.Optimizer]


def layers(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 8, bias=False), norm(8), nn.LeakyReLU(0.2), nn.Linear(8, outputs)
    )


def gan(norm: Callable[[int], nn.Module] = lambda size: nn.Identity()) -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"D": layers(2, 1, norm), "G": layers(3, 2, norm)})


def adams(model: nn.ModuleDict) -> Optimizers:
    return [
        torch.optim.Adam(model[name].parameters(), rate, betas=(0.5, 0.999), eps=1e-4)
        for name, rate in (("D", 0.02), ("G", 0.01))
    ]


def momenta(model: nn.ModuleDict) -> Optimizers:
    return [
        torch.optim.SGD(model[name].parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        for name in ("D", "G")
    ]


def adafactors(model: nn.ModuleDict) -> Optimizers:
    return [torch.optim.Adafactor(model[name].parameters(), 0.02) for name in ("D", "G")]


def judged(scores: Tensor, real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


Trace = list[tuple[float, float]]
"""Losses of the discriminator and the generator by batch."""
Step = Callable[[str, Tensor], None]
"""Ends the step of a part, given its loss."""


def train_batch(
    model: nn.ModuleDict, points: Tensor, noise: Tensor, step: Step, trains_maker: bool = True
) -> tuple[float, float]:
    """Compute as the DCGAN example of PyTorch does, with a step after each part's backward."""
    real = judged(model["D"](points), True)
    real.backward()
    made = model["G"](noise)
    fake = judged(model["D"](made.detach()), False)
    fake.backward()
    step("D", real + fake)
    if not trains_maker:
        return (real + fake).item(), 0.0
    loss = judged(model["D"](made), True)
    loss.backward()
    step("G", loss)
    return (real + fake).item(), loss.item()


@dataclass
class Trained:
    """Results of a run: the flat model, each worker's samples and losses, rank 0's summary."""

    x: Tensor
    batches: list[list[list[Tensor]]]
    traces: list[Trace]
    summary: dict[str, Any]
    states: dict[str, Any] = field(default_factory=dict)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    folder: Path,
    algorithm: str,
    workers: int,
    make: Callable[[nn.ModuleDict], Optimizers] | None = adams,
    *,
    model: Callable[[], nn.ModuleDict] = gan,
    maker_every: int = 1,
    seed: int = 0,
    cluster: Cluster | None = None,
    **settings: Any,
) -> Trained:
    """Train in simulation."""
    servers = settings.get("servers", 1) if find_algorithm(algorithm).has_servers else 0
    batches: list[list[list[Tensor]]] = [[] for _ in range(workers)]
    traces: list[Trace] = [[] for _ in range(workers)]

    def main(transport: Transport) -> tuple[Tensor, dict[str, Any]]:
        module = model()
        own: dict[str, Any] = {} if make is None else {"optimizer": make(module)}
        options = {
            **({} if "epochs" in settings else {"samples": SAMPLES}),
            "batch_size": BATCH,
            "compute_time": 0.01,
            "run_dir": folder / "run",
            "quiet": True,
            "seed": seed,
            "parts": ["D", "G"],
            **own,
            **settings,
        }
        run = DataParallel(module, transport=transport, algorithm=algorithm, **options)
        for points, noise in run.batches(POINTS):
            number = transport.rank - servers
            batches[number].append([points.clone(), noise.clone()])
            trains_maker = len(batches[number]) % maker_every == 0

            def step(part: str, loss: Tensor) -> None:
                run.step(loss, part=part)

            trace = train_batch(module, points, noise, step, trains_maker)
            traces[number].append(trace)
        return flat(module), run.summary

    results: list[Any] = VirtualCluster(servers + workers, cluster or Cluster(hosts=2), seed).run(
        main
    )
    models = [each[0] for each in results if each is not None]
    summaries = [each[1] for each in results if each is not None and each[1]]
    return Trained(models[0], batches, traces, summaries[0])


def by_torch(
    batches: Sequence[Sequence[Sequence[Tensor]]],
    make: Callable[[nn.ModuleDict], Optimizers],
    model: Callable[[], nn.ModuleDict] = gan,
    maker_every: int = 1,
) -> tuple[Tensor, Trace]:
    """Train in one process on all workers' batches of a round."""
    module = model()
    optimizers = dict(zip(("D", "G"), make(module), strict=True))

    def step(part: str, loss: Tensor) -> None:
        optimizers[part].step()
        for each in optimizers.values():
            each.zero_grad()

    trace = []
    for number, together in enumerate(zip(*batches, strict=True), 1):
        points, noise = (torch.cat(each) for each in zip(*together, strict=True))
        trace.append(train_batch(module, points, noise, step, number % maker_every == 0))
    return flat(module), trace


def assert_equals_torch(
    trained: Trained, make: Callable[[nn.ModuleDict], Optimizers], **how: Any
) -> None:
    x, trace = by_torch(trained.batches, make, **how)
    torch.testing.assert_close(trained.x, x, rtol=1e-5, atol=5e-6)
    means = torch.tensor(trained.traces).mean(0)
    torch.testing.assert_close(means, torch.tensor(trace), rtol=1e-4, atol=1e-5)


# -- equality with torch ----------------------------------------------------------------------
@pytest.mark.parametrize("make", [adams, momenta, adafactors])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {}),
        ("ar-sgd", {"bucket_mb": 0.0001}),
        ("bsp", {"servers": 2}),
        ("local-sgd", {"local_sgd": {"steps": 1}}),
    ],
    ids=["ar-sgd", "small buckets", "bsp", "local-sgd"],
)
def test_parts_on_two_workers_equal_one_process_with_whole_batches(
    tmp_path: Path,
    algorithm: str,
    settings: dict[str, Any],
    make: Callable[[nn.ModuleDict], Optimizers],
) -> None:
    if algorithm == "bsp" and make is adafactors:
        pytest.skip("bsp takes optimizers by value only")
    if algorithm == "local-sgd" and make is not momenta:
        pytest.skip("the mean of models is a step along the mean gradient with SGD only")
    trained = train(tmp_path, algorithm, 2, make, **settings)
    assert_equals_torch(trained, make)
    assert trained.summary["samples"] == SAMPLES
    assert trained.summary["gradients_computed"] == 2 * SAMPLES / BATCH


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {}),
        ("asp", {}),
        ("aladdin", {"aladdin": {"pi": 1}}),
        ("local-sgd", {}),
    ],
    ids=str,
)
def test_parts_with_batch_norm_on_one_worker_equal_torch(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    def model() -> nn.ModuleDict:
        return gan(nn.BatchNorm1d)

    trained = train(tmp_path, algorithm, 1, adams, model=model, **settings)
    assert_equals_torch(trained, adams, model=model)


def test_last_part_may_be_left_out_of_batches(tmp_path: Path) -> None:
    """As in WGAN, whose generator is stepped once for several steps of the discriminator."""
    trained = train(tmp_path, "ar-sgd", 2, adams, maker_every=3)
    assert_equals_torch(trained, adams, maker_every=3)


# -- algorithms --------------------------------------------------------------------------------
def check_accounts(trained: Trained, samples: int) -> None:
    """Check that each batch is counted once, and the gradient of each part of it."""
    summary = trained.summary
    batches = [each for of_worker in trained.batches for each in of_worker]
    assert summary["samples"] == sum(len(points) for points, _ in batches) == samples
    assert summary["gradients_applied"] == summary["gradients_computed"] == 2 * len(batches)


@pytest.mark.sample(6)
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(CANNOT)))
def test_every_gradient_of_parts_is_counted_once(tmp_path: Path, algorithm: str) -> None:
    trained = train(tmp_path, algorithm, 4, momenta, jitter=0.3, slowdown={1: 3.0}, samples=70)
    check_accounts(trained, 70)
    assert trained.x.isfinite().all()
    assert not torch.allclose(trained.x, flat(gan()), atol=1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("aladdin-ahead", {}),
        ("aladdin", {"aladdin": {"pi": 2}}),
        ("asp", {}),
        ("bsp", {}),
        ("local-sgd", {"local_sgd": {"steps": 4}}),
    ],
    ids=str,
)
def test_generator_moves_to_the_points(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    start = distance(flat(gan()))
    for seed in range(3):
        folder = tmp_path / str(seed)
        trained = train(folder, algorithm, 3, seed=seed, jitter=0.3, epochs=6, **settings)
        check_accounts(trained, 6 * SAMPLES)
        assert distance(trained.x) < 0.8 * start


def distance(x: Tensor) -> float:
    """Return the distance between the means of the points and of those generated by a model."""
    model = gan()
    nn.utils.vector_to_parameters(x, model.parameters())
    points, noise = POINTS.tensors
    return (points.mean(0) - model["G"](noise).mean(0)).norm().item()


def test_batch_is_abandoned_when_its_group_is_revoked(tmp_path: Path) -> None:
    """A server fails; the surviving ranks form a new group in the middle of their batches."""
    cluster = Cluster(hosts=4, failures={1: 3.3})
    trained = train(tmp_path, "bsp", 3, momenta, cluster=cluster, servers=2, compute_time=1.0)
    summary = trained.summary
    assert len(summary["failures"]) == 1
    batches = sum(map(len, trained.batches))
    # Every worker has left the part of one batch that follows its lost gradient.
    assert summary["gradients_lost"] == 3
    assert summary["gradients_computed"] == 2 * batches - 3
    assert summary["gradients_applied"] == summary["gradients_computed"] - 3
    assert trained.x.isfinite().all()


# -- errors ------------------------------------------------------------------------------------
def run_steps(folder: Path, *steps: str | None, **settings: Any) -> str:
    """Call ``step()`` for these parts in each batch, and return the error."""

    def main(transport: Transport) -> None:
        model = gan()
        options: dict[str, Any] = {
            "optimizer": momenta(model),
            "algorithm": "ar-sgd",
            "samples": SAMPLES,
            "batch_size": BATCH,
            "compute_time": 0.01,
            "run_dir": folder / "run",
            "quiet": True,
            "parts": ["D", "G"],
            **settings,
        }
        run = DataParallel(model, transport=transport, **options)
        for points, noise in run.batches(POINTS):
            for part in steps:
                judged(model["D"](points + model["G"](noise)), True).backward()
                if part != "none":
                    run.step(part=part)

    with pytest.raises(UserError) as caught:
        VirtualCluster(2, Cluster(hosts=2), 0).run(main)
    return str(caught.value)


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        (["G", "D"], ["expected", "part='D'", "got part='G'", "order"]),
        (["D", "D"], ["expected", "part='G'", "got part='D'"]),
        (["D", None], ["expected", "part='G'", "got part=None"]),
        (["D", "judge"], ["expected", "part='G'", "got part='judge'"]),
        (["D", "none"], ["not called for a batch", "run.step(loss, part='G')"]),
        (["D", "G", "G"], ["without a batch", "once for each part"]),
    ],
    ids=str,
)
def test_step_of_another_part_than_the_next_is_refused(
    tmp_path: Path, steps: list[str | None], names: list[str]
) -> None:
    check_names(run_steps(tmp_path, *steps), "training loop:", *names)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"parts": ()}, ["run.step(part='D')", "parts=[...]"]),
        ({"parts": ["D", "judge"]}, ["parts:", "judge", "'D', 'G'"]),
        ({"parts": ["D", "D"]}, ["parts:", "each once"]),
        ({"parts": "DG"}, ["parts:", "list", "DG"]),
        ({"parts": ["D"]}, ["parts:", "G.0.weight", "none"]),
        ({"parts": ["D", "G", "G.0"]}, ["parts:", "G.0.weight", "'G' and 'G.0'"]),
        ({"parts": ["D", "G", "G.2"]}, ["parts:", "'G.2'", "no parameters"]),
        ({"accumulate": 2}, ["parts", "accumulate"]),
        ({"algorithm": "eamsgd", "optimizer": None}, ["parts", "eamsgd", "another algorithm"]),
        ({"wire": "int8"}, ["parts", "ar-sgd", "wire int8"]),
        ({"compression": "powersgd"}, ["parts", "ar-sgd", "compression"]),
    ],
    ids=str,
)
def test_parts_that_cannot_be_stepped_separately_are_refused(
    tmp_path: Path, settings: dict[str, Any], names: list[str]
) -> None:
    check_names(run_steps(tmp_path, "D", "G", **settings), *names)
