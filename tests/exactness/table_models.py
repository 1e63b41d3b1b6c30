"""Rows of models and losses."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.exactness import models
from tests.exactness.models import classifier, cross_entropy, labelled, mlp, squares, vectors
from tests.exactness.row import (
    COLUMNS,
    ONE_WORKER,
    SYNCHRONOUS,
    Batch,
    Optimizers,
    Plain,
    Row,
    Training,
    by_workers,
    together,
)

ALL = (*SYNCHRONOUS, *ONE_WORKER)
SEVERAL = ("ar-sgd", "bsp")
"""Columns in which a step uses the samples of several workers."""


def several(section: str) -> Mapping[str, str]:
    """Return the documented differences of columns with several workers."""
    return dict.fromkeys(SEVERAL, section)


def everywhere(reason: str) -> Mapping[str, str]:
    return dict.fromkeys(COLUMNS, reason)


# -- models -----------------------------------------------------------------------------------
def weight_norm() -> nn.Module:
    model = mlp()
    parametrizations.weight_norm(model[0])
    return model


def spectral_norm() -> nn.Module:
    model = mlp()
    parametrizations.spectral_norm(model[0])
    return model


def channels_last() -> nn.Module:
    return models.convolution().to(memory_format=torch.channels_last)


class Squared(torch.autograd.Function):
    """A function with a custom backward pass."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, inputs: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return inputs.square()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        (inputs,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return 2 * inputs * gradients[0]


def through_function(model: nn.Module, batch: Batch) -> Tensor:
    errors: Tensor = Squared.apply(model(batch[0]) - batch[1])
    return errors.mean()


def in_single(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]).float(), batch[1].float())


def in_double(model: nn.Module, batch: Batch) -> Tensor:
    return functional.mse_loss(model(batch[0]).double(), batch[1].double())


def judged(scores: Tensor, real: bool) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, real))


def judge_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, models.Pair)
    made = model.maker(batch[0])
    return judged(model.judge(batch[1]), True) + judged(model.judge(made.detach()), False)


def maker_loss(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(model, models.Pair)
    return judged(model.judge(model.maker(batch[0])), True)


def two_adams(model: models.Pair) -> Optimizers:
    parts = model.maker, model.judge
    return [
        torch.optim.Adam(part.parameters(), rate, betas=(0.5, 0.9), eps=1e-3)
        for part, rate in zip(parts, (0.01, 0.02), strict=True)
    ]


def train_both(training: Training) -> None:
    """Step both models at once, after both backward passes."""
    model = training.model
    assert isinstance(model, models.Pair)
    for batch in training.batches():
        judge_loss(model, batch).backward()
        loss = maker_loss(model, batch)
        loss.backward(inputs=list(model.maker.parameters()))
        training.run.step(loss)


def replay_both(plain: Plain) -> None:
    """Step both optimizers after both backward passes, as documented."""
    model = plain.model
    assert isinstance(model, models.Pair)
    for each in plain.rounds:
        batch = plain.batch(together(each))
        plain.zero_grad()
        judge_loss(model, batch).backward()
        maker_loss(model, batch).backward(inputs=list(model.maker.parameters()))
        plain.step()


def train_parts(training: Training) -> None:
    """Train as ``examples/parallel/gan.py`` does."""
    for batch in training.batches():
        loss = judge_loss(training.model, batch)
        loss.backward()
        training.run.step(loss, part="judge")
        loss = maker_loss(training.model, batch)
        loss.backward()
        training.run.step(loss, part="maker")


def replay_parts(plain: Plain) -> None:
    """Step one optimizer after the other, each after the backward pass of its own loss."""
    of_maker, of_judge = plain.optimizers
    for each in plain.rounds:
        batch = plain.batch(together(each))
        for loss, optimizer in ((judge_loss, of_judge), (maker_loss, of_maker)):
            plain.zero_grad()
            loss(plain.model, batch).backward()
            optimizer.step()


def master_weights(plain: Plain) -> None:
    """Step float32 copies; round the parameters from them before each step."""
    low = {p: p.detach().float() for p in plain.model.parameters()}
    (given,) = plain.optimizers
    groups = [
        {**group, "params": [nn.Parameter(low[p]) for p in group["params"]]}
        for group in given.param_groups
    ]
    optimizer = type(given)(groups)  # type: ignore[call-arg]
    masters = [p for group in groups for p in group["params"]]
    for each in plain.rounds:
        plain.zero_grad()
        for p, master in zip(plain.model.parameters(), masters, strict=True):
            p.data.copy_(master)
            master.grad = torch.zeros_like(master)
        count = sum(map(len, each))
        for numbers in each:
            plain.model.zero_grad()
            plain.loss(plain.batch(numbers)).backward()
            for p, master in zip(plain.model.parameters(), masters, strict=True):
                assert p.grad is not None
                master.grad += p.grad.float() * (len(numbers) / count)
        optimizer.step()
    for p, master in zip(plain.model.parameters(), masters, strict=True):
        p.data.copy_(master)


MODELS = [
    Row("mlp", mlp, squares, vectors, columns=ALL),
    Row("mlp relu", partial(mlp, activation=nn.ReLU), squares, vectors),
    Row("convolution", models.convolution, squares, models.images, columns=ALL),
    Row(
        "batch norm",
        models.batch_norm,
        squares,
        models.images,
        columns=ALL,
        differences=several("exactness.md#batch-norm"),
        documented=by_workers,
    ),
    Row(
        "batch norm, fixed statistics",
        models.fixed_batch_norm,
        squares,
        models.images,
    ),
    Row(
        "group norm",
        partial(models.convolution, partial(nn.GroupNorm, 2, 4)),
        squares,
        models.images,
    ),
    Row(
        "layer norm",
        lambda: nn.Sequential(nn.LayerNorm(models.INPUTS), *mlp()),
        squares,
        vectors,
        columns=ALL,
    ),
    Row("embedding", models.language_model, cross_entropy, models.texts, columns=ALL),
    Row(
        "embedding with padding",
        partial(models.language_model, padding_idx=2),
        cross_entropy,
        models.texts,
    ),
    Row(
        "sparse embedding",
        partial(models.language_model, sparse=True),
        cross_entropy,
        models.texts,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), 0.05),
    ),
    Row("tied weights", models.tied, cross_entropy, models.texts, columns=ALL),
    Row("frozen parameters", models.frozen, squares, vectors, columns=ALL),
    Row(
        "parameters in bfloat16 and float32",
        partial(models.Dtypes, torch.bfloat16, torch.float32),
        in_single,
        vectors,
        differences=everywhere("exactness.md#dtypes"),
        documented=master_weights,
    ),
    Row(
        "parameters in bfloat16",
        partial(models.Dtypes, torch.bfloat16, torch.bfloat16),
        in_single,
        vectors,
        tolerance=0.01,  # some units in the last of eight bits
    ),
    Row(
        "float64",
        lambda: mlp().double(),
        squares,
        partial(vectors, dtype=torch.float64),
        columns=ALL,
        tolerance=1e-13,
    ),
    Row(
        "parameters in float32 and float64",
        partial(models.Dtypes, torch.float32, torch.float64),
        in_double,
        vectors,
        tolerance=1e-7,
    ),
    Row("lstm", partial(models.Recurrent, nn.LSTM), squares, models.sequences, columns=ALL),
    Row(
        "bidirectional gru of two layers",
        partial(models.Recurrent, nn.GRU, num_layers=2, bidirectional=True),
        squares,
        models.sequences,
    ),
    Row("attention", models.Attention, cross_entropy, models.texts),
    Row(
        "transformer layer",
        partial(models.Attention, True),
        cross_entropy,
        models.texts,
        columns=ALL,
    ),
    Row("parameter lists and a scalar", models.Lists, squares, vectors, columns=ALL),
    Row("strided and empty parameters", models.Strided, squares, vectors),
    Row("weight norm", weight_norm, squares, vectors),
    Row("spectral norm", spectral_norm, squares, vectors),
    Row("channels last", channels_last, squares, models.images),
    Row(
        "channels_last=True",
        models.convolution,
        squares,
        models.images,
        settings={"steps": 3, "channels_last": True},
    ),
    Row(
        "two models, two optimizers",
        models.Pair,
        maker_loss,
        vectors,
        optimizer=two_adams,
        settings={"steps": 3, "wait_free": False},
        train=train_both,
        replay=replay_both,
    ),
    Row(
        "two models, stepped one after the other",
        models.Pair,
        maker_loss,
        vectors,
        optimizer=two_adams,
        settings={"steps": 3, "parts": ["judge", "maker"]},
        train=train_parts,
        replay=replay_parts,
    ),
    Row("function with its own backward", mlp, through_function, vectors),
    Row(
        "branch that some batches take",
        partial(models.Branches, 1.0),
        squares,
        vectors,
        replay=by_workers,
        settings={"samples": 72},
    ),
    Row(
        "parameter that is never used",
        partial(models.Branches, 100.0),
        squares,
        vectors,
    ),
]


# -- losses -----------------------------------------------------------------------------------
WEIGHTS = torch.tensor([0.2, 1.0, 2.0, 0.5])


def summed(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 10


def several_terms(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch[0])
    errors = outputs - batch[1]
    return errors.square().mean() + 0.3 * errors.abs().mean() + 0.1 * outputs.exp().mean()


def smoothed(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)


def binary(model: nn.Module, batch: Batch) -> Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), (batch[1] > 0).float())


def weighted_by_class(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], WEIGHTS)


def weighted_by_sample(model: nn.Module, batch: Batch) -> Tensor:
    losses = functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * WEIGHTS[batch[1]]).mean()


def without_padding(model: nn.Module, batch: Batch) -> Tensor:
    outputs, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
    return functional.cross_entropy(outputs, targets.where(targets > 3, -100))


def regularised(model: nn.Module, batch: Batch) -> Tensor:
    penalty = sum(p.square().sum() + p.abs().sum() for p in model.parameters())
    return cross_entropy(model, batch) + 0.01 * penalty


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss whose terms depend on pairs of samples."""
    outputs = functional.normalize(model(batch[0]), dim=1)
    return functional.cross_entropy(5 * outputs @ outputs.t(), torch.arange(len(outputs)))


def gradient_penalty(model: nn.Module, batch: Batch) -> Tensor:
    """Return a loss that contains a derivative."""
    inputs = batch[0].clone().requires_grad_()
    outputs = model(inputs)
    (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
    return functional.mse_loss(outputs, batch[1]) + 0.1 * slope.square().sum(1).mean()


SUMS = several("exactness.md#losses-that-are-sums")
MEANS = several("exactness.md#weighted-means")
LOSSES = [
    Row("loss: cross entropy", classifier, cross_entropy, labelled, columns=ALL),
    Row(
        "loss: sum",
        classifier,
        summed,
        labelled,
        columns=ALL,
        differences=SUMS,
        documented=by_workers,
    ),
    Row("loss: several terms", mlp, several_terms, vectors),
    Row("loss: label smoothing", classifier, smoothed, labelled),
    Row("loss: binary", mlp, binary, vectors),
    Row(
        "loss: mean weighted by class",
        classifier,
        weighted_by_class,
        labelled,
        differences=MEANS,
        documented=by_workers,
    ),
    Row("loss: weights of samples, by count", classifier, weighted_by_sample, labelled),
    Row(
        "loss: mean over tokens without padding",
        models.language_model,
        without_padding,
        models.texts,
        differences=MEANS,
        documented=by_workers,
    ),
    Row("loss: regularisation by parameters", classifier, regularised, labelled, columns=ALL),
    Row(
        "loss: pairs of samples",
        mlp,
        contrastive,
        vectors,
        differences=several("exactness.md#losses-across-samples"),
        documented=by_workers,
    ),
    Row("loss: gradient penalty", mlp, gradient_penalty, vectors),
    Row(
        "loss: unequal last batches",
        classifier,
        cross_entropy,
        partial(labelled, 31),
        settings={"epochs": 1},
        columns=ALL,
    ),
    Row(
        "loss: one sample in the last round",
        classifier,
        cross_entropy,
        partial(labelled, 37),
        settings={"epochs": 1},
    ),
    Row(
        "loss: unequal last batches, two epochs",
        classifier,
        cross_entropy,
        partial(labelled, 31),
        settings={"epochs": 2},
        is_even=False,
    ),
]
