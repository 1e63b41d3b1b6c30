"""ADSP, adaptive synchronous parallel (Hu, Wang, Wu; AAAI 2020): equal commits, no waiting.

A worker trains by itself and from time to time commits its accumulated update, U_i; the
server adds ``U_i / M`` to the model and sends it back. Workers of unequal speed commit
equally often and differ in the steps between commits, so they never wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, nan
from typing import Any, NamedTuple

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.losses import GlobalLoss
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import ADSP, AdspOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

Point = tuple[float, float]
"""Seconds since the search began, and the training loss at that time."""


class LossCurve(NamedTuple):
    """``l(t) = 1 / (slope t + offset) + floor``; slope is the paper's a^2."""

    slope: float
    offset: float
    floor: float


def fit(points: Sequence[Point]) -> LossCurve | None:
    """Return the curve through three points, in order of time; None if the loss does not fall.

    Measured losses need not lie on such a curve. If they do not fall at a decreasing rate, the
    floor is 0 and the line ``1/l = slope t + offset`` is fitted by least squares.
    """
    (t1, l1), (t2, l2), (t3, l3) = points
    if not l1 > l3 > 0:
        return None
    early = (l1 - l2) * (t3 - t2)
    late = (l2 - l3) * (t2 - t1)
    if early > late > 0:
        floor = l3 - late * (l1 - l3) / (early - late)
        slope = (1 / (l3 - floor) - 1 / (l1 - floor)) / (t3 - t1)
        return LossCurve(slope, 1 / (l1 - floor) - slope * t1, floor)
    mean_t = (t1 + t2 + t3) / 3
    mean_y = (1 / l1 + 1 / l2 + 1 / l3) / 3
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    slope = sum((t - mean_t) * (1 / loss - mean_y) for t, loss in points) / spread
    return LossCurve(slope, mean_y - slope * mean_t, 0.0) if slope > 0 else None


def reward(curve: LossCurve | None, end: float) -> float:
    """Return ``r = a^2 / (1 / (end - c) - b)``, the inverse of the time to reach the loss ``end``.

    The reward is 0 if the loss never reaches ``end``, infinite if it starts below.
    """
    if curve is None or curve.floor >= end:
        return 0.0
    rest = 1 / (end - curve.floor) - curve.offset
    return curve.slope / rest if rest > 0 else inf


class RateSearch(Stateful):
    """Search that tries the rates 1, 2, 3, ... in turn while the reward grows.

    ``rate`` is in commits per check period: the rate being tried, or the result.
    """

    SAVED = saved("rate", "active", best="_best")

    def __init__(self) -> None:
        self.rate = 1
        self.active = False
        self._best = -1.0

    def start(self) -> None:
        """Start at rate 1."""
        self.rate, self.active, self._best = 1, True, -1.0

    def tried(self, value: float, most: int) -> None:
        """Record the reward of ``rate``; then try the next rate or return to the previous one.

        ``most`` is the largest rate.
        """
        if value > self._best:
            self._best = value
            self.active = self.rate < most
            self.rate += int(self.active)
        else:
            self.active = False
            self.rate -= 1


PERIOD_STEPS = 10
"""Default length of a check period, in mean steps."""
PERIODS_PER_EPOCH = 1000 / 60
"""Default number of check periods between two searches, from the paper."""
INTERVALS_PER_PERIOD = 6
"""Default maximum of a worker's commits in a check period, from the paper."""


class Schedule(Stateful):
    """``C_target``: the commits that every worker should have made by the end of the check period.

    The schedule acts when a commit arrives. Until every worker has committed once, a worker
    commits every ``PERIOD_STEPS`` of its steps; then the first search begins.

    A search tries a rate for one check period, or two if nothing was committed in the second
    half of the first, and fits the loss at its start, past its middle and at its end.

    Args:
        workers: number of workers.
        options: times in seconds.
    """

    def __init__(self, workers: int, options: AdspOptions) -> None:
        self.options = options
        self.commits = [0] * workers
        self.loss = GlobalLoss(workers)
        self.search = RateSearch()
        self.period = self.minimum = self.epoch = nan
        self.target = 0
        self._step_seconds = [0.0] * workers
        self._excluded: set[int] = set()
        self._elapsed = 0.0
        self._ends = 0.0
        self._searched = 0.0
        self._end_loss = nan
        self._last_loss = nan
        self._points: list[Point] = []
        self._offset = 0.0

    # -- time ----------------------------------------------------------------
    def open(self, now: float) -> None:
        """Start a segment: time advances."""
        self._offset = self._elapsed - now

    def close(self, now: float) -> None:
        """End a segment: time stops."""
        self._elapsed = now + self._offset

    @property
    def started(self) -> bool:
        """Whether every worker has committed at least once."""
        return self.period > 0

    # -- commits -------------------------------------------------------------
    def commit(
        self, worker: int, now: float, loss: float, gradients: int, step_seconds: float
    ) -> None:
        """Count a worker's commit of ``gradients`` with their mean loss and mean step time."""
        time = now + self._offset
        self.commits[worker] += 1
        self.loss.report(worker, loss, gradients)
        self._step_seconds[worker] = step_seconds
        if not self.started:
            if all(n or w in self._excluded for w, n in enumerate(self.commits)):
                self._start(time)
            return
        is_late = time >= self._ends - self.period / 2
        if time >= self._ends:
            self._check(time)
        elif self.search.active and len(self._points) == 1 and is_late:
            self._points.append((time - self._searched, self.loss.value))

    def exclude(self, worker: int) -> None:
        """Exclude a worker that has failed."""
        self._excluded.add(worker)
        self.loss.exclude(worker)

    def interval(self, worker: int, now: float) -> float:
        """Return seconds until the worker's next commit: ``Gamma / dC_i``, dC_i = C_target - c_i.

        A worker receives the interval only when it commits. It is therefore the rest of the
        check period divided by the rest of dC_i; if no commits remain, the time until the
        worker's first commit in the next period.
        """
        if not self.started:
            return PERIOD_STEPS * self._step_seconds[worker]
        remaining = max(0.0, self._ends - (now + self._offset))
        missing = self.target - self.commits[worker]
        if missing > 0:
            return max(self.minimum, remaining / missing)
        return max(self.minimum, remaining + self.period / max(1, missing + self.search.rate))

    # -- check periods -------------------------------------------------------
    def _start(self, time: float) -> None:
        steps = [seconds for seconds in self._step_seconds if seconds > 0] or [1e-9]
        mean = len(steps) / sum(1 / seconds for seconds in steps)
        self.period = _chosen(self.options.period, PERIOD_STEPS * mean)
        self.minimum = _chosen(self.options.min_interval, self.period / INTERVALS_PER_PERIOD)
        self.epoch = _chosen(self.options.epoch, PERIODS_PER_EPOCH * self.period)
        self._begin_search(time)
        self._next_period(time)

    def _check(self, time: float) -> None:
        """End a check period."""
        loss, last = self.loss.value, self._last_loss
        has_risen = loss - last >= self.options.loss_rise * abs(last)
        if self.search.active:
            self._points.append((time - self._searched, loss))
            if len(self._points) == 3:
                self._judge()
        elif time - self._searched >= self.epoch or has_risen:
            self._begin_search(time)
        self._last_loss = loss
        self._next_period(time)

    def _next_period(self, time: float) -> None:
        self.target += self.search.rate
        self._ends = time + self.period

    # -- the search ------------------------------------------------------------
    def _begin_search(self, time: float) -> None:
        self.search.start()
        self.target = max(self.commits)
        self._searched = time
        loss = self.loss.value
        self._end_loss = _chosen(self.options.end_loss, loss / 2)
        self._points = [(0.0, loss)]

    def _judge(self) -> None:
        """Evaluate the rate that has just been tried."""
        value = reward(fit(self._points), self._end_loss)
        self.search.tried(value, most=max(1, int(self.period / self.minimum)))
        self._points = self._points[-1:]

    # -- checkpoints -----------------------------------------------------------
    SAVED = saved(
        "commits",
        "period",
        "minimum",
        "epoch",
        "target",
        "_step_seconds",
        "_elapsed",
        "_ends",
        "_searched",
        "_end_loss",
        "_last_loss",
        "_points",
        loss="loss.newest",
        search="search",
    )

    def facts(self) -> dict[str, Any]:
        """Return the search result for the summary."""
        return {"rate": self.search.rate, "period": self.period, "commits": self.commits}


def _chosen(option: float | str, automatic: float) -> float:
    return automatic if isinstance(option, str) else option


class AdspWorker(TrainingWorker):
    """Local SGD that commits when the scheduled interval has passed.

    The worker continues while the answer is in flight, then applies its update since the
    commit to the received model. The interval between commits is thus the scheduler's, and
    the paper's ``O_i``, the time spent on a commit, need not be subtracted.
    """

    SAVED = TrainingWorker.SAVED | saved(outbox="link", notes="local.inbox.notes")

    def __init__(self, worker: Worker, optimizer: Optimizer, wire: GradientCodec) -> None:
        super().__init__(worker, optimizer)
        self.local = LocalDifference(worker, optimizer, wire, wire)
        self.link = self.local.link
        self.interval = 0.0

    def run(self) -> None:
        """Step, apply received models, and commit ``U_i`` when due."""
        local = self.local
        local.open()
        committed, awaited = self.transport.now(), 0
        for _ in self.worker.batches():
            local.step()
            awaited -= local.inbox.blend_into(self.x)
            if awaited == 0 and self._is_time(committed):
                self._commit()
                committed, awaited = self.transport.now(), len(self.layout.buckets)
        if local.steps:
            self._commit()
        local.close()

    def _is_time(self, committed: float) -> bool:
        """Return whether the next commit is due closer to the end of this step than of the next."""
        if self.local.inbox.notes:
            (self.interval,) = self.local.inbox.notes
        passed = self.transport.now() - committed
        return passed + self.local.step_seconds / 2 >= self.interval

    def _commit(self) -> None:
        """Push ``U_i`` with its loss and mean step time."""
        self.local.push(self.local.loss, self.local.step_seconds)


class AdspServer(ServerAlgorithm):
    """``W <- W + U_i / M``, answered with W; the first server is also the scheduler."""

    SAVED = ServerAlgorithm.SAVED | saved("schedule")

    def __init__(self, server: ParameterServer, options: AdspOptions) -> None:
        super().__init__(server)
        first = server.transport.rank == 0
        self.schedule = Schedule(self.n, options) if first else None

    def run(self) -> None:
        """Add every commit, and answer with the model and the time until the next commit."""
        now = self.server.transport.now
        if self.schedule is not None:
            self.schedule.open(now())
        for arrival in self.arrivals(self._ended):
            self._count_commit(arrival)
            x = self.server.values[arrival.bucket.index]
            arrival.add_to(x, 1 / self.server.divisor)
            notes = self._next_commit(arrival.worker)
            self.server.send_model(arrival.worker, arrival.bucket, notes=notes)
        if self.schedule is not None:
            self.schedule.close(now())

    def _count_commit(self, arrival: ReceivedBucket) -> None:
        """Count a commit when its first bucket arrives, if this server is the scheduler."""
        if self.schedule is not None and arrival.bucket is self.server.buckets[0]:
            loss, step_seconds = arrival.notes
            now = self.server.transport.now()
            self.schedule.commit(arrival.worker, now, loss, arrival.count, step_seconds)

    def _next_commit(self, worker: int) -> tuple[float, ...]:
        """Return the scheduler's notes: seconds until the worker's next commit."""
        if self.schedule is None:
            return ()
        return (self.schedule.interval(worker, self.server.transport.now()),)

    def _ended(self, worker: int) -> None:
        """Exclude a worker that has failed from the schedule."""
        if self.schedule is not None and self.server.has_failed(worker):
            self.schedule.exclude(worker)

    def facts(self) -> dict[str, Any]:
        """Return the search result for the summary."""
        return {} if self.schedule is None else {"adsp": self.schedule.facts()}


register(
    ADSP,
    worker=lambda worker, optimizer, wire, run: AdspWorker(worker, optimizer, wire),
    server=lambda server, optimizer, run: AdspServer(server, own(run, AdspOptions)),
)
