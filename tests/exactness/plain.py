"""Train with plain torch on the samples that the workers of a run used in each round.

This module uses nothing of the project: it is the reference that the project is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.exactness import row as rows
from tests.exactness.row import Batch, Round, Row

Parameters = Mapping[str, Tensor]


class Plain:
    """A model, its optimizers and its data in one process, without any wrapper.

    Args:
        row: a row of the table.
        workers: number of workers.
        rounds: the samples of each worker, by round.
        epochs: the epoch of each round.
    """

    def __init__(self, row: Row, workers: int, rounds: list[Round], epochs: list[int]) -> None:
        torch.manual_seed(0)
        self.row = row
        self.model = row.model()
        optimizer = row.optimizer(self.model)
        self.optimizers = optimizer if isinstance(optimizer, list) else [optimizer]
        self.scheduler = None if row.scheduler is None else row.scheduler(optimizer)
        self.workers, self.rounds, self.epochs = workers, rounds, epochs
        self._samples = row.samples()

    def batch(self, numbers: Sequence[int]) -> Batch:
        return self.row.collate([self._samples[number] for number in numbers])

    def loss(self, batch: Batch) -> Tensor:
        return self.row.loss(self.model, batch)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()


def train(
    row: Row,
    replay: Callable[[rows.Plain], None],
    workers: int,
    rounds: list[Round],
    epochs: list[int],
) -> tuple[Parameters, Parameters]:
    """Train, and return the parameters before and after."""
    plain = Plain(row, workers, rounds, epochs)
    before = parameters(plain.model)
    replay(plain)
    return before, parameters(plain.model)


def parameters(model: nn.Module) -> Parameters:
    """Return a copy of the parameters in double precision."""
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def distance(one: Parameters, other: Parameters) -> float:
    """Return the largest difference, relative to the largest parameter of ``other``."""
    assert one.keys() == other.keys()
    size = max(float(p.abs().max()) for p in other.values() if p.numel())
    return max(
        float((one[name] - p).abs().nan_to_num(torch.inf).max()) / size
        for name, p in other.items()
        if p.numel()
    )


def decoded(values: Mapping[str, Any], like: Parameters) -> Parameters:
    """Return parameters from the lists of numbers in a report."""
    return {
        name: torch.tensor(values[name], dtype=torch.float64).view(p.shape)
        for name, p in like.items()
    }
