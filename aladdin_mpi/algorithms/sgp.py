"""SGP and Overlap SGP: stochastic gradient push (Assran et al., ICML 2019).

Push-sum over a directed graph that changes from step to step. A worker has a biased
model x and a weight w, which are both sent and added up, and computes at ``z = x / w``::

    x <- x - lr opt(g(z))                       [1]
    send (p x, p w), keep (p x, p w); p = 1/2   [2]
    x <- x + x', w <- w + w' for each message   [3]
    z <- x / w                                  [4]

This implementation keeps and sends z and w instead of x and w: the sums are the same, and the
model can be read at any time. Then [1] is ``z <- z - lr/w opt(g(z))``; [2] changes only w; and
[3] with [4] is ``z <- (w z + w' z') / (w + w')``.

SGP waits in every step for the message of this step, Overlap SGP only for the one from tau
steps before. Overlap SGP adds messages of earlier steps before it sends: then, if n is a power
of two and every message arrives within a step, models mix exactly in log2(n) steps, as in SGP.
The authors' code uses the same order but also waits before sending; here a worker waits only
afterwards, so that the order costs no time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.exchange.gossip import ModelOutbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import FIRST, saved
from aladdin_mpi.flat.vectors import add, copy, lerp
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import OSGP, SGP, OsgpOptions, SgpOptions, own
from aladdin_mpi.options.general import GeneralOptions
from aladdin_mpi.transport.base import Event, Request, await_event
from aladdin_mpi.transport.checksums import intact, is_void
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

P = 1 / 2
"""Share that a worker keeps, and share that it sends to its only out-peer."""


def hops(n: int, graph: str) -> list[int]:
    """Return the hops of a period: in each step a message goes from rank r to ``r + hop mod n``.

    ``exponential``: 1, 2, 4, ... below n, after which every rank's model has reached every
    other; for n a power of two with the same weight. ``ring``: always 1.
    """
    if graph == "ring":
        return [1]
    return [2**power for power in range((n - 1).bit_length())]


class _Push:
    """An expected message: the sender's z and the weight sent with it."""

    def __init__(self, values: Tensor) -> None:
        self.step = 0
        self.w = torch.zeros(1, dtype=torch.float64)
        self.values = values
        self.requests: list[Request] = []
        self.event: Event | None = None
        """Pending read of the values by a device."""


class SgpWorker(TrainingWorker):
    """One worker: SGP if ``tau`` is 0, otherwise Overlap SGP.

    Args:
        tau: number of steps that a message may take before the worker waits for it.
        add_first: add messages of earlier steps before sending too, not only after.
        by_numerator: the optimizer gets x = w z in place of z.
    """

    SAVED = TrainingWorker.SAVED | saved("w") | saved("steps", merge=FIRST)

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: SgpOptions,
        tau: int = 0,
        add_first: bool = False,
        by_numerator: bool = False,
    ) -> None:
        super().__init__(worker, optimizer)
        self.wire = wire.plain
        self.g = worker.replica.new_vector()
        self.tau = tau
        self.add_first = add_first
        self.by_numerator = by_numerator
        self.graph = options.graph
        self.w = 1.0
        self.steps = 0
        self.outbox = ModelOutbox(worker, self.wire, Tag.PUSH, copies=tau + 1)
        numel = worker.layout.numel
        self._spare = [_Push(self.wire.buffer(numel)) for _ in range(tau + 1)]
        self.incoming: deque[_Push] = deque()
        self._absent: tuple[int, ...] = ()

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        for batch in self.worker.batches():
            if batch.absent != self._absent:
                self._restart_weights(batch.absent)
            source, dest = self._neighbours(batch.absent)
            self._expect(source)
            self.descend(self.worker.lr / self.w, self.g)  # [1]
            if self.add_first:
                # Not this step's, which a faster worker may have sent already: the next worker
                # would get it a step early, and mixing would not be exact.
                self._pull(self.steps)  # [3, 4]
            self._push(dest)  # [2]
            self.steps += 1
            self._pull(self.steps, self.steps - self.tau)  # [3, 4]
        self._pull(self.steps, self.steps)
        self.outbox.flush()

    def direction(self, g: Tensor) -> Tensor:
        """Return the direction of the step at z, or at x = w z if ``by_numerator``."""
        if not self.by_numerator:
            return super().direction(g)
        self.fill_gradient(g)
        whole = slice(0, g.numel())
        self.optimizer.correct(whole, g, self.x * self.w, unused=self.worker.unused(whole))
        return g

    def descend(self, rate: float, g: Tensor) -> None:
        """Step along :meth:`direction`."""
        if not self.by_numerator:
            super().descend(rate, g)
            return
        add(self.x, self.direction(g), alpha=-rate)
        self.worker.project(self.x)

    def _restart_weights(self, absent: tuple[int, ...]) -> None:
        """Reset the weight of every surviving worker to 1 in the first round without ``absent``.

        Some weight is lost with a failed worker and its messages. As a step moves the mean of all
        models by ``lr`` times the sum of the gradients over the sum of the weights, later steps
        would have the wrong size. No message of an earlier round is in flight at the reset.
        """
        self._pull(self.steps, self.steps)
        self.w = 1.0
        self._absent = absent

    def _neighbours(self, absent: tuple[int, ...]) -> tuple[int, int]:
        """Return the sender and the receiver of this worker's messages in this step.

        All workers of a round leave out the same failed ones, so that no weight is sent to
        failed workers.
        """
        members = [rank for rank in range(self.n) if rank not in absent]
        distances = hops(len(members), self.graph) or [0]
        hop, place = distances[self.steps % len(distances)], members.index(self.index)
        return members[place - hop], members[(place + hop) % len(members)]

    def _expect(self, source: int) -> None:
        """Post the receives of this step, so that its message can arrive during computation."""
        if source in self.transport.failed or source == self.index:
            return
        push = self._spare.pop()
        if push.event is not None:
            await_event(self.transport, push.event)
        push.step = self.steps
        post = self.transport.irecv
        push.requests = [post(push.w, source, Tag.PUSH)]
        for bucket in self.layout.buckets:
            push.requests.append(post(bucket.of(push.values), source, Tag.PUSH))
        self.incoming.append(push)

    def _push(self, dest: int) -> None:
        if dest in self.transport.failed or dest == self.index:
            return  # nothing is sent, so all is kept
        self.outbox.send(self.x, dest, torch.tensor([P * self.w], dtype=torch.float64))
        self.w *= P

    def _pull(self, end: int, due: int = 0) -> None:
        """Add arrived messages of steps before ``end``, in order; wait for those before ``due``."""
        while self.incoming and self.incoming[0].step < end:
            requests, is_lost = self.incoming[0].requests, False
            try:
                if self.incoming[0].step < due:
                    self.transport.wait(*requests)
                elif not all(self.transport.test(request) for request in requests):
                    break
            except PeerFailedError:
                is_lost = True
            push = self.incoming.popleft()
            if not is_lost:
                self._add(push)
            self._spare.append(push)

    def _add(self, push: _Push) -> None:
        w = intact(push.w, push.requests[0].source).item()
        for bucket in self.layout.buckets:
            theirs = bucket.of(push.values)
            if is_void(theirs):
                copy(theirs, bucket.of(self.x))  # as if the sender had the same x: w is preserved
        values, push.event = self.wire.fetch(push.values)
        with self.transport.atomic():
            lerp(self.x, values, w / (self.w + w))
            self.w += w

    def weight(self, bucket: Bucket) -> float:
        """Return the push-sum weight w."""
        return self.w

    def weights_in(self, state: Mapping[str, Any], buckets: int) -> list[float]:
        """Return the push-sum weight; the new workers start with weight 1."""
        return [state["w"]] * buckets

    def common(self) -> dict[str, Any]:
        """Return the number of steps, on which the graph depends."""
        return {"steps": self.steps}

    def join(self, common: dict[str, Any]) -> None:
        """Set the number of steps to the other workers'."""
        self.steps = common["steps"]


register(
    SGP,
    worker=lambda worker, optimizer, wire, run: SgpWorker(
        worker, optimizer, wire, own(run, SgpOptions)
    ),
)


def _osgp_worker(
    worker: Worker, optimizer: Optimizer, wire: GradientCodec, run: GeneralOptions
) -> SgpWorker:
    options = own(run, OsgpOptions)
    return SgpWorker(
        worker,
        optimizer,
        wire,
        options,
        options.tau,
        add_first=options.order == "add-first",
        by_numerator=options.optimize == "numerator",
    )


register(
    OSGP,
    worker=_osgp_worker,
)
