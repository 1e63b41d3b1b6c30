"""Simulated training with quantisation: same convergence as in fp32, with fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.algorithms.ashl import TopK
from aladdin_mpi.algorithms.easgd import EasgdServer, EasgdWorker
from aladdin_mpi.codec.quantise import message_length
from aladdin_mpi.codec.quantised import (
    QuantisedCodec,
    QuantisedDecoder,
    QuantisedEncoder,
    make_codec,
)
from aladdin_mpi.exchange.server_mailbox import SENT, TAKEN
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.general import QUANTISED_BITS
from aladdin_mpi.transport.base import Transport
from tests import compressed
from tests.damage import DamagingTransport, is_values, sealed
from tests.quadratic import Quadratic, network
from tests.roles import Job, Outcome, any_network, run
from tests.run.test_refused_gradients import check_unharmed, spoilt

QUANTISING = sorted(name for name, kind in ALGORITHMS.items() if kind.quantises)
SHARES = {"int8": 0.4, "int4": 0.3}
"""Fraction of the bytes in fp32, including headers and the first models."""
CPU = torch.device("cpu")
SLOW = network(hosts=5, bandwidth_gbit=0.1e-3, latency_us=1e4)
wires = pytest.mark.parametrize("wire", QUANTISED_BITS)


def job_of(algorithm: str, wire: str, **values: Any) -> Job:
    """Return a run with buckets of several blocks and a partial one; the last is longer."""
    given: dict[str, Any] = {"numel": 3010, "bucket": 751, "samples": 1200, **values}
    settings = {"wire": wire, "momentum": 0.5, "weight_decay": 0.0, **given.pop("settings", {})}
    settings.setdefault("async_diloco", {"steps": 2, "outer_momentum": 0.5})
    return Job(
        algorithm,
        servers=2,
        noise=0.05,
        jitter=0.2,
        schedule=lambda samples: 0.1,
        settings=settings,
        **given,
    )


def distance(outcome: Outcome) -> float:
    """Return the distance from the minimum; at the start it is 1."""
    optimum = Quadratic(outcome.job.numel).optimum
    return float((outcome.model - optimum).norm() / (outcome.first - optimum).norm())


def bytes_sent(outcome: Outcome) -> Tensor:
    return torch.tensor([float(rank.traffic.bytes_sent) for rank in outcome.ranks])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def test_quantised_wires_are_offered_by_all_algorithms_with_servers() -> None:
    served = {name for name, kind in ALGORITHMS.items() if kind.has_servers}
    assert sorted(served - {"aladdin-local"}) == QUANTISING  # which has its own format


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(name, marks=[] if name == "aladdin-ahead" else pytest.mark.long)
        for name in QUANTISING
    ],
)
def test_quantised_training_converges_like_fp32_with_fewer_bytes(algorithm: str) -> None:
    outcomes = {wire: run(job_of(algorithm, wire)) for wire in ("fp32", *QUANTISED_BITS)}
    whole = outcomes.pop("fp32")
    assert distance(whole) < 0.1
    for wire, outcome in outcomes.items():
        outcome.check_accounts()
        assert distance(outcome) == pytest.approx(distance(whole), rel=0.05)
        assert (bytes_sent(outcome) < SHARES[wire] * bytes_sent(whole)).all()


@pytest.mark.long
@wires
def test_quantised_messages_are_shorter_except_the_first_models(wire: str) -> None:
    whole, few = (run(job_of("asp", w, samples=400)) for w in ("fp32", wire))
    buckets = few.job.layout.buckets
    saved = {b: 4 * (b.numel - message_length(b.numel, QUANTISED_BITS[wire])) for b in buckets}
    computed = [worker.role.counts()["computed"] for worker in few.workers]
    models = sum(computed) - len(computed)
    expected = [models * sum(n for b, n in saved.items() if b.server == s) for s in range(2)]
    expected += [count * sum(saved.values()) for count in computed]
    assert (bytes_sent(whole) - bytes_sent(few)).tolist() == expected


@pytest.mark.sample(3)
@wires
@pytest.mark.parametrize("algorithm", QUANTISING)
def test_quantised_model_of_every_worker_equals_its_servers_shadow(
    algorithm: str, wire: str
) -> None:
    outcome = run(job_of(algorithm, wire, samples=400, cluster=any_network(1, 6)))
    compared = 0
    for server in outcome.servers:
        encoder: Any = server.role.server._sender._differences  # type: ignore[attr-defined]
        assert isinstance(encoder, QuantisedEncoder)
        for worker, rank in enumerate(range(2, 6)):
            decoder: Any = outcome.workers[worker].role.link.inbox._differences  # type: ignore[attr-defined]
            assert isinstance(decoder, QuantisedDecoder)
            for bucket in server.role.server.buckets:  # type: ignore[attr-defined]
                shadow = encoder._last[rank, bucket.index]
                assert same_bits(shadow, decoder._last[bucket.index])
                assert not torch.equal(shadow, outcome.first[bucket.part])
                compared += 1
    assert compared == 4 * len(outcome.job.layout.buckets)


@wires
def test_quantised_training_loses_no_gradient(wire: str) -> None:
    """Without blending, the global model is the mean of the local models, except for unsent values.

    This holds also if gradients are coalesced before they are sent, and across a checkpoint.
    """
    settings = {"aladdin": {"alpha": 0.0, "ring": 1}, "momentum": 0.9, "weight_decay": 0.01}
    this = compressed.Job(settings=settings, wire=wire, samples=1000, cluster=SLOW, segments=2)
    end = compressed.run(replace(this, hidden=2000, bucket_mb=1.0))
    rows = []
    for worker in end.workers:
        assert worker.role.counts()["coalesced"] > 0
        assert isinstance(worker.codec, QuantisedCodec)
        left = worker.codec.residual.left
        assert left is not None
        rows.append(end.job.lr * left)
    waits = torch.stack(rows)
    assert waits.abs().max() > 1e-4
    assert (end.locals[0] - end.locals[1]).abs().max() > 1e-2
    torch.testing.assert_close(end.model, (end.locals + waits).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.sample(2)
@wires
@pytest.mark.parametrize("algorithm", ["aladdin", "asp", "shat"])
def test_timed_computing_sends_same_number_of_quantised_bytes(algorithm: str, wire: str) -> None:
    this = compressed.Job(algorithm, wire=wire, samples=1200, slowdown=(1.0, 1.7, 2.9), jitter=0.1)
    real, timed = compressed.run(this), compressed.run(replace(this, timed=True))
    assert real.accuracy() > 0.6
    for ranks in (slice(0, 2), slice(2, None)):
        assert real.bytes_sent(real.ranks[ranks]) == timed.bytes_sent(timed.ranks[ranks])


@pytest.mark.parametrize("algorithm", ["aladdin", "easgd", "adsp", "async-diloco"])
def test_non_finite_gradient_does_not_harm_quantised_training(algorithm: str) -> None:
    spoil = spoilt(worker=1, value=nan)
    outcome = run(job_of(algorithm, "int4", samples=160, numel=60, bucket=13, spoil=spoil))
    check_unharmed(outcome)
    assert [refusal.reason for refusal in outcome.ranks[0].refusals] == [1] * 3


def test_modelled_server_counts_memory_traffic_of_quantised_messages() -> None:
    """With modelled handling: quantised values are summed in fp32."""
    layout = cut(10_000, 1, 64.0, 64.0)
    (bucket,) = layout.buckets
    codec = make_codec("int4", layout, CPU)
    encoder = codec.model_encoder()
    assert encoder is not None
    values, message = 40_000, 4 * message_length(10_000, 4)
    # In and out of the message, and a value read and written for each in it.
    assert TAKEN * message + codec.extra_bytes(bucket, message) == 3 * message + 2 * values
    assert TAKEN * values + codec.extra_bytes(bucket, values) == 5 * values
    # The values and the shadow are read; the shadow and the message are written.
    assert SENT * message + encoder.extra_bytes(bucket, message) == 3 * values + message


# -- EASGD: models in both directions ----------------------------------------------
@pytest.mark.long
@wires
def test_quantised_elastic_averaging_conserves_the_sum(wire: str) -> None:
    """Without gradients, all models converge and their sum is conserved, except for rounding."""

    def far(worker: int) -> Tensor:
        return torch.randn(3010, generator=torch.Generator().manual_seed(worker))

    job = job_of("easgd", wire, start=far, settings={"easgd": {"alpha": 0.2, "tau": 1}})
    job.schedule = lambda samples: 0.0
    outcome = run(job)
    before = torch.stack([outcome.first, *(far(worker) for worker in range(4))])
    after = torch.cat([outcome.model.unsqueeze(0), outcome.locals])
    assert after.std(0).mean() < 1e-3 * before.std(0).mean()
    drift = (after.mean(0) - before.mean(0)).abs().mean() / before.std(0).mean()
    assert drift < {"int8": 0.002, "int4": 0.03}[wire]


@wires
def test_easgd_server_recovers_worker_models_after_a_lost_message(wire: str) -> None:
    links: list[DamagingTransport] = []

    def wrap(transport: Transport) -> Transport:
        chosen = transport.rank >= 2
        links.append(
            DamagingTransport(transport, lambda n, b: chosen and n in (9, 10) and is_values(b))
        )
        return sealed(links[-1])

    outcome = run(job_of("easgd", wire, samples=400, wrap=wrap))
    assert [len(link.damaged) for link in sorted(links, key=lambda link: link.rank)] == (
        [0, 0] + [2] * 4
    )
    for rank, worker in enumerate(outcome.workers):
        assert isinstance(worker.role, EasgdWorker)
        assert isinstance(worker.role.link.differences, QuantisedEncoder)
        for (server, bucket), shadow in worker.role.link.differences._last.items():
            centre = outcome.servers[server].role
            assert isinstance(centre, EasgdServer)
            models = centre.models[rank]
            assert isinstance(models, QuantisedDecoder)
            assert same_bits(models._last[bucket], shadow)
        assert len(worker.role.link.differences._last) == len(outcome.job.layout.buckets)


# -- ASHL: largest values, or all values quantised --------------------------------------
@pytest.mark.sample(4)
@wires
@pytest.mark.parametrize("rate", [1.0, 0.3, 0.2, 0.1, 0.04])
def test_ashl_decodes_quantised_pushes_of_every_size(wire: str, rate: float) -> None:
    for numel in [*range(1, 130), 255, 257, 1000]:
        layout = cut(numel, 1, 64.0, 64.0)
        (bucket,) = layout.buckets
        sender, reader = (TopK(make_codec(wire, layout, CPU), layout) for _ in range(2))
        moved = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
        sent, arrived = torch.zeros(numel), torch.zeros(numel)
        for sender.rate in (rate, 1.0, rate):
            room = sender.buffer_for(moved)
            message, _ = sender.compress(bucket, moved, 0, room)
            assert message.numel() <= sender.longest(bucket, 0) <= numel
            reader.add(bucket, message.clone(), arrived)
            sent += moved
            assert reader.numbers(bucket, message).isfinite().all()
        assert sender.quantises is not None
        for waits in (sender.left, sender.quantises.residual.left):
            if waits is not None:
                arrived += waits
        torch.testing.assert_close(arrived, sent)


def test_ashl_restores_omitted_and_rounded_remainders() -> None:
    layout = cut(1000, 1, 64.0, 64.0)
    (bucket,) = layout.buckets
    sender, other = (TopK(make_codec("int8", layout, CPU), layout) for _ in range(2))
    moved = torch.randn(1000)
    for sender.rate in (1.0, 0.05):
        sender.compress(bucket, moved, 0, sender.buffer_for(moved))
    other.load_state_dict(sender.state_dict())
    for sender.rate in (0.05, 1.0):
        other.rate = sender.rate
        mine, _ = sender.compress(bucket, moved, 0, sender.buffer_for(moved))
        theirs, _ = other.compress(bucket, moved, 0, other.buffer_for(moved))
        assert same_bits(mine, theirs)
