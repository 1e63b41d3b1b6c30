"""What a model is measured by, and the statistics of batch norm that it needs before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

Evaluate = Callable[[nn.Module], Mapping[str, float]]
"""Measures a model; what it returns goes into the metrics, such as ``test_accuracy``."""


Sums = Mapping[str, float]
"""What is added up over parts of the test data."""


@dataclass(frozen=True)
class Measurement:
    """An evaluation that estimates batch norm's statistics by itself, and can be divided.

    Attributes:
        prepare: does the former, alike at every rank.
        sums: of a module, over the i-th of n equal parts: called with the module, i and n.
        figures: made of the sums over all parts.
    """

    prepare: Callable[[nn.Module], None]
    sums: Callable[[nn.Module, int, int], Sums]
    figures: Callable[[Sums], Mapping[str, float]]

    def __call__(self, module: nn.Module) -> Mapping[str, float]:
        """Measure ``module`` as a whole."""
        self.prepare(module)
        return self.figures(self.sums(module, 0, 1))


def added(parts: Iterable[Sums]) -> Sums:
    """The sums over several parts together."""
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0) + value
    return total


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a module's forward pass."""


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The parts of ``module`` that have running statistics."""
    return [m for m in module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]


def reestimate_batch_norm(
    module: nn.Module, calls: Iterable[Call], trained: Sequence[bool] | None = None
) -> None:
    """Estimate the running statistics of batch norms anew, from their inputs in ``calls``.

    No gradient method transmits these statistics, and an average of models has none
    that would fit it. All other parts are as in evaluation. A model without batch norm costs
    nothing.

    Args:
        module: whose statistics change.
        calls: its arguments.
        trained: for each of :func:`batch_norms`, whether training changes its statistics; one in
            eval mode keeps those that it has. None: all do.
    """
    norms = batch_norms(module)
    if trained is not None:
        norms = [norm for norm, is_trained in zip(norms, trained, strict=True) if is_trained]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    modes = {each: each.training for each in module.modules()}
    module.eval()  # dropout would change what they see, and draw from the training's generator
    for norm in norms:
        norm.train()
        norm.reset_running_stats()
        norm.momentum = None  # the plain mean over all batches
    with torch.no_grad():
        for args, kwargs in calls:
            module(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    for each, mode in modes.items():
        each.training = mode
