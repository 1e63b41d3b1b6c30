"""ADSP's scheduler: when a worker commits, so that all commit equally often."""

from __future__ import annotations

from math import nan
from typing import Any

from aladdin_mpi.algorithms.adsp_search import Point, RateSearch, fit, reward
from aladdin_mpi.algorithms.global_loss import GlobalLoss
from aladdin_mpi.config.algorithm_options import AdspOptions

PERIOD_STEPS = 10
"""Length of a check period in mean steps, where it is not given."""
PERIODS_PER_EPOCH = 1000 / 60
"""Check periods between two searches, where that is not given; as in the paper."""
INTERVALS_PER_PERIOD = 6
"""Most commits of a worker in a check period, where that is not given; as in the paper."""


class Schedule:
    """``C_target``, the commits that everyone should have made when the check period ends.

    It acts when a commit arrives. Until all workers have been heard it lets each commit every
    ``PERIOD_STEPS`` steps of its own; then the first search begins.

    A search tries a rate for one check period, or two where nothing was committed in the
    second half of the first, and fits the loss at its start, past its middle and at its end.

    Args:
        workers: their number.
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
        self._left_out: set[int] = set()
        self._elapsed = 0.0
        self._ends = 0.0
        self._searched = 0.0
        self._end_loss = nan
        self._last_loss = nan
        self._points: list[Point] = []
        self._offset = 0.0

    # -- time ----------------------------------------------------------------
    def open(self, now: float) -> None:
        """A segment begins: time goes on."""
        self._offset = self._elapsed - now

    def close(self, now: float) -> None:
        """A segment has ended: time stands still."""
        self._elapsed = now + self._offset

    @property
    def started(self) -> bool:
        """Whether all workers have been heard."""
        return self.period > 0

    # -- commits -------------------------------------------------------------
    def commit(
        self, worker: int, now: float, loss: float, gradients: int, step_seconds: float
    ) -> None:
        """A worker has committed so many gradients with that mean loss and time of a step."""
        time = now + self._offset
        self.commits[worker] += 1
        self.loss.report(worker, loss, gradients)
        self._step_seconds[worker] = step_seconds
        if not self.started:
            if all(n or w in self._left_out for w, n in enumerate(self.commits)):
                self._start(time)
            return
        if self.search.active and len(self._points) == 1 and self._is_late(time):
            self._points.append((time - self._searched, self.loss.value))
        if time >= self._ends:
            self._check(time)

    def exclude(self, worker: int) -> None:
        """A worker has failed."""
        self._left_out.add(worker)
        self.loss.exclude(worker)

    def interval(self, worker: int, now: float) -> float:
        """Seconds until the worker's next commit: ``Gamma / dC_i``, dC_i = C_target - c_i.

        A worker hears it only when it commits. So it is what is left of the check period,
        divided by what is left of dC_i; or, where that is nothing, the time until its
        turn comes in the next period.
        """
        if not self.started:
            return PERIOD_STEPS * self._step_seconds[worker]
        left = max(0.0, self._ends - (now + self._offset))
        missing = self.target - self.commits[worker]
        if missing > 0:
            return max(self.minimum, left / missing)
        return max(self.minimum, left + self.period / max(1, missing + self.search.rate))

    # -- check periods -------------------------------------------------------
    def _start(self, time: float) -> None:
        steps = [seconds for seconds in self._step_seconds if seconds > 0] or [1e-9]
        mean = len(steps) / sum(1 / seconds for seconds in steps)
        self.period = _chosen(self.options.period, PERIOD_STEPS * mean)
        self.minimum = _chosen(self.options.min_interval, self.period / INTERVALS_PER_PERIOD)
        self.epoch = _chosen(self.options.epoch, PERIODS_PER_EPOCH * self.period)
        self._begin_search(time)
        self._next_period(time)

    def _is_late(self, time: float) -> bool:
        return time >= self._ends - self.period / 2

    def _check(self, time: float) -> None:
        """A check period is over."""
        loss = self.loss.value
        if self.search.active:
            self._points.append((time - self._searched, loss))
            if len(self._points) == 3:
                self._judge()
        elif time - self._searched >= self.epoch or self._has_risen(loss):
            self._begin_search(time)
        self._last_loss = loss
        self._next_period(time)

    def _next_period(self, time: float) -> None:
        self.target += self.search.rate
        self._ends = time + self.period

    def _has_risen(self, loss: float) -> bool:
        last = self._last_loss
        return loss - last >= self.options.loss_rise * abs(last)

    # -- the search ------------------------------------------------------------
    def _begin_search(self, time: float) -> None:
        self.search.start()
        self.target = max(self.commits)
        self._searched = time
        loss = self.loss.value
        self._end_loss = _chosen(self.options.end_loss, loss / 2)
        self._points = [(0.0, loss)]

    def _judge(self) -> None:
        """The rate has been tried."""
        value = reward(fit(self._points), self._end_loss)
        self.search.tried(value, most=max(1, int(self.period / self.minimum)))
        self._points = self._points[-1:]

    # -- checkpoints -----------------------------------------------------------
    _NUMBERS = (
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
    )

    def facts(self) -> dict[str, Any]:
        """What was found, for the summary."""
        return {"rate": self.search.rate, "period": self.period, "commits": self.commits}

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on."""
        numbers = {name: getattr(self, name) for name in self._NUMBERS}
        return {**numbers, "loss": self.loss.state_dict(), "search": self.search.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        for name in self._NUMBERS:
            setattr(self, name, state[name])
        self.loss.load_state_dict(state["loss"])
        self.search.load_state_dict(state["search"])


def _chosen(option: float | str, automatic: float) -> float:
    return automatic if isinstance(option, str) else option
