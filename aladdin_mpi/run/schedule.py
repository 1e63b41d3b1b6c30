"""The learning rate as a function of the samples that all workers have drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi, sqrt

from aladdin_mpi.options.run import RunOptions


def scale_of(scaling: str, workers: int) -> float:
    """Return what ``--lr-scaling`` multiplies the learning rate of one worker by."""
    return {"linear": float(workers), "sqrt": sqrt(workers), "none": 1.0}[scaling]


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then constant, steps or half a cosine, scaled by the number of workers.

    Following the global sample count keeps the schedule right however unequal the
    workers are. The warm-up of SGD rises from the rate of one worker to the scaled one
    (Goyal et al., 2017, section 2.2), that of other optimizers from 0.

    Args:
        options: the ``lr_*`` and ``warmup_epochs`` options.
        workers: their number.
        epoch: samples of one epoch.
        total: samples of the run.
        base: the rate of one worker; 1 where the optimizer has it in its groups.
        function: of the samples drawn, in place of warm-up and the rest: a factor.
    """

    options: RunOptions
    workers: int
    epoch: int
    total: int
    base: float
    function: Callable[[int], float] | None = None

    @cached_property
    def scale(self) -> float:
        """What the rate of one worker is multiplied by."""
        return scale_of(self.options.lr_scaling, self.workers)

    @cached_property
    def _warmup(self) -> float:
        """Samples of the warm-up."""
        return min(self.options.warmup_epochs * self.epoch, self.total)

    def __call__(self, samples: int) -> float:
        """The rate when ``samples`` have been drawn."""
        options = self.options
        rate = self.base * self.scale
        if self.function is not None:
            return rate * float(self.function(samples))
        warmup = self._warmup
        if samples < warmup:
            if options.optimizer != "sgd":
                return rate * samples / warmup
            return self.base * (1 + (self.scale - 1) * samples / warmup)
        if options.lr_schedule == "step":
            passed = sum(samples >= step * self.epoch for step in options.lr_steps)
            return rate * options.lr_decay**passed
        if options.lr_schedule == "cosine" and self.total > warmup:
            return rate * 0.5 * (1 + cos(pi * (samples - warmup) / (self.total - warmup)))
        return rate
