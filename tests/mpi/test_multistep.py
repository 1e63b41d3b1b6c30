"""Multistep in real time: during forward, layers wait only for their own parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from aladdin_mpi.algorithms.multistep import MultistepWorker
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.algorithms.test_multistep import ACTIVATIONS, GRADIENTS, MOMENTUM, TINY, Functional, Tied
from tests.multistep_lab import Job, alone, run_rank, small


def train(job: Job, transport: MpiTransport) -> MultistepWorker:
    """Train, and compare with one process and with rank 0."""
    job.workers, job.seconds = transport.size, None
    job.samples = transport.size * job.batch * 8 + 3
    role = run_rank(job, transport).role
    expected = alone(job)
    if job.build is Tied:
        expected[-90:] = role.x[-90:]  # not used, and only here subject to weight decay
    assert torch.allclose(role.x, expected, rtol=1e-5, atol=1e-5)
    first = role.x.clone()
    transport.wait(transport.ibroadcast(first, 0))
    assert torch.equal(first, role.x)
    return role


@pytest.mark.parametrize(
    ("exchange", "wait_free"),
    [(GRADIENTS, True), (GRADIENTS, False), (ACTIVATIONS, True)],
    ids=["gradients", "gradients at step()", "activations"],
)
@pytest.mark.parametrize("build", [small, Tied, Functional])
def test_multistep_equals_one_process(
    transport: MpiTransport,
    build: Callable[[], nn.Module],
    exchange: dict[str, Any],
    wait_free: bool,
) -> None:
    settings = {**MOMENTUM, **TINY, **exchange}
    train(Job(build=build, settings=settings, lr=0.05, wait_free=wait_free), transport)


def test_multistep_equals_one_process_with_passes_and_segments(transport: MpiTransport) -> None:
    role = train(Job(passes=2, segments=2, settings={**MOMENTUM, **ACTIVATIONS}), transport)
    assert all(piece.by_errors for piece in role.dense)


@pytest.mark.parametrize("exchange", [GRADIENTS, ACTIVATIONS], ids=["gradients", "activations"])
def test_multistep_first_layer_waits_for_its_own_parameters_only(
    transport: MpiTransport, exchange: dict[str, Any]
) -> None:
    left: list[int] = []

    def probe(role: MultistepWorker) -> None:
        left.append(role.gathering)

    role = train(Job(settings={**MOMENTUM, **TINY, **exchange}, probe=probe), transport)
    first_layer = -(-40 // 50)
    assert left[0] == 0
    assert set(left[1:]) == {len(role.pieces) - first_layer}
    assert transport.traffic.waiting > 0


def test_multistep_sends_gradients_in_order_during_backward(transport: MpiTransport) -> None:
    """Includes layers that exchange activations, whose gradients autograd skips."""
    sent: list[tuple[int, bool]] = []

    def probe(role: MultistepWorker) -> None:
        inner = role.send

        def send(bucket: Any) -> None:
            watch = role.worker.step.watch
            assert watch is not None
            sent.append((bucket.index, watch.enabled))
            inner(bucket)

        if "send" not in vars(role):
            role.send = send  # type: ignore[method-assign]

    role = train(Job(settings={**MOMENTUM, **ACTIVATIONS}, probe=probe), transport)
    whole_steps = [sent[i : i + len(role.pieces)] for i in range(0, len(sent), len(role.pieces))]
    assert len(whole_steps) >= 7
    for step in whole_steps:
        assert [index for index, _ in step] == list(range(len(role.pieces)))
        assert all(during for _, during in step) or not any(during for _, during in step)
    assert all(during for step in whole_steps[:-1] for _, during in step)
