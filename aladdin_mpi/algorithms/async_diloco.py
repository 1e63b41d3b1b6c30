"""Asynchronous DiLoCo: Delayed Nesterov and dynamic local updates (Liu et al., arXiv 2401.09135).

A worker takes H_w steps of its own inner optimizer from the model Theta that it has received,
pushes its progress ``Delta = x - Theta``, and continues from the server's answer. No worker waits
for another. With N differences between two uses of the momentum, eps the outer rate, beta the
outer momentum and t the number of differences so far, the server computes for each Delta::

    D <- D + Delta
    every N-th:   m     <- beta m + D / N ;  D <- 0
                  Theta <- Theta + eps (Delta / N + (1 - c N + c) beta m)
    otherwise:    Theta <- Theta + eps (Delta / N + c beta m)

With c = 0, N differences move the model by one Nesterov step of DiLoCo along their mean. A larger
c spreads the same momentum over the N steps: its factors add up to 1. The option is c N, from 0 to
1, as N may change when workers fail.

Messages carry buckets, and every bucket has its own D, m and count. Buckets of several workers may
arrive in different orders, so two buckets may apply the same differences in different orders and
use their momentum after different ones. Each bucket alone follows the rule exactly.

When a segment ends (at a checkpoint, and at the end of the run), a worker pushes the progress of
its last steps, fewer than H_w. As in :mod:`aladdin_mpi.algorithms.diloco`, it is applied without
the outer optimizer, ``Theta <- Theta + Delta / n``, and is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.flat.vectors import add, clear, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import ASYNC_DILOCO, AsyncDilocoOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

ROUNDING = 1e-9
"""Relative error of measured step times: half of 30 steps are 15, not 14."""


# -- the outer optimizer -----------------------------------------------------------------
class DelayedNesterov(MomentumSGD):
    """The outer optimizer of one server, with a buffer and a count for each bucket.

    ``velocity`` is m and ``pending`` is D / N, both None without momentum.

    Args:
        like: a vector of the whole model's length.
        rate: eps.
        momentum: beta.
        spread: c N, the share of the momentum that is spread evenly over the N steps.
    """

    def __init__(self, like: Tensor, rate: float, momentum: float, spread: float) -> None:
        super().__init__(like, momentum, weight_decay=0.0, nesterov=True)
        self.outer_rate = rate
        self.spread = spread
        self.pending = torch.zeros_like(like) if momentum else None
        self.counts: dict[int, int] = {}
        """Number of differences in ``pending``, for each bucket by its start."""

    def apply(self, bucket: Bucket, x: Tensor, delta: Tensor, share: float, buffer: int) -> None:
        """Step a bucket ``x`` of the model along a worker's progress ``delta``.

        Args:
            bucket: the bucket.
            x: its values.
            delta: the progress in it.
            share: weight of ``delta``, which is 1 / N in the rule.
            buffer: N.
        """
        add(x, delta, alpha=self.outer_rate * share)
        if self.velocity is None or self.pending is None:
            return
        m, pending = bucket.of(self.velocity), bucket.of(self.pending)
        add(pending, delta, alpha=share)
        count = self.counts.get(bucket.start, 0) + 1
        c = self.spread / buffer
        if count >= buffer:
            scale(m, self.momentum)
            add(m, pending)
            clear(pending)
            c, count = 1 - c * (count - 1), 0
        self.counts[bucket.start] = count
        if c:
            add(x, m, alpha=self.outer_rate * c * self.momentum)

    # -- checkpoints, replicas and other numbers of servers ----------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return m, the buffers and their counts."""
        return {**super().state_dict(), "pending": self.pending, "counts": dict(self.counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        self.counts = dict(state["counts"])
        if self.pending is not None and state["pending"] is not None:
            self.pending.copy_(state["pending"])

    def inherit(self, state: dict[str, Any], parts: Sequence[slice] = ()) -> None:
        """Restore a state of the whole model, cut into other buckets: all get the largest count."""
        self.load_state_dict(state)
        count = max(state["counts"].values(), default=0)
        self.counts = {part.start: count for part in parts}

    def joined(
        self, states: Sequence[dict[str, Any] | None], parts: Sequence[Sequence[slice]]
    ) -> dict[str, Any] | None:
        """Return the joint state, which is zero for lost servers."""
        buffers = [None if each is None else {"velocity": each["pending"]} for each in states]
        m, pending = super().joined(states, parts), super().joined(buffers, parts)
        if m is None or pending is None:
            return None
        counts = {start: n for each in states if each for start, n in each["counts"].items()}
        return {"velocity": m["velocity"], "pending": pending["velocity"], "counts": counts}

    def state_of(self, part: slice) -> dict[str, Any]:
        """Return a copy of a part's state."""
        pending = None if self.pending is None else self.pending[part].clone()
        counts = {part.start: self.counts.get(part.start, 0)}
        return {**super().state_of(part), "pending": pending, "counts": counts}

    def put_part(
        self, whole: dict[str, Any] | None, state: dict[str, Any], part: slice, like: Tensor
    ) -> dict[str, Any] | None:
        """Write a part's state into ``whole``."""
        whole = super().put_part(whole, state, part, like)
        if whole is not None and state["pending"] is not None:
            whole.setdefault("pending", torch.zeros_like(like))[part] = state["pending"]
            whole.setdefault("counts", {}).update(state["counts"])
        return whole


# -- local steps and weights ---------------------------------------------------------------
WINDOWS = 5
"""Number of a worker's last rounds whose median is its speed."""
SHORTEST = 1e-9
"""Lower limit of a step's time, in seconds: a shorter one cannot be measured."""


class LocalSteps(Stateful):
    """Dynamic local updates: ``H_w = max(1, floor(H v_w / v_max))``, with v in steps per second.

    A worker reports the mean time of its steps with each difference. Its speed is the median over
    its last rounds, so that one mistaken measurement changes no worker's steps: a round that seems
    too fast would otherwise shorten the rounds of all other workers. A worker takes H steps until
    it has been measured.

    Args:
        workers: number of workers.
        steps: H.
        is_dynamic: otherwise every worker takes H steps.
    """

    SAVED = saved("seconds", "weights")

    def __init__(self, workers: int, steps: int, is_dynamic: bool) -> None:
        self._steps = steps
        self._is_dynamic = is_dynamic
        self.seconds: list[list[float]] = [[] for _ in range(workers)]
        """Mean seconds of a step in each worker's last rounds."""
        self.weights = [0.0] * workers
        """Weight of each worker's last difference, see :class:`AsyncDilocoWorker`."""

    def record(self, worker: int, seconds: float, weight: float | None) -> None:
        """Record the step time in seconds, and the weight of a whole round's difference."""
        self.seconds[worker] = [*self.seconds[worker], max(seconds, SHORTEST)][-WINDOWS:]
        if weight is not None:
            self.weights[worker] = weight

    def exclude(self, worker: int) -> None:
        """Discard the reports of a worker that has failed."""
        self.seconds[worker], self.weights[worker] = [], 0.0

    def steps(self, worker: int) -> int:
        """Return H_w."""
        if not self._is_dynamic or not self.seconds[worker]:
            return self._steps
        fastest = min(median_high(each) for each in self.seconds if each)
        steps = self._steps * (fastest / median_high(self.seconds[worker]))
        return max(1, int(steps * (1 + ROUNDING)))

    @property
    def mean_weight(self) -> float:
        """Mean weight of the workers' last differences; 0 without any."""
        known = [weight for weight in self.weights if weight]
        return sum(known) / max(1, len(known))


class GracePeriod:
    """Answers for each bucket, held until ``seconds`` after the first of them.

    They are sent earlier if every running worker waits for one, or if a worker ends.

    Args:
        workers: number of workers.
        seconds: limit; 0: nothing is held.
        now: returns the time in seconds.
        answer: sends a worker its answer for a bucket.
    """

    def __init__(
        self,
        workers: int,
        seconds: float,
        now: Callable[[], float],
        answer: Callable[[int, Bucket], None],
    ) -> None:
        self._workers = workers
        self._seconds = seconds
        self._now = now
        self._answer = answer
        self.open()

    def open(self) -> None:
        """Start a segment."""
        self._running = set(range(self._workers))
        self._held: dict[int, tuple[float, Bucket, list[int]]] = {}
        """Deadline, bucket and waiting workers by bucket, in order of deadlines."""

    def hold(self, worker: int, bucket: Bucket) -> None:
        """Answer a worker at the end of the bucket's grace period, which may start now."""
        end = self._now() + self._seconds
        _, _, waiting = self._held.setdefault(bucket.index, (end, bucket, []))
        waiting.append(worker)
        if not self._seconds or len(waiting) >= len(self._running):
            self._release(bucket.index)

    def due(self) -> float | None:
        """Send the answers that are due; return the seconds until the next; None: none is held."""
        for index, (end, _, _) in list(self._held.items()):
            rest = end - self._now()
            if rest > 0:
                return rest
            self._release(index)
        return None

    def ended(self, worker: int) -> None:
        """Stop waiting for a worker that has ended or failed, and send all answers."""
        self._running.discard(worker)
        for index in list(self._held):
            self._release(index)

    def _release(self, index: int) -> None:
        _, bucket, waiting = self._held.pop(index)
        for worker in waiting:
            self._answer(worker, bucket)


# -- the ranks ---------------------------------------------------------------------------
class AsyncDilocoWorker(TrainingWorker):
    """H_w local steps, a push of the progress, and a pull of the model.

    A difference has a weight: 1, its samples, or its samples times the samples per step (Decoupled
    DiLoCo, arXiv 2604.21428), each relative to the mean of all workers' last ones. The first server
    sends H_w and that mean with its answers; the worker sends its factor to all servers.
    """

    SAVED = TrainingWorker.SAVED | saved(outbox="link", notes="local.inbox.notes")

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: AsyncDilocoOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.options = options
        self.local = LocalDifference(worker, optimizer, wire, wire)
        self.link = self.local.link
        self.samples = 0
        """Samples of the steps since the last push."""

    @property
    def steps(self) -> int:
        """H_w, as the first server has sent it; H before its first answer."""
        notes = self.local.inbox.notes
        return int(notes[0]) if notes else self.options.steps

    def run(self) -> None:
        """Step; push and pull every H_w steps, and push at the end of the segment."""
        self.local.open()
        for lease in self.worker.batches():
            self.local.step()
            self.samples += lease.size
            if self.local.steps >= self.steps:
                self._push(is_round=True)
                self.link.pull()
        if self.local.steps:
            self._push(is_round=False)
        self.local.close()

    def _push(self, is_round: bool) -> None:
        """Push the progress; ``is_round``: of H_w steps, to be applied by the outer optimizer."""
        weight, notes = self._weight(), self.local.inbox.notes
        mean = notes[1] if notes else 0.0
        self.local.push(is_round, self.local.step_seconds, weight, weight / mean if mean else 1.0)
        self.samples = 0

    def _weight(self) -> float:
        samples, kind = float(self.samples), self.options.weights
        if kind == "equal":
            return 1.0
        return samples if kind == "samples" else samples * samples / self.local.steps


class AsyncDilocoServer(ServerAlgorithm):
    """Delayed Nesterov on every difference; the first server also sets the local steps."""

    SAVED = ServerAlgorithm.SAVED | saved("plan")

    def __init__(self, server: ParameterServer, options: AsyncDilocoOptions) -> None:
        values = next(iter(server.values.values()), torch.empty(0))
        self.outer = DelayedNesterov(
            values.new_zeros(server.layout.numel),
            options.outer_lr,
            options.outer_momentum,
            options.spread,
        )
        super().__init__(server, self.outer)
        self.options = options
        is_first = server.transport.rank == 0
        self.plan = LocalSteps(self.n, options.steps, options.dynamic) if is_first else None
        self.grace = GracePeriod(self.n, options.grace, server.transport.now, self.answer)
        server.due = self.grace.due

    def run(self) -> None:
        """Apply every difference, and answer at the end of the grace period."""
        self.grace.open()
        for arrival in self.arrivals(self._ended):
            self._apply(arrival)
            self._record(arrival)
            self.grace.hold(arrival.worker, arrival.bucket)

    @property
    def buffer(self) -> int:
        """N; by default the number of surviving workers."""
        chosen = self.options.buffer
        return self.server.surviving_workers if isinstance(chosen, str) else chosen

    def _apply(self, arrival: ReceivedBucket) -> None:
        """Step along a difference, or add it if its worker's segment ended before H_w steps."""
        is_round, _, _, factor = arrival.notes
        bucket, x = arrival.bucket, self.server.values[arrival.bucket.index]
        if is_round:
            # Corrects the workers' learning rate to that of the survivors.
            rate = self.server.surviving_workers / self.server.divisor
            share, buffer = rate * factor / self.buffer, self.buffer
            self.outer.apply(bucket, x, arrival.values, share, buffer)
        else:
            arrival.add_to(x, 1 / self.server.divisor)

    def _record(self, arrival: ReceivedBucket) -> None:
        """Record a difference when its first bucket arrives, if this is the first server."""
        if self.plan is not None and arrival.bucket is self.server.buckets[0]:
            is_round, seconds, weight, _ = arrival.notes
            self.plan.record(arrival.worker, seconds, weight if is_round else None)

    def answer(self, worker: int, bucket: Bucket) -> None:
        """Send the model, with the worker's local steps and the mean weight of differences."""
        plan = self.plan
        notes = () if plan is None else (float(plan.steps(worker)), plan.mean_weight)
        self.server.send_model(worker, bucket, notes=notes)

    def _ended(self, worker: int) -> None:
        """Stop waiting for a worker that has ended, and exclude one that has failed."""
        self.grace.ended(worker)
        if self.plan is not None and self.server.has_failed(worker):
            self.plan.exclude(worker)

    def facts(self) -> dict[str, Any]:
        """Return the local steps of each worker, for the summary."""
        plan = self.plan
        if plan is None:
            return {}
        return {"async_diloco": {"steps": [plan.steps(worker) for worker in range(self.n)]}}


register(
    ASYNC_DILOCO,
    worker=lambda worker, optimizer, wire, run: AsyncDilocoWorker(
        worker, optimizer, wire, own(run, AsyncDilocoOptions)
    ),
    server=lambda server, optimizer, run: AsyncDilocoServer(server, own(run, AsyncDilocoOptions)),
)
