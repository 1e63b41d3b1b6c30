"""Rows of training loops, and of communication settings that do not affect the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from tests.exactness import models
from tests.exactness.models import images, mlp, squares, vectors
from tests.exactness.row import (
    STEPS,
    Batch,
    Plain,
    Row,
    Training,
    by_workers,
    gradients_by_workers,
    on_the_union,
    step_by_step,
    together,
)
from tests.exactness.table_models import ALL, SEVERAL, several

CLIPPED = 0.2
HALF = 2


def row(name: str, train: Callable[[Training], None] = step_by_step, **more: Any) -> Row:
    """Return a row that differs from the default in its loop or its settings."""
    fields: dict[str, Any] = {"model": mlp, "loss": squares, "samples": vectors}
    return Row(f"loop: {name}", train=train, **{**fields, **more})


def step(training: Training, batch: Batch) -> None:
    loss = training.loss(batch)
    loss.backward()
    training.run.step(loss)


def union(plain: Plain, numbers: list[list[int]]) -> Tensor:
    return plain.loss(plain.batch(together(numbers)))


def by_epochs(training: Training) -> None:
    for epoch in training.epochs():
        for batch in epoch:
            step(training, batch)


# -- several backward passes ------------------------------------------------------------------
def accumulated(training: Training) -> None:
    for batch in training.batches():
        loss = training.loss(batch) / 2
        loss.backward()
        training.run.step(loss)


def replay_pairs(plain: Plain) -> None:
    """Take one step for two batches of every worker."""
    for one, other in zip(plain.rounds[::2], plain.rounds[1::2], strict=True):
        plain.zero_grad()
        union(plain, one + other).backward()
        plain.step()


def in_two_parts(training: Training) -> None:
    for batch in training.batches():
        first, second = (
            [each[part] for each in batch] for part in (slice(HALF), slice(HALF, None))
        )
        with training.run.accumulate():
            (training.loss(first) / 2).backward()
        loss = training.loss(second) / 2
        loss.backward()
        training.run.step(loss)


def two_backwards(training: Training) -> None:
    """Run backward twice through the same graph."""
    for batch in training.batches():
        outputs = training.model(batch[0])
        first = functional.mse_loss(outputs, batch[1])
        second = outputs.abs().mean()
        with training.run.accumulate():
            first.backward(retain_graph=True)
        second.backward()
        training.run.step(first + second)


def two_terms(plain: Plain) -> None:
    for each in plain.rounds:
        batch = plain.batch(together(each))
        plain.zero_grad()
        outputs = plain.model(batch[0])
        (functional.mse_loss(outputs, batch[1]) + outputs.abs().mean()).backward()
        plain.step()


# -- clipping and changes of gradients --------------------------------------------------------
def clips(training: Training) -> None:
    for batch in training.batches():
        loss = training.loss(batch)
        loss.backward()
        training.run.clip_grad_norm_(CLIPPED)
        training.run.step(loss)


def clip_mean(plain: Plain) -> None:
    for each in plain.rounds:
        plain.zero_grad()
        union(plain, each).backward()
        clip_grad_norm_(plain.model.parameters(), CLIPPED)
        plain.step()


def clip_own(plain: Plain) -> None:
    for each in plain.rounds:
        gradients_by_workers(
            plain, each, lambda: clip_grad_norm_(plain.model.parameters(), CLIPPED)
        )
        plain.step()


def changed(training: Training) -> None:
    for batch in training.batches():
        loss = training.loss(batch)
        loss.backward()
        for p in training.model.parameters():
            assert p.grad is not None
            p.grad.mul_(1.5)
        training.run.step(loss)


def replay_changed(plain: Plain) -> None:
    for each in plain.rounds:
        plain.zero_grad()
        (1.5 * union(plain, each)).backward()
        plain.step()


def with_hook() -> nn.Module:
    """Triple the gradients of one parameter with a hook."""
    model = mlp()
    model[0].get_parameter("weight").register_hook(lambda gradient: 3 * gradient)
    return model


def scaled(training: Training) -> None:
    for batch in training.batches():
        loss = training.loss(batch)
        training.run.scale(loss).backward()
        training.run.step(loss)


# -- skipped batches, and loops that end early --------------------------------------------------
def passes_over(training: Training) -> None:
    for batch in training.batches():
        if training.number == 2:
            continue
        step(training, batch)


def without_second(plain: Plain) -> None:
    for number, each in enumerate(plain.rounds):
        if number == 1:
            continue
        plain.zero_grad()
        union(plain, each).backward()
        plain.step()


def one_passes_over(training: Training) -> None:
    for batch in training.batches():
        if training.number == 2 and training.run.is_first:
            continue
        step(training, batch)


def without_one(plain: Plain) -> None:
    """Exclude the samples of the skipped batch."""
    for number, each in enumerate(plain.rounds):
        plain.zero_grad()
        union(plain, each[1:] if number == 1 else each).backward()
        plain.step()


def one_is_zero(plain: Plain) -> None:
    """Count the samples of the skipped batch with a gradient of zero."""
    for number, each in enumerate(plain.rounds):
        left = each[1:] if number == 1 else each
        plain.zero_grad()
        (union(plain, left) * (sum(map(len, left)) / sum(map(len, each)))).backward()
        plain.step()


def clamp(name: str, values: Tensor) -> None:
    if name.endswith("weight"):
        values.clamp_(-0.1, 0.1)


def clamps_by_projection(training: Training) -> None:
    training.run.project(clamp)
    step_by_step(training)


def clamps_by_hand(training: Training) -> None:
    for batch in training.batches():
        step(training, batch)
        for name, parameter in training.model.named_parameters():
            clamp(name, parameter.data)


def clamps(plain: Plain) -> None:
    for each in plain.rounds:
        plain.zero_grad()
        union(plain, each).backward()
        plain.step()
        for name, parameter in plain.model.named_parameters():
            clamp(name, parameter.data)


def leaves(training: Training) -> None:
    for batch in training.batches():
        step(training, batch)
        if training.number == 2:
            break


def leaves_epochs(training: Training) -> None:
    for epoch in training.epochs():
        for number, batch in enumerate(epoch):
            step(training, batch)
            if number == 1:
                break


def stops(training: Training) -> None:
    for batch in training.batches():
        if training.number == 2:
            training.run.stop()
        step(training, batch)


# -- other code in the loop ----------------------------------------------------------------------
def counts(training: Training) -> None:
    """Use a loss that depends on a state of the loop."""
    state = training.run.state
    for batch in training.batches():
        state["batches"] = state.get("batches", 0) + 1
        loss = training.loss(batch) / state["batches"]
        loss.backward()
        training.run.step(loss)


def replay_counts(plain: Plain) -> None:
    for number, each in enumerate(plain.rounds, 1):
        plain.zero_grad()
        (union(plain, each) / number).backward()
        plain.step()


def evaluates(training: Training) -> None:
    inputs, targets = vectors(9).inputs, vectors(9).targets
    for epoch in training.epochs():
        for batch in epoch:
            step(training, batch)
        training.model.eval()
        with torch.no_grad():
            loss = functional.mse_loss(training.model(inputs), targets)
        training.model.train()
        training.run.log(validation=training.run.reduce(loss).item())


def looks_between(training: Training) -> None:
    """Call the model without gradients before each batch and between forward and backward."""
    for batch in training.batches():
        with torch.no_grad():
            training.model(batch[0])
        loss = training.loss(batch)
        with torch.inference_mode():
            training.model(batch[0])
        loss.backward()
        training.run.step(loss)


def in_eval_mode(training: Training) -> None:
    for batch in training.batches():
        training.model.eval()
        step(training, batch)


def replay_in_eval_mode(plain: Plain) -> None:
    plain.model.eval()
    on_the_union(plain)


def tells_no_loss(training: Training) -> None:
    for batch in training.batches():
        training.loss(batch).backward()
        training.run.step()


# -- other forms of forward --------------------------------------------------------------------
def autocast(model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch[0])
    return functional.mse_loss(outputs.float(), batch[1])


def checkpointed(model: nn.Module, batch: Batch, is_reentrant: bool) -> Tensor:
    inputs = batch[0].clone().requires_grad_(is_reentrant)
    outputs = checkpoint(model, inputs, use_reentrant=is_reentrant)
    assert isinstance(outputs, Tensor)
    return functional.mse_loss(outputs, batch[1])


def functionally(model: nn.Module, batch: Batch) -> Tensor:
    outputs = functional_call(model, dict(model.named_parameters()), (batch[0],))
    return functional.mse_loss(outputs, batch[1])


ROUNDING = "exactness.md#rounding-in-bfloat16"
ZERO = "your-script.md#the-loop"
LOOPS = [
    row("epochs", by_epochs, settings={"epochs": 2}, columns=ALL),
    row("accumulate=2", accumulated, settings={"steps": 3, "accumulate": 2}, replay=replay_pairs),
    row("run.accumulate()", in_two_parts, columns=ALL),
    row("two backward passes through one graph", two_backwards, replay=two_terms, columns=ALL),
    row(
        "clip=",
        settings={"steps": STEPS, "clip": CLIPPED},
        replay=clip_mean,
        columns=ALL,
        differences={"bsp": "your-script.md#the-optimizer"},
        documented=clip_own,
    ),
    row(
        "run.clip_grad_norm_()",
        clips,
        replay=clip_mean,
        columns=ALL,
        differences={"bsp": "your-script.md#the-optimizer"},
        documented=clip_own,
    ),
    row(
        "gradients changed before step",
        changed,
        settings={"steps": STEPS, "wait_free": False},
        replay=replay_changed,
        columns=ALL,
    ),
    row("hook of a parameter", model=with_hook),
    row("run.scale()", scaled),
    row("run.project()", clamps_by_projection, replay=clamps, columns=ALL),
    row(
        "weights clamped after a step",
        clamps_by_hand,
        replay=clamps,
        columns=("ar-sgd", "one process"),
    ),
    row(
        "continue",
        passes_over,
        replay=without_second,
    ),
    row(
        "continue of one worker",
        one_passes_over,
        replay=without_one,
        columns=SEVERAL,
        differences=several(ZERO),
        documented=one_is_zero,
    ),
    row("break", leaves, settings={"epochs": 3}, is_even=False),
    row(
        "break of each epoch",
        leaves_epochs,
        settings={"epochs": 3},
        is_even=False,
    ),
    row("run.stop()", stops, settings={"epochs": 3}, is_even=False, columns=ALL),
    row("state", counts, replay=replay_counts, columns=ALL),
    row("evaluation and run.reduce()", evaluates, settings={"epochs": 2}, columns=ALL),
    row("model called without gradients", looks_between),
    row(
        "model.eval()",
        in_eval_mode,
        model=models.batch_norm,
        samples=images,
        replay=replay_in_eval_mode,
    ),
    row("step() without loss", tells_no_loss),
    row(
        "autocast",
        loss=autocast,
        differences=several(ROUNDING),
        documented=by_workers,
        columns=ALL,
    ),
    row("checkpoint", loss=partial(checkpointed, is_reentrant=False)),
    row("checkpoint, reentrant", loss=partial(checkpointed, is_reentrant=True)),
    row("functional_call", loss=functionally),
]

RUNS = [
    row("small messages", settings={"steps": STEPS, "bucket_mb": 0.00002}, columns=ALL),
    row("gradients sent at step()", settings={"steps": STEPS, "wait_free": False}, columns=ALL),
    row("max_loss", settings={"steps": STEPS, "max_loss": 1e9}, columns=ALL),
    row(
        "checkpoints within rounds",
        settings={"samples": 72, "checkpoint_every": "18samples"},
        is_even=False,
        columns=ALL,
    ),
    row("node_sums", settings={"steps": STEPS, "node_sums": True}, columns=SEVERAL),
    row(
        "bsp, host first",
        settings={"steps": STEPS, "bsp": {"host_first": True}},
        columns=["bsp"],
    ),
    row(
        "checksum", settings={"steps": STEPS, "checksum": True}, columns=["bsp", "asp, one worker"]
    ),
    *(
        row(
            f"all-reduce by {library}",
            settings={"steps": STEPS, "ar_sgd": {"allreduce": library}},
            columns=["ar-sgd"],
        )
        for library in ("ring", "mpi", "torch")
    ),
]
