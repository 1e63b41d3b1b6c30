"""Messages damaged in transit are refused by their checksum and have no other effect."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.refusals import Reason
from aladdin_mpi.errors import TransportError, UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate, train
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.checksums import ChecksumTransport, is_void, void
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.conformance import CHECKS
from tests.damage import Choice, DamagingTransport, is_values, sealed
from tests.quadratic import Quadratic
from tests.roles import Job, any_network, run
from tests.run.test_refused_gradients import check_unharmed
from tests.virtual_lab import run as run_ranks

NAMES = sorted(ALGORITHMS)
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {} for name in NAMES if not find_algorithm(name).collective},
    "bsp host first": {"bsp": {"host_first": True}},
    "ashl bf16": {"wire": "bf16"},
    "gosgd": {"gosgd": {"p": 0.5}},
    "aladdin int8": {"wire": "int8"},
    "asp int4": {"wire": "int4"},
    "easgd int8": {"wire": "int8"},
    "ashl int4": {"wire": "int4"},
}


def damaging_job(
    algorithm: str, links: list[DamagingTransport], chosen: Choice, **values: Any
) -> Job:
    def wrap(transport: Transport) -> Transport:
        links.append(DamagingTransport(transport, chosen))
        return sealed(links[-1])

    return Job(algorithm, servers=2, numel=60, bucket=13, samples=240, wrap=wrap, **values)


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_algorithm_is_unaffected_by_damaged_messages(variant: str) -> None:
    links: list[DamagingTransport] = []
    job = damaging_job(
        variant.split()[0],
        links,
        lambda number, buffer: number % 8 == 5 and is_values(buffer),
        settings=VARIANTS[variant],
        cluster=any_network(3, 4),
        seed=3,
    )
    outcome = run(job)
    check_unharmed(outcome)
    damaged = Counter((link.rank, tag) for link in links for tag in link.damaged)
    heard = outcome.ranks[0].refusals
    assert {refusal.reason for refusal in heard} == {Reason.CHECKSUM}
    assert Counter((refusal.rank, int(refusal.value)) for refusal in heard) == damaged
    optimum = Quadratic(60).optimum
    assert (outcome.model - optimum).norm() < 0.95 * (outcome.first - optimum).norm()
    if variant in ("gosgd", "sgp", "osgp"):  # the sum of all weights is conserved
        weights = [sum(w.role.weight(b) for w in outcome.workers) for b in job.layout.buckets]
        assert weights == pytest.approx([1.0 if variant == "gosgd" else 4.0] * len(weights))


def test_worker_goes_on_sending_after_a_damaged_answer() -> None:
    """aladdin-local sends the next message after an answer, which may be the damaged one."""

    def least_sent(chosen: Choice) -> int:
        links: list[DamagingTransport] = []
        job = damaging_job("aladdin-local", links, chosen, cluster=any_network(3, 4), seed=3)
        run(replace(job, samples=320))
        return min(link.traffic.messages_sent for link in links)

    unharmed = least_sent(lambda n, buffer: False)
    assert least_sent(lambda n, buffer: n == 1 and is_values(buffer)) > 0.7 * unharmed


def test_damaged_message_corrupts_model_without_checksums() -> None:
    def wrap(transport: Transport) -> Transport:
        return DamagingTransport(transport, lambda n, b: n == 3 and is_values(b))

    outcome = run(Job("asp", numel=60, bucket=13, samples=80, wrap=wrap))
    assert not outcome.model.norm() < 1e6


@pytest.mark.parametrize(
    ("algorithm", "wire"),
    [(name, "fp32") for name in ("asp", "easgd", "adsp", "async-diloco", "aladdin", "bsp")]
    + [(name, "int8") for name in ("easgd", "aladdin")],
)
def test_server_refuses_non_finite_messages(algorithm: str, wire: str) -> None:
    """As after a bug in an algorithm; EASGD's centre must not be drawn to zero either."""

    def wrap(transport: Transport) -> Transport:
        if transport.rank != 2:
            return transport
        return DamagingTransport(
            transport,
            lambda number, buffer: number % 3 == 2 and is_values(buffer),
            lambda buffer: torch.full_like(buffer, nan),
        )

    def far(worker: int) -> Tensor:
        return Quadratic(60).optimum + 100

    # All values are far from zero: the workers' and, after their first messages, the servers'.
    job = Job(algorithm, numel=60, bucket=60, samples=160, wrap=wrap, start=far, noise=0.0)
    job.settings = {"wire": wire, "async_diloco": {"steps": 2}}
    outcome = run(job)
    check_unharmed(outcome)
    heard = outcome.ranks[0].refusals
    assert {(r.reason, r.rank, r.bucket) for r in heard} == {(Reason.ARRIVED, 2, 0)}
    if algorithm == "easgd":
        sound = run(replace(job, wrap=lambda transport: transport))
        assert outcome.model.norm() > 0.9 * sound.model.norm()


def test_damaged_header_ends_run() -> None:
    job = damaging_job("aladdin", [], lambda number, buffer: number == 7 and not is_values(buffer))
    with pytest.raises(TransportError, match=r"\brank \d+ .*\bdamaged\b"):
        run(job)


def test_sparse_models_are_sent_whole_after_loss(tmp_path: Path) -> None:
    words = ["--algorithm", "asp", "--compression", "dgc", "--dgc-ratio", "0.02", "--checksum"]
    words += [
        "--workers",
        "3",
        "--epochs",
        "3",
        "--eval-every",
        "0",
        "--run-dir",
        str(tmp_path),
        "--quiet",
    ]
    words += ["--dgc-warmup-epochs", "0", "--lr", "0.03"]
    options = parse(SimulateOptions, words, "simulate", "")
    links: list[DamagingTransport] = []

    def main(transport: Transport) -> dict[str, Any]:
        links.append(
            DamagingTransport(transport, lambda number, b: number % 10 == 4 and is_values(b))
        )
        return train(options, links[-1])

    summary: Any = VirtualCluster(4, options.cluster, 0).run(main)[0]
    damaged = Counter(link.rank for link in links for _ in link.damaged)
    assert {f["rank"]: f["count"] for f in summary["failures"]} == damaged
    assert min(damaged[rank] for rank in range(4)) > 1  # models and gradients
    assert summary["messages_refused"] == damaged.total()
    assert summary["gradients_refused"] == 0
    assert summary["test_accuracy"] > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_is_void_detects_only_void_messages(dtype: torch.dtype) -> None:
    sound = [nan, -nan, 0.0, -1.0, 1 - 2**-53, torch.finfo(dtype).max]
    assert not any(is_void(torch.tensor([value, value], dtype=dtype)) for value in sound)
    position = torch.tensor([2**16 - 1, 2**31 - 1], dtype=torch.int32)
    assert not is_void(position.view(dtype))
    for length in (1, 2, 9):
        message = torch.zeros(length, dtype=dtype)
        void(message)
        assert is_void(message)
        assert message.isnan().all()


@pytest.mark.parametrize("algorithm", ["ar-sgd", "local-sgd", "multistep"])
def test_checksum_option_rejects_collective_algorithms(tmp_path: Path, algorithm: str) -> None:
    words = ["--algorithm", algorithm, "--checksum", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match=rf"--checksum .*\b{algorithm}\b"):
        simulate(parse(SimulateOptions, words, "simulate", ""))


@pytest.mark.parametrize(
    "name", sorted(CHECKS.keys() - {"traffic", "any_source", "any_source_among_others"})
)
@pytest.mark.parametrize("seed", range(2))
def test_sealed_transport_passes_conformance_checks(name: str, seed: int) -> None:
    """Except that there are more messages, and that a receive names its source."""

    def damaged(source: int, tag: int) -> None:
        raise AssertionError(f"from {source}, tag {tag}")

    def main(transport: Transport) -> None:
        CHECKS[name](ChecksumTransport(transport, range(1000, 5000), damaged))

    run_ranks(3, main, seed=seed)


def test_new_meta_buffer_is_not_void(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed computing sends buffers with the previous contents of their memory."""

    def dirty(numel: int, **how: Any) -> Tensor:
        buffer = torch.zeros(numel, dtype=how["dtype"])
        void(buffer)
        return buffer

    monkeypatch.setattr(torch, "empty", dirty)
    assert not is_void(DenseWire(torch.float32, torch.device("meta")).buffer(250))
