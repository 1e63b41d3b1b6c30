"""ar-sgd, local-sgd and diloco with quantised sums and sums of low rank."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.algorithms.diloco import fragments
from aladdin_mpi.allreduce.with_residual import residual_of
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.checks import checked_algorithm
from aladdin_mpi.options.run import RunOptions
from tests.drawn_jobs import any_lockstep_job
from tests.quadratic import Quadratic, noise_of
from tests.roles import Job, Outcome, run

SUMMING = ["ar-sgd", "diloco", "local-sgd"]
KINDS: dict[str, dict[str, Any]] = {
    "int8": {"wire": "int8"},
    "int4": {"wire": "int4"},
    "int2": {"wire": "int2"},
    "powersgd": {"compression": "powersgd"},
}
OWN: dict[str, dict[str, Any]] = {
    "ar-sgd": {},
    "local-sgd": {"local_sgd": {"steps": 4}},
    "diloco": {"diloco": {"steps": 4, "fragments": 2, "overlap": 1, "outer_momentum": 0.5}},
}
RATE = 0.4
algorithms = pytest.mark.parametrize("algorithm", SUMMING)
kinds = pytest.mark.parametrize("kind", KINDS)


class Matrices(Quadratic):
    """A quadratic problem whose parameters are two matrices and a vector."""

    def __init__(self, numel: int) -> None:
        super().__init__(numel)
        flat = [part.detach() for part in self.parts]
        self.parts = nn.ParameterList([flat[0], flat[1].view(10, -1), flat[2].view(5, -1)])


def job_of(algorithm: str, kind: str, **values: Any) -> Job:
    settings = {"momentum": 0.0, "weight_decay": 0.0, **OWN[algorithm], **KINDS.get(kind, {})}
    given: dict[str, Any] = {"numel": 1200, "bucket": 401, "samples": 640, "noise": 0.05}
    return Job(
        algorithm,
        schedule=lambda samples: RATE,
        jitter=0.2,
        settings=settings,
        **{"problem": Matrices, **given, **values},
    )


@cache
def in_fp32(algorithm: str) -> Outcome:
    return run(job_of(algorithm, "fp32"))


def distance(outcome: Outcome) -> float:
    """Return the distance from the minimum; at the start it is 1."""
    optimum = Quadratic(outcome.job.numel).optimum
    return float((outcome.model - optimum).norm() / (outcome.first - optimum).norm())


def residuals(outcome: Outcome) -> Tensor:
    """Return each worker's residual, one per row."""
    rows = []
    for worker in outcome.workers:
        codec: Any = worker.role.codec  # type: ignore[attr-defined]
        residual = residual_of(codec)
        assert residual is not None and residual.left is not None
        rows.append(residual.left)
    return torch.stack(rows)


@pytest.mark.sample(1)
@kinds
@algorithms
def test_compressed_sums_converge_with_equal_models_and_fewer_bytes(
    algorithm: str, kind: str
) -> None:
    whole, outcome = in_fp32(algorithm), run(job_of(algorithm, kind))
    outcome.check_accounts()
    assert (outcome.locals == outcome.locals[0]).all()
    assert distance(whole) < 0.1
    # A sum of rank 2 needs many steps for the ten directions of these matrices.
    worst = {"int8": 0.05, "int4": 0.05, "int2": 0.2, "powersgd": 0.05}
    if kind == "powersgd" and algorithm != "ar-sgd":
        worst[kind] = 0.75
    assert distance(outcome) < worst[kind]
    sent = [sum(rank.traffic.bytes_sent for rank in each.ranks) for each in (outcome, whole)]
    assert sent[0] < {"int8": 0.35, "int4": 0.25, "int2": 0.15, "powersgd": 0.6}[kind] * sent[1]
    assert residuals(outcome).any(1).all()


@kinds
@pytest.mark.parametrize("segments", [1, 2])
def test_no_progress_of_workers_is_lost(kind: str, segments: int) -> None:
    """The gradient of this problem is constant, so the mean of all steps is known."""
    this = job_of("local-sgd", kind, samples=160, noise=0.3, segments=segments, problem=Slope)
    end = run(this)
    steps = this.samples // (this.batch * this.workers)
    moved = end.model - end.first + residuals(end).mean(0)
    noise = torch.zeros(this.numel)
    for worker in range(this.workers):
        for sample in range(steps * this.batch):
            noise += noise_of(worker, sample, this.numel, this.noise) / this.batch
    expected = -RATE * (steps + noise / this.workers)
    torch.testing.assert_close(moved, expected, rtol=1e-4, atol=1e-3)


class Slope(Matrices):
    """A problem whose gradient is 1, plus the noise."""

    def forward(self, noise: Tensor | float = 0.0) -> Tensor:
        x = torch.cat([part.view(-1) for part in list(self.parts)[::-1]])
        return ((1 + noise) * x).sum()


@pytest.mark.sample(8)
@kinds
@algorithms
@pytest.mark.parametrize("seed", range(3))
def test_counters_balance_under_any_conditions(algorithm: str, kind: str, seed: int) -> None:
    this = any_lockstep_job(algorithm, seed, lambda r: {"wire": "auto", **OWN[algorithm]})
    this.settings |= KINDS[kind]
    r = random.Random(seed)
    this.numel, this.problem = 60 * r.randint(1, 20), Matrices
    this.bucket = r.randint(5, this.numel)
    end = run(this)
    end.check_accounts()
    for mine in end.locals:
        assert torch.equal(mine, end.locals[0])


@pytest.mark.parametrize("seed", range(100))
def test_fragments_between_tensors_contain_every_tensor_once(seed: int) -> None:
    r = random.Random(seed)
    tensors = [r.choice([1, r.randint(1, 30), r.randint(1, 3000)]) for _ in range(r.randint(1, 20))]
    layout = cut(sum(tensors), 1, r.choice([1e-4, 0.01]), 16.0)
    parts = fragments(layout, r.randint(1, 6), tensors)
    flat = [bucket for fragment in parts for bucket in fragment]
    assert [bucket.index for bucket in flat] == list(range(len(flat)))
    assert [bucket.start for bucket in flat] == [0, *(bucket.stop for bucket in flat[:-1])]
    assert flat[-1].stop == layout.numel
    edges = {sum(tensors[:k]) for k in range(len(tensors) + 1)}
    assert {fragment[0].start for fragment in parts if fragment} <= edges


# -- combinations -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "gosgd", "wire": "int8"}, r"--wire int8 .*\bar-sgd\b.*gosgd.*--wire bf16"),
        ({"algorithm": "bsp", "wire": "int2"}, r"--wire int2 .*ar-sgd, diloco.*bsp.*--wire int4"),
        ({"algorithm": "sgp", "wire": "int2"}, r"--wire int2 .*sgp does not.*--wire bf16"),
        (
            {"algorithm": "ar-sgd", "wire": "int4", "ar_sgd": {"allreduce": "torch"}},
            "--wire int4 .*--ar-sgd-allreduce torch.*Leave --ar-sgd-allreduce out",
        ),
        (
            {"algorithm": "diloco", "wire": "int2", "diloco": {"allreduce": "mpi"}},
            "--wire int2 .*--diloco-allreduce mpi",
        ),
        (
            {"algorithm": "ar-sgd", "wire": "int8", "compression": "dgc"},
            "--wire int8 .*--compression dgc",
        ),
        (
            {"algorithm": "local-sgd", "wire": "bf16", "compression": "powersgd"},
            "--wire bf16 .*--compression powersgd.*Leave one out",
        ),
        (
            {"algorithm": "bsp", "compression": "powersgd"},
            "--compression powersgd .*ar-sgd, diloco, local-sgd.*bsp.*Use --compression dgc",
        ),
        (
            {"algorithm": "sgp", "compression": "powersgd"},
            "--compression powersgd .*sgp does not. Leave the option out",
        ),
        ({"algorithm": "diloco", "compression": "dgc"}, "--compression dgc .*diloco does not"),
    ],
    ids=str,
)
def test_unsuitable_combination_is_rejected_with_remedy(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        checked_algorithm(RunOptions.model_validate(options), 4)


@kinds
def test_algorithms_with_compressed_sums(kind: str) -> None:
    able = []
    for name in ALGORITHMS:
        try:
            checked_algorithm(RunOptions(algorithm=name, **KINDS[kind]), 4)
            able.append(name)
        except UserError:
            pass
    serving = [name for name, each in ALGORITHMS.items() if each.quantises]
    assert sorted(able) == sorted(SUMMING + serving * (kind in ("int8", "int4")))
