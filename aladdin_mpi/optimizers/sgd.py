"""Momentum SGD on flat vectors, bucket by bucket, and the learning rate of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import cos, pi, sqrt
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.flat import fused
from aladdin_mpi.flat.unused import Unused, used_parts
from aladdin_mpi.flat.vectors import blocks
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.general import GeneralOptions

WHOLE = (slice(None),)
"""The used parts of a vector without unused parts."""


class MomentumSGD(Optimizer):
    """``v <- m v + (g + d x)``, ``x <- x - lr v``, as in torch.optim.SGD.

    Works on parts of the flat vector, so that a part can be sent as soon as backward has
    completed it.

    Args:
        like: the flat vector of parameters.
        momentum: m, in [0, 1).
        weight_decay: d; added to the gradient.
        nesterov: step along ``g + m v`` instead of ``v``.
        clip: largest L2 norm of a gradient, before weight decay; None: no limit. A part is
            limited to its share, ``clip * sqrt(part's length / whole length)``, so that
            parts need not wait for each other.
    """

    def __init__(
        self,
        like: Tensor,
        momentum: float,
        weight_decay: float,
        nesterov: bool = False,
        clip: float | None = None,
    ) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov
        self.clip = clip
        self._numel = like.numel()
        self.velocity = torch.zeros_like(like) if momentum else None

    def correct(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        unused: Unused = (),
        workers: float = 1.0,
    ) -> None:
        """Compute the direction."""
        if gradient.is_meta:
            return
        if self.clip is not None:
            self._clip(gradient, self.clip)
        velocity = gradient if self.velocity is None else self.velocity[part]
        for used in used_parts(x.numel(), unused) if unused else WHOLE:
            for vectors in blocks(gradient[used], x[used], velocity[used]):
                self._to_direction(*vectors)
        for each in unused:
            gradient[each].zero_()

    def descend(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        lr: float,
        factor: float = 1.0,
        unused: Unused = (),
    ) -> None:
        """Step ``x``; ``gradient`` becomes the direction."""
        if gradient.is_meta:
            return
        if self.clip is not None:
            gradient.mul_(factor)
            factor = 1.0
            self._clip(gradient, self.clip)
        velocity = gradient if self.velocity is None else self.velocity[part]
        for used in used_parts(x.numel(), unused) if unused else WHOLE:
            for g, x_part, v in blocks(gradient[used], x[used], velocity[used]):
                if factor != 1.0:
                    g.mul_(factor)
                self._to_direction(g, x_part, v)
                x_part.add_(g, alpha=-lr)

    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """Step ``x``; ``gradient`` becomes the direction, which is zero in ``unused``."""
        self.descend(part, gradient, x, lr, unused=unused)
        for each in unused:
            gradient[each].zero_()

    def _to_direction(self, g: Tensor, x: Tensor, v: Tensor) -> None:
        """Turn a gradient into a direction; ``v`` is the velocity, if momentum is used."""
        if self.velocity is not None and g.is_cuda and fused.is_usable(g, x, v):
            fused.momentum_step(g, x, v, self.weight_decay, self.momentum, self.nesterov)
            return
        if self.weight_decay:
            g.add_(x, alpha=self.weight_decay)
        if self.velocity is None:
            return
        v.mul_(self.momentum).add_(g)
        if self.nesterov:
            g.add_(v, alpha=self.momentum)
        else:
            g.copy_(v)

    def mix(self, part: slice, movement: Tensor, x: Tensor, lr: float, weight: float) -> None:
        """Move the velocity towards ``-movement / lr``: its steps then move by ``movement``."""
        if self.velocity is not None and lr and not movement.is_meta:
            self.velocity[part].lerp_(movement.div_(-lr), weight)

    def _clip(self, gradient: Tensor, largest: float) -> None:
        bound = largest * sqrt(gradient.numel() / self._numel)
        gradient.mul_((bound / gradient.norm()).clamp_(max=1.0))

    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """Step the whole vector, without changing ``gradient``."""
        if gradient.is_meta:
            return
        clipped = gradient
        if self.clip is not None:
            clipped = gradient.clone()
            self._clip(clipped, self.clip)
        velocity = gradient if self.velocity is None else self.velocity
        for used in used_parts(x.numel(), unused) if unused else WHOLE:
            for g, x_part, v in blocks(clipped[used], x[used], velocity[used]):
                direction = g.clone()
                self._to_direction(direction, x_part, v)
                x_part.add_(direction, alpha=-lr)

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return the velocity, for a checkpoint."""
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Restore a velocity from a checkpoint."""
        if self.velocity is not None and state["velocity"] is not None:
            self.velocity.copy_(state["velocity"])

    def joined(
        self, states: Sequence[dict[str, Any] | None], parts: Sequence[Sequence[slice]]
    ) -> dict[str, Any] | None:
        """Return the joint velocity, which is zero for lost servers."""
        known = [state for state in states if state is not None]
        if not known or known[0]["velocity"] is None:
            return known[0] if known else None
        whole = known[0]["velocity"]
        for state, own in zip(states, parts, strict=True):
            for part in own:
                whole[part] = 0.0 if state is None else state["velocity"][part]
        return {"velocity": whole}

    def state_of(self, part: slice) -> dict[str, Any]:
        """Return a copy of a part's velocity."""
        return {"velocity": None if self.velocity is None else self.velocity[part].clone()}

    def put_part(
        self, whole: dict[str, Any] | None, state: dict[str, Any], part: slice, like: Tensor
    ) -> dict[str, Any] | None:
        """Write a part's velocity into ``whole``."""
        if state["velocity"] is None:
            return whole
        if whole is None or whole["velocity"] is None:
            whole = {"velocity": torch.zeros_like(like)}
        whole["velocity"][part] = state["velocity"]
        return whole


# -- learning rates ------------------------------------------------------------------------------
def scale_of(scaling: str, workers: int) -> float:
    """Return the factor of ``--lr-scaling`` on the learning rate of one worker."""
    return {"linear": float(workers), "sqrt": sqrt(workers), "none": 1.0}[scaling]


@dataclass(frozen=True)
class LearningRate:
    """Warm-up, then constant, steps or half a cosine, scaled by the number of workers.

    The schedule follows the global sample count, which is correct for workers of any speed.
    The warm-up of SGD rises from the rate of one worker to the scaled one (Goyal et al., 2017,
    section 2.2), that of other optimizers from 0.

    Args:
        options: the ``lr_*`` and ``warmup_epochs`` options.
        workers: number of workers.
        epoch: samples of one epoch.
        total: samples of the run.
        base: rate of one worker; 1 if the optimizer's groups include it.
        function: factor as a function of the samples drawn, which replaces warm-up and
            schedule.
    """

    options: GeneralOptions
    workers: int
    epoch: int
    total: int
    base: float
    function: Callable[[int], float] | None = None

    @cached_property
    def scale(self) -> float:
        """Factor on the rate of one worker."""
        return scale_of(self.options.lr_scaling, self.workers)

    @cached_property
    def _warmup(self) -> float:
        """Number of samples of the warm-up."""
        return min(self.options.warmup_epochs * self.epoch, self.total)

    def __call__(self, samples: int) -> float:
        """Return the learning rate after ``samples`` samples."""
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


def unscaled(workers: int) -> float:
    """Return 1: the learning rate is the same for each number of workers."""
    return 1.0


def divisor(workers: int, survivors: int, lr_scale: Callable[[int], float]) -> float:
    """Return the divisor of a worker's gradient.

    A gradient keeps the weight of a run of the surviving workers alone: it is divided by their
    number, and the learning rate, which remains that for all ``workers`` of the current group, is
    corrected to theirs. With the default, linear scaling, that is the number of all workers.
    ``lr_scale`` returns the factor on the rate for a number of workers.
    """
    return survivors * lr_scale(workers) / lr_scale(survivors)
