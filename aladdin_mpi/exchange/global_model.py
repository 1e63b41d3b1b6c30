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

No u is stored, but what was sent is, s, which has momentum: u = s - m s_before. If M' includes
s_0, and lacks s_1 to s_q, the steps above are, in closed form::

    W <- V - w s_0;  V <- m^q W + w s_q;  x <- M' - (m + m^2 + .. + m^q) W - w (s_1 + .. + s_q)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from aladdin_mpi.codec.base import ModelDecoder
from aladdin_mpi.exchange.worker_mailbox import Outbox
from aladdin_mpi.flat import fused
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.flat.vectors import BLOCK, blocks, clear, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.worker.worker import Worker

MOST_ENCODED, MOST_VECTORS = 9, 5
"""Largest numbers of own messages kept; older ones are left out of the prediction."""
MOST_STEPS = 1000
"""Largest number of own steps whose bases are kept; the age of older ones is not measured."""
AGE_SHARE = 0.1
"""Weight of the newest gradient in the running mean of ages."""


@dataclass
class Step:
    """One of the worker's own steps, until models of all buckets include it.

    Attributes:
        index: number of the step in the segment, from 1.
        base: for each bucket, the number of gradients in the model it was computed on.
    """

    index: int
    base: list[int]


class GlobalModelPredictor(Stateful):
    """x, V and M of all buckets.

    Args:
        worker: worker whose parameters are moved.
        optimizer: makes steps of its gradients.
        outbox: sends the steps, and keeps what was sent.
        weight: w, the weight of an own gradient as a substitute for all workers'; None: a / 2,
            limited to [1/2, 1], for an age of a rounds.
        lookahead: L, rounds to look ahead from x; None: the optimizer's.
    """

    SAVED = saved("velocity", "model", "count", "age", "begun")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        outbox: Outbox,
        weight: float | None,
        lookahead: float | None,
    ) -> None:
        self.worker = worker
        self.optimizer = optimizer
        self.outbox = outbox
        self.x = worker.parameters
        self.velocity = worker.replica.new_vector()
        self.model = worker.replica.new_vector()
        self._former: Tensor | None = None
        """Model of a bucket before a decoder has changed it; None: decoders have own memory."""
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
        self.pending: deque[Step] = deque(maxlen=MOST_STEPS)

    @property
    def n(self) -> float:
        """Gradients of a round: the number that moves the model by a step of all workers."""
        return self.worker.divisor

    # -- segments and steps -------------------------------------------------------------
    def open(self) -> None:
        """Start a segment: all models to come include every step of earlier segments."""
        self.own = [0] * len(self.own)
        self.sent = 0
        self.pending.clear()
        if not self.begun:
            copy(self.model, self.x)
            self.begun = True

    def begin(self) -> None:
        """Start a step of the worker, and discard those that all models include."""
        oldest = min(self.own)
        self.outbox.forget(oldest)
        while self.pending and self.pending[0].index <= oldest:
            self.pending.popleft()
        self.sent += 1
        self.pending.append(Step(self.sent, list(self.count)))

    # -- arithmetic ---------------------------------------------------------------------
    def make_step(self, bucket: Bucket, g: Tensor, lr: float) -> None:
        """Turn the completed ``bucket`` of the flat gradient ``g`` into the step to send."""
        if g.is_meta:
            return
        for part in _pieces(bucket, g):
            mine = g[part]
            self.optimizer.correct(part, mine, self.x[part], self.worker.unused(part), self.n)
            mine.mul_(lr)

    def advance(self, bucket: Bucket, step: Tensor) -> None:
        """Move p to the point of the next gradient in case no model arrives.

        ``step`` has the step in this bucket.
        """
        if step.is_meta:
            return
        k, m, w = self.k, self.optimizer.momentum, self.weight(bucket)
        for part in _pieces(bucket, step):
            p, v, mine = self.x[part], self.velocity[part], step[part]
            if fused.is_usable(p, mine, rounded=(v,)):
                fused.track_advance(p, v, mine, m, w, k)
                continue
            p.add_(v, alpha=k)  # x: a handler that reads it here gets a consistent model too
            v.mul_(m).add_(mine, alpha=w)
            p.sub_(v, alpha=1 + k)
        former = self.outbox.newest
        if former is not None and m:
            share = w * m / former.count
            p, v = bucket.of(self.x), bucket.of(self.velocity)
            self.outbox.add(former, bucket, (v, -share), (p, (1 + k) * share))

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
        p, v, model = bucket.of(self.x), bucket.of(self.velocity), bucket.of(self.model)
        if self._former is not None:
            model = self._former[: bucket.numel]
        for new, x, velocity, former in blocks(values, p, v, model):
            if fused.is_usable(new, x, former, rounded=(velocity,)):
                fused.track_model(new, x, velocity, former, rounds)
                continue
            if rounds > 0:
                torch.sub(former, new, out=velocity).div_(rounds)
                if self._former is None:  # otherwise the decoder has changed M
                    former.copy_(new)
            x.copy_(new)
        self._repeat_own_steps(bucket, p, v)

    def _repeat_own_steps(self, bucket: Bucket, p: Tensor, v: Tensor) -> None:
        """Move a received model by the worker's own steps that it lacks, and ahead."""
        before, sent = self.outbox.after(self.own[bucket.index])
        m, w, k = self.optimizer.momentum, self.weight(bucket), self.k
        count = sum(each.count for each in sent)
        if sent and before is not None and m:
            self.outbox.add(before, bucket, (v, -w / before.count))
        p.sub_(v, alpha=sum(m**i for i in range(1, count + 1)) + k * m**count)
        if not sent:
            return
        v.mul_(m**count)
        *others, last = sent
        for each in others:
            self.outbox.add(each, bucket, (p, -w))
        # V is the mean of the steps in the last message.
        share = w / last.count
        self.outbox.add(last, bucket, (p, -w - k * share), (v, share))

    # -- models that a decoder stores ---------------------------------------------------
    def store_models_of(self, decoder: ModelDecoder) -> None:
        """Let ``decoder`` store its models in M, so that they exist once.

        V is then in bf16, since encoded models have errors that are larger than its rounding.
        """
        self.model = self.model.to(torch.float32)  # the dtype of encoded messages
        self.velocity = self.velocity.to(torch.bfloat16)
        self._former = self.model.new_empty(self.worker.layout.largest)
        decoder.keep_in(self.model)

    def prepare(self, bucket: Bucket) -> None:
        """Keep M of a bucket, which the decoder is about to change."""
        if self._former is not None:
            self._former[: bucket.numel].copy_(bucket.of(self.model))

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
        self.outbox.former = None
        self.count = [count] * len(self.count)
        self.begun = False


def _pieces(bucket: Bucket, vector: Tensor) -> Iterator[slice]:
    """Yield parts of a bucket that fit into a cache; on devices other than CPUs the whole."""
    size = BLOCK if vector.device.type == "cpu" else bucket.numel
    for start in range(bucket.start, bucket.stop, size):
        yield slice(start, min(start + size, bucket.stop))
