"""Rows of the table, and the columns in which they are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, default_collate

BATCH = 4
"""Number of samples in a worker's batch."""
SAMPLES = 36
"""Number of samples in a data set: three batches for each of three workers."""
STEPS = 3

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
Optimizers = Optimizer | list[Optimizer]
Round = list[list[int]]
"""The samples of each worker's batch, by number."""


@dataclass(frozen=True)
class Column:
    """A way to run the rows.

    Attributes:
        ranks: number of ranks; 0: one process that mpirun does not start.
        workers: number of ranks that train.
        settings: keyword arguments of ``DataParallel``.
        is_sharded: whether FSDP divides the model among the workers of an island.
    """

    ranks: int
    workers: int
    settings: Mapping[str, Any]
    is_sharded: bool = False


COLUMNS = {
    "ar-sgd": Column(3, 3, {"algorithm": "ar-sgd"}),
    "bsp": Column(4, 3, {"algorithm": "bsp"}),
    "one process": Column(0, 1, {}),
    "asp, one worker": Column(2, 1, {"algorithm": "asp"}),
    "asp": Column(4, 3, {"algorithm": "asp"}),
    "ar-sgd, islands": Column(4, 4, {"algorithm": "ar-sgd", "island": 2}),
    "ar-sgd, sharded": Column(4, 4, {"algorithm": "ar-sgd", "island": 2}, is_sharded=True),
    "aladdin-ahead": Column(4, 3, {"algorithm": "aladdin-ahead", "wire": "fp32"}),
}
SYNCHRONOUS = ("ar-sgd", "bsp", "one process")
ONE_WORKER = ("asp, one worker",)
ASYNCHRONOUS = ("asp", "aladdin-ahead")
"""Columns for rows whose gradients do not depend on the parameters: the order is irrelevant."""


class Training(Protocol):
    """A rank's run of a row, used by ``Row.train``; see ``program.py``."""

    run: Any
    """The ``DataParallel``."""
    model: nn.Module
    optimizer: Optimizers
    scheduler: LRScheduler | None

    def batches(self, sharded: bool = False) -> Iterator[Batch]:
        """Return batches from ``run.batches``; the samples of each are recorded."""

    def epochs(self) -> Iterator[Iterator[Batch]]:
        """Return epochs from ``run.epochs``; the samples of each batch are recorded."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the row's loss."""

    @property
    def number(self) -> int:
        """Return the number of recorded batches, starting at 1 within the loop."""


class Plain(Protocol):
    """Training in plain torch, used by ``Row.replay``; see ``plain.py``."""

    model: nn.Module
    optimizers: list[Optimizer]
    scheduler: LRScheduler | None
    workers: int
    rounds: list[Round]
    epochs: list[int]
    """The epoch of each round."""

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return a batch of these samples."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the row's loss."""

    def zero_grad(self) -> None:
        """Clear all gradients."""

    def step(self) -> None:
        """Step all optimizers, and the scheduler if there is one."""


def step_by_step(training: Training) -> None:
    """Train with the basic loop of the documentation."""
    for batch in training.batches():
        loss = training.loss(batch)
        loss.backward()
        training.run.step(loss)


def together(each: Round) -> list[int]:
    """Return the samples of all workers."""
    return [number for batch in each for number in batch]


def on_the_union(plain: Plain) -> None:
    """Take one step per round on a batch of all workers' samples."""
    for each in plain.rounds:
        plain.zero_grad()
        plain.loss(plain.batch(together(each))).backward()
        plain.step()


def gradients_by_workers(
    plain: Plain, each: Round, change: Callable[[], object] = lambda: None
) -> None:
    """Compute the mean of the workers' gradients, weighted by samples.

    Args:
        plain: its gradients are set.
        each: the round.
        change: called with each worker's gradients in place.
    """
    parameters = list(plain.model.parameters())
    means: list[Tensor | None] = [None] * len(parameters)
    for numbers in each:
        plain.zero_grad()
        plain.loss(plain.batch(numbers)).backward()
        change()
        share = len(numbers) / sum(map(len, each))
        for place, p in enumerate(parameters):
            if p.grad is not None:
                before, part = means[place], p.grad * share
                means[place] = part if before is None else before + part
    for p, mean in zip(parameters, means, strict=True):
        p.grad = mean


def by_workers(plain: Plain) -> None:
    """Take one step per round with the sample-weighted mean of the workers' gradients."""
    for each in plain.rounds:
        gradients_by_workers(plain, each)
        plain.step()


def one_by_one(plain: Plain) -> None:
    """Take one step per worker's batch, with its share of the learning rate."""
    for each in plain.rounds:
        for numbers in each:
            plain.zero_grad()
            (plain.loss(plain.batch(numbers)) / plain.workers).backward()
            plain.step()


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=0.01)


def shuffled(samples: Any) -> DataLoader[Any]:
    return DataLoader(samples, BATCH, shuffle=True)


def numbers_last(batch: Batch) -> Tensor:
    last: Tensor = batch[-1]
    return last


def given_as_object(model: nn.Module, optimizer: Optimizers) -> dict[str, Any]:
    return {"optimizer": optimizer}


@dataclass(frozen=True)
class Row:
    """A configuration that the project and plain torch train in the same way.

    Attributes:
        name: unique name; part of the test's id.
        model: creates the model; torch's seed is the same everywhere.
        loss: computes the loss of a model and a batch.
        samples: creates the data set, whose samples contain their own number.
        feed: turns the data set into an argument of ``run.batches()``.
        numbers: returns the numbers of a batch's samples.
        collate: combines samples into a batch, for plain torch.
        optimizer: creates plain torch's optimizer, or several.
        arguments: keyword arguments of ``DataParallel`` that specify this optimizer.
        scheduler: creates the optimizer's scheduler; also passed to ``DataParallel``.
        settings: further keyword arguments of ``DataParallel``.
        train: training loop that uses the project.
        replay: the same loop in plain torch, on the recorded rounds of the workers.
        columns: the columns, out of `COLUMNS`, in which the row is run.
        differences: by column, the section of the documentation ("page.md#section") that explains
            why parameters differ from those of ``replay``. The test then requires a difference.
        documented: computes the documented result in plain torch; None: no exact result.
        faults: by column, the reason why the row is expected to fail.
        is_even: no sample is used twice before all others have been used once.
        check: checks the rounds of all workers.
        tolerance: largest difference, relative to the largest parameter.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    samples: Callable[[], Any]
    feed: Callable[[Any], Any] = shuffled
    numbers: Callable[[Batch], Any] = numbers_last
    collate: Callable[[list[Any]], Batch] = default_collate
    optimizer: Callable[[Any], Optimizers] = sgd
    arguments: Callable[[nn.Module, Optimizers], dict[str, Any]] = given_as_object
    scheduler: Callable[[Any], LRScheduler] | None = None
    settings: Mapping[str, Any] = field(default_factory=lambda: {"steps": STEPS})
    train: Callable[[Training], None] = step_by_step
    replay: Callable[[Plain], None] = on_the_union
    columns: Sequence[str] = SYNCHRONOUS
    differences: Mapping[str, str] = field(default_factory=dict)
    documented: Callable[[Plain], None] | None = None
    faults: Mapping[str, str] = field(default_factory=dict)
    is_even: bool = True
    check: Callable[[list[Round]], None] | None = None
    tolerance: float = 1e-6
