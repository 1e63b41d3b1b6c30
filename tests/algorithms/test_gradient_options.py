"""Options that act on gradients: every algorithm applies each of them or rejects it by name."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from tests.loop_lab import LR, Step, Trained, flat, loss_of, network, plain, train

DGC = {"compression": "dgc", "dgc": {"ratio": 0.2, "warmup_epochs": 0}}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in sorted(ALGORITHMS)},
    **{
        f"{name} dgc": (name, DGC) for name in sorted(ALGORITHMS) if find_algorithm(name).compresses
    },
}
CLIP = 0.01
LARGE = 1000.0
"""Factor of the losses, which makes gradients far larger than CLIP."""


class Run(Protocol):
    """Trains with the algorithm of the test."""

    def __call__(self, step: Step = plain, **settings: Any) -> Trained: ...


@pytest.fixture(params=VARIANTS, ids=str)
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    algorithm, settings = VARIANTS[request.param]
    return partial(train, tmp_path, algorithm, overwrite=True, **settings)


def losses(factor: float = 1.0, scaled: bool = False, clip: float | None = None) -> Step:
    """Body of the loop; ``scaled`` uses run.scale(), ``clip`` uses run.clip_grad_norm_()."""

    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        loss = factor * loss_of(model, inputs, labels)
        (run.scale(loss) if scaled else loss).backward()
        if clip is not None:
            run.clip_grad_norm_(clip)
        run.step(loss)

    return step


def assert_is_start(trained: Trained) -> None:
    assert torch.allclose(trained.x, flat(network()), rtol=1e-6, atol=1e-7)


def assert_is_clipped(trained: Trained) -> None:
    """Without momentum, no gradient moves the model further than the rate times the bound."""
    assert 0 < trained.moved < LR * CLIP * trained.summary["gradients_computed"]


@pytest.mark.sample(8)
def test_clip_option_bounds_steps(run: Run) -> None:
    assert run(losses(LARGE)).moved > 1
    assert_is_clipped(run(losses(LARGE), clip=CLIP))


@pytest.mark.sample(16)
@pytest.mark.parametrize("wait_free", [True, False])
def test_clip_grad_norm_bounds_steps_or_is_rejected(run: Run, wait_free: bool) -> None:
    try:
        clipped = run(losses(LARGE, clip=CLIP), wait_free=wait_free)
    except UserError as error:
        # Only multistep, which exchanges activations instead of gradients from its first step on.
        assert wait_free and re.search(r"run\.clip_grad_norm_\(\) .*activations", str(error))
    else:
        assert_is_clipped(clipped)


@pytest.mark.sample(8)
@pytest.mark.parametrize("settings", [{}, {"clip": 0.05, "accumulate": 2}], ids=["alone", "clip"])
def test_loss_scale_is_removed_from_gradients(run: Run, settings: dict[str, Any]) -> None:
    """The scale is a power of two, so results are bit-identical."""
    scaled = run(losses(scaled=True), **settings)
    assert scaled.moved > 1e-3
    assert torch.equal(scaled.x, run(losses(), **settings).x)


@pytest.mark.sample(8)
def test_overflowing_gradient_is_refused(run: Run) -> None:
    steps = 0

    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        nonlocal steps
        steps += 1
        loss = loss_of(model, inputs, labels)
        (run.scale(loss) * (1e38 if steps == 5 else 1.0)).backward()
        run.step(loss)

    trained = run(step)
    assert trained.summary["gradients_refused"] == 1
    assert 1e-3 < trained.moved < 1


@pytest.mark.sample(8)
def test_loss_above_max_loss_refuses_gradient(run: Run) -> None:
    trained = run(max_loss=1e-6)
    assert trained.summary["gradients_refused"] == trained.summary["gradients_computed"] == 12
    assert_is_start(trained)


@pytest.mark.sample(8)
def test_accumulated_batches_equal_step_of_larger_batch(run: Run) -> None:
    whole = run(batch_size=8)
    halves = run(losses(0.5), accumulate=2)
    assert halves.moved > 1e-2
    assert (halves.x - whole.x).norm() < 1e-3 * whole.moved


@pytest.mark.sample(6)
def test_accumulated_passes_equal_step_of_their_batch(
    run: Run, request: pytest.FixtureRequest
) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        with run.accumulate():
            (loss_of(model, inputs[:2], labels[:2]) / 2).backward()
        (loss_of(model, inputs[2:], labels[2:]) / 2).backward()
        run.step()

    whole = run()
    # Rounding decides which of many equal differences aladdin-local sends.
    close = 1e-2 if "aladdin-local" in request.node.name else 1e-3
    assert (run(step).x - whole.x).norm() < close * whole.moved


@pytest.mark.sample(8)
@pytest.mark.parametrize("is_forward_done", [False, True])
def test_skipped_batches_have_no_effect(run: Run, is_forward_done: bool) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        if is_forward_done:
            model(inputs)

    assert_is_start(run(step))


@pytest.mark.sample(8)
def test_gradients_may_be_changed_before_step_without_wait_free(run: Run) -> None:
    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        loss = loss_of(model, inputs, labels)
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        run.step(loss)

    assert_is_start(run(step, wait_free=False))
