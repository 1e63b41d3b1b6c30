"""The learning rate as a function of the samples that all workers have drawn."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi, sqrt

from aladdin_mpi.options import RunOptions


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then constant, steps or half a cosine, scaled by the number of workers.

    Following the global sample count keeps the schedule right however unequal the
    workers are. The warm-up rises from the rate of one worker to the scaled one
    (Goyal et al., 2017, section 2.2).

    Args:
        options: ``lr`` and the ``lr_*`` and ``warmup_epochs`` options.
        workers: their number.
        epoch: samples of one epoch.
        total: samples of the run.
    """

    options: RunOptions
    workers: int
    epoch: int
    total: int

    @property
    def scale(self) -> float:
        """What the rate of one worker is multiplied by."""
        scaling = self.options.lr_scaling
        return {"linear": float(self.workers), "sqrt": sqrt(self.workers), "none": 1.0}[scaling]

    def __call__(self, samples: int) -> float:
        """The rate when ``samples`` have been drawn."""
        options = self.options
        warmup = min(options.warmup_epochs * self.epoch, self.total)
        if samples < warmup:
            return options.lr * (1 + (self.scale - 1) * samples / warmup)
        rate = options.lr * self.scale
        if options.lr_schedule == "step":
            passed = sum(samples >= step * self.epoch for step in options.lr_steps)
            return rate * options.lr_decay**passed
        if options.lr_schedule == "cosine" and self.total > warmup:
            return rate * 0.5 * (1 + cos(pi * (samples - warmup) / (self.total - warmup)))
        return rate
