"""Momentum SGD on flat vectors, bucket by bucket."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

from aladdin_mpi.flat import fused
from aladdin_mpi.flat.unused import Unused, used_parts
from aladdin_mpi.flat.vectors import blocks
from aladdin_mpi.optimizers.base import Optimizer


class MomentumSGD(Optimizer):
    """``v <- m v + (g + d x)``, ``x <- x - lr v``, as torch.optim.SGD computes it.

    It works on parts of the flat vector, so that a part can be sent as soon as
    backward has completed it.

    Args:
        like: the flat vector of parameters.
        momentum: m, in [0, 1).
        weight_decay: d; added to the gradient.
        nesterov: step along ``g + m v`` instead of ``v``.
        clip: largest L2 norm of a gradient, before weight decay; a part of the flat
            vector is scaled down to its share, ``clip * sqrt(part's length / whole
            length)``, so that parts need not wait for each other; None: none.
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
        raw: Tensor | None = None,
        unused: Unused = (),
    ) -> None:
        """See :meth:`Optimizer.correct`; ``raw`` takes ``g + d x``."""
        if gradient.is_meta:
            return
        if self.clip is not None:
            self._clip(gradient, self.clip)
        velocity = gradient if self.velocity is None else self.velocity[part]
        kept = gradient if raw is None else raw
        for used in used_parts(x.numel(), unused):
            vectors = gradient[used], x[used], velocity[used], kept[used]
            for g, x_part, v, u in blocks(*vectors):
                self._turn(g, x_part, v, None if raw is None else u)
        for each in unused:
            gradient[each].zero_()
            if raw is not None:
                raw[each].zero_()

    def descend(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        lr: float,
        factor: float = 1.0,
        unused: Unused = (),
    ) -> None:
        """See :meth:`Optimizer.descend`; ``gradient`` becomes the direction."""
        if gradient.is_meta:
            return
        if self.clip is not None:
            gradient.mul_(factor)
            factor = 1.0
            self._clip(gradient, self.clip)
        velocity = gradient if self.velocity is None else self.velocity[part]
        for used in used_parts(x.numel(), unused):
            for g, x_part, v in blocks(gradient[used], x[used], velocity[used]):
                if factor != 1.0:
                    g.mul_(factor)
                self._turn(g, x_part, v)
                x_part.add_(g, alpha=-lr)

    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """See :meth:`Optimizer.correct_and_descend`."""
        self.descend(part, gradient, x, lr, unused=unused)
        for each in unused:
            gradient[each].zero_()

    def _turn(self, g: Tensor, x: Tensor, v: Tensor, raw: Tensor | None = None) -> None:
        """Gradient into step; ``v`` is the velocity, if there is any."""
        if self.velocity is not None and fused.is_usable(g, x, v, g if raw is None else raw):
            settings = self.weight_decay, self.momentum, self.nesterov
            fused.momentum_step(g, x, v, raw, *settings)
            return
        if self.weight_decay:
            g.add_(x, alpha=self.weight_decay)
        if raw is not None:
            raw.copy_(g)
        if self.velocity is None:
            return
        v.mul_(self.momentum).add_(g)
        if self.nesterov:
            g.add_(v, alpha=self.momentum)
        else:
            g.copy_(v)

    def _clip(self, gradient: Tensor, largest: float) -> None:
        bound = largest * sqrt(gradient.numel() / self._numel)
        gradient.mul_((bound / gradient.norm()).clamp_(max=1.0))

    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """See :meth:`Optimizer.step`."""
        if gradient.is_meta:
            return
        clipped = gradient
        if self.clip is not None:
            clipped = gradient.clone()
            self._clip(clipped, self.clip)
        velocity = gradient if self.velocity is None else self.velocity
        for used in used_parts(x.numel(), unused):
            for g, x_part, v in blocks(clipped[used], x[used], velocity[used]):
                direction = g.clone()
                self._turn(direction, x_part, v)
                x_part.add_(direction, alpha=-lr)

    def state_dict(self) -> dict[str, Tensor | None]:
        """The velocity, for a checkpoint."""
        return {"velocity": self.velocity}

    def load_state_dict(self, state: dict[str, Tensor | None]) -> None:
        """Take a velocity from a checkpoint."""
        if self.velocity is not None and state["velocity"] is not None:
            self.velocity.copy_(state["velocity"])
