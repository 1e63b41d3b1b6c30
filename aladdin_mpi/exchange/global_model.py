"""Prediction of the global model at the time when a worker's gradient is added to it.

The worker continues the synchronous recursion by itself. It computes the joint velocity of all
workers from two received models; its own steps that no model includes yet stand in for the steps
of all workers in the same time. For each bucket, with u = lr (g + d p) and n workers::

    own step       V <- m V + w u;  x <- x - V
    a model M'     V <- (M - M') n / (N' - N);  x <- M';  M, N <- M', N'
                   and for each own u that is not in M':  V <- m V + w u;  x <- x - V
    gradients at   p = x - k V,  k = m + m^2 + .. + m^L = m (1 - m^L) / (1 - m)

N is the number of gradients in a model. The module computes with the parameters p; x is
``p + k V`` and needs no extra memory. ``docs/design/aladdin.md`` derives the rule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aladdin_mpi.flat import fused
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.flat.vectors import BLOCK, blocks, clear, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.worker.worker import Worker

MOST_PENDING = 4
"""Largest number of own steps stored separately until a model includes them."""
AGE_SHARE = 0.1
"""Weight of the newest gradient in the running mean of ages."""


@dataclass
class Step:
    """One of the worker's own steps, ``lr * raw``, kept until models of all buckets include it.

    Attributes:
        index: number of the step in the segment, from 1.
        lr: its learning rate.
        raw: flat direction without momentum.
        base: for each bucket, the number of gradients in the model it was computed on.
    """

    index: int
    lr: float
    raw: Tensor
    base: list[int]


class GlobalModelPredictor(Stateful):
    """x, V and M of all buckets.

    Args:
        worker: worker whose parameters are moved.
        optimizer: makes steps of its gradients.
        weight: w, the weight of an own gradient as a substitute for all workers'; None: a / 2,
            limited to [1/2, 1], for an age of a rounds.
        lookahead: L, rounds to look ahead from x; None: the optimizer's.
    """

    SAVED = saved("velocity", "model", "count", "age", "begun")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        weight: float | None,
        lookahead: float | None,
    ) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.x = worker.parameters
        new_vector = worker.replica.new_vector
        self.velocity = new_vector()
        self.model = new_vector()
        self._new_vector = new_vector
        self._weight = weight
        m = optimizer.momentum
        rounds = optimizer.lookahead if lookahead is None else lookahead
        self.k = m * (1 - m**rounds) / (1 - m)
        buckets = len(worker.layout.buckets)
        self.count = [0] * buckets
        """N: number of gradients in the model on which x is based."""
        self.own = [0] * buckets
        """Number of this worker's gradients of this segment among them."""
        self.age = [1.0] * buckets
        """Rounds from the model that a gradient was computed on to its addition."""
        self.sent = 0
        self.begun = False
        self.pending: deque[Step] = deque()
        self._free: list[Tensor] = []

    @property
    def n(self) -> float:
        """Gradients of a round: the number that moves the model by a step of all workers."""
        return self.worker.divisor

    # -- segments and steps -------------------------------------------------------------
    def open(self) -> None:
        """Start a segment: all models to come include every step of earlier segments."""
        self.own = [0] * len(self.own)
        self.sent = 0
        while self.pending:
            self._free.append(self.pending.popleft().raw)
        if not self.begun:
            copy(self.model, self.x)
            self.begun = True

    def begin(self, lr: float) -> None:
        """Start a step of the worker."""
        self._forget()
        if len(self.pending) >= MOST_PENDING:
            self._merge_oldest()
        self.sent += 1
        raw = self._free.pop() if self._free else self._new_vector()
        self.pending.append(Step(self.sent, lr, raw, list(self.count)))

    def _forget(self) -> None:
        """Discard steps that all models include."""
        while self.pending and self.pending[0].index <= min(self.own):
            self._free.append(self.pending.popleft().raw)

    def _merge_oldest(self) -> None:
        """Merge the two oldest steps, which bounds memory when models are very late."""
        first, second = self.pending.popleft(), self.pending[0]
        # At a rate of 0 the step cannot be rescaled; the next model includes it anyway.
        if second.lr and not first.raw.is_meta:
            for bucket in self.worker.layout.buckets:
                if first.index > self.own[bucket.index]:
                    part = bucket.part
                    second.raw[part].add_(first.raw[part], alpha=first.lr / second.lr)
        self._free.append(first.raw)

    # -- arithmetic ---------------------------------------------------------------------
    def advance(self, bucket: Bucket, g: Tensor) -> None:
        """Turn the completed ``bucket`` of the flat gradient ``g`` into the step to send.

        p moves to the point of the next gradient in case no model arrives.
        """
        if g.is_meta:
            return
        step, k = self.pending[-1], self.k
        m, w = self.optimizer.momentum, self.weight(bucket) * step.lr
        for part in _pieces(bucket, g):
            p, v, raw, mine = self.x[part], self.velocity[part], step.raw[part], g[part]
            self.optimizer.correct(part, mine, p, raw, self.worker.unused(part), self.n)
            if fused.is_usable(p, v, raw, mine):
                fused.track_advance(p, v, raw, mine, step.lr, m, w, k)
                continue
            mine.mul_(step.lr)
            p.add_(v, alpha=k)  # x: a handler that reads it here gets a consistent model too
            v.mul_(m).add_(raw, alpha=w)
            p.sub_(v, alpha=1 + k)

    def rebase(self, bucket: Bucket, values: Tensor, count: int, own: int, before: int) -> None:
        """Restart the prediction of a bucket from a received model.

        Args:
            bucket: bucket of the model.
            values: values of the model.
            count: N', the number of gradients in it.
            own: number of this worker's gradients of this segment among them.
            before: number of gradients applied before this worker's newest.
        """
        index = bucket.index
        self._measure_age(index, own, before)
        rounds = (count - self.count[index]) / self.n
        self.count[index], self.own[index] = count, own
        if values.is_meta or self.x.is_meta:
            return
        m, w, part = self.optimizer.momentum, self.weight(bucket), bucket.part
        steps = [step for step in self.pending if step.index > own]
        vectors = [self.x, self.velocity, self.model, *(step.raw for step in steps)]
        for new, p, v, model, *raws in blocks(values, *(vector[part] for vector in vectors)):
            now = new.to(p.device, p.dtype)
            if fused.is_usable(now, p, v, model, *raws):
                own_steps = [(raw, w * step.lr) for step, raw in zip(steps, raws, strict=True)]
                fused.track_rebase(now, p, v, model, own_steps, rounds, m, self.k)
                continue
            if rounds > 0:
                torch.sub(model, now, out=v).div_(rounds)
                model.copy_(now)
            p.copy_(now)
            for step, raw in zip(steps, raws, strict=True):
                v.mul_(m).add_(raw, alpha=w * step.lr)
                p.sub_(v)
            p.sub_(v, alpha=self.k)

    # -- w ------------------------------------------------------------------------------
    def weight(self, bucket: Bucket) -> float:
        """Return w for a bucket."""
        if self._weight is not None:
            return self._weight
        return min(max(self.age[bucket.index] / 2, 0.5), 1.0)

    def _measure_age(self, index: int, own: int, before: int) -> None:
        """Update the mean age from the worker's newest gradient in a model."""
        for step in self.pending:
            if step.index == own > self.own[index]:
                age = (before - step.base[index]) / self.n
                self.age[index] += AGE_SHARE * (age - self.age[index])

    @property
    def mean_age(self) -> float:
        """Mean age over all buckets, in rounds."""
        return sum(self.age) / max(1, len(self.age))

    # -- checkpoints --------------------------------------------------------------------

    def restart(self, count: int = 0) -> None:
        """Restart without a state, which belonged to another worker.

        Args:
            count: number of gradients in the worker's model, if known.
        """
        clear(self.velocity)
        self.count = [count] * len(self.count)
        self.begun = False


def _pieces(bucket: Bucket, vector: Tensor) -> Iterator[slice]:
    """Yield parts of a bucket that fit into a cache; on devices other than CPUs the whole."""
    size = BLOCK if vector.device.type == "cpu" else bucket.numel
    for start in range(bucket.start, bucket.stop, size):
        yield slice(start, min(start + size, bucket.stop))
