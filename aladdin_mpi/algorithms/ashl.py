"""ASHL, an adaptive scheme with stages for unequal workers (IEEE Transactions on Computers 2024).

Every worker measures its times first. From these, the plan sets for each worker the number of
local steps between two exchanges and the share of values that it pushes, so that all take about
the same time (Algorithms 1 and 2: :func:`local_steps`, :func:`rates`). Training (Algorithm 3)
is coarse and fully asynchronous (AHL) until the training loss of all workers is low
enough, then fine and semi-asynchronous (SHL) until the end.

Measuring does not block: until the plan exists, a worker that has finished measuring takes
as many steps as the slowest one will take. The first server makes the plan, follows the loss,
and sends a worker its stage and its part of the plan with every model. A worker sends the
stage and share of each difference to all servers, so that all servers treat it in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import IntEnum
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.codec.dgc import DeepGradientCompression, select
from aladdin_mpi.codec.quantised import QuantisedCodec
from aladdin_mpi.control.losses import GlobalLoss
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm, StalenessBound
from aladdin_mpi.exchange.server_link import LocalDifference
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import MergedState, Stateful, saved
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import ASHL, AshlOptions, own
from aladdin_mpi.transport.base import Event
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

SHORTEST = 1e-9
"""Lower limit of a step's time, in seconds: a shorter one cannot be measured."""


class Times(NamedTuple):
    """A worker's measured times: a local step, a push of all values, a pull, selecting values."""

    step: float
    push: float
    pull: float
    compress: float


class Stage(NamedTuple):
    """A worker's part in a stage: its share D_i, its local steps H_i, its rate R_i."""

    share: float
    steps: int
    rate: float


class PlannedShare(NamedTuple):
    """A worker's part of the plan in both stages."""

    coarse: Stage
    fine: Stage


def local_steps(times: Sequence[Times], preset: int, rate: float = 1.0) -> list[int]:
    """Return ``H_i`` of Algorithm 1: all take as long as the slowest does for ``preset`` steps.

    ``T_upd,i = T_iter,i H_preset + T_comm,i``, ``T_max = max T_upd,i``,
    ``H_i = round((T_max - T_comm,i) / T_iter,i)``, which is never below H_preset.

    Args:
        times: times of every worker.
        preset: H_preset.
        rate: share of the values that is pushed, r_preset; below 1 they have to be selected.
    """
    talk = [
        rate * worker.push + worker.pull + (worker.compress if rate < 1 else 0.0)
        for worker in times
    ]
    step = [max(worker.step, SHORTEST) for worker in times]
    longest = max(s * preset + t for s, t in zip(step, talk, strict=True))
    return [round((longest - t) / s) for s, t in zip(step, talk, strict=True)]


def shares(steps: Sequence[int]) -> list[float]:
    """Return ``D_i = H_i / sum H``, the share of all data that a worker computes on."""
    total = sum(steps)
    return [own / total for own in steps]


def rates(times: Sequence[Times], steps: Sequence[int], preset: float) -> list[float]:
    """Return ``R_i`` of Algorithm 2: workers with spare time push more than ``preset``.

    ``T_upd,i = T_iter,i H_i + T_compress,i + r_preset T_push,i + T_pull,i``,
    ``T_max = max T_upd,i``,
    ``R_i = min(1, (T_max - (T_iter,i H_i + T_compress,i + T_pull,i)) / T_push,i)``.

    With a preset of 1 all rates are 1. The rate is also 1 if a push takes no time.
    """
    if preset == 1:
        return [1.0] * len(times)
    rest = [
        worker.step * own + worker.compress + worker.pull
        for worker, own in zip(times, steps, strict=True)
    ]
    longest = max(r + preset * worker.push for worker, r in zip(times, rest, strict=True))
    return [
        max(preset, min(1.0, (longest - r) / worker.push)) if worker.push > 0 else 1.0
        for worker, r in zip(times, rest, strict=True)
    ]


def _stage(times: Sequence[Times], preset: int, rate: float) -> list[Stage]:
    steps = local_steps(times, preset, rate)
    rows = zip(shares(steps), steps, rates(times, steps, rate), strict=True)
    return [Stage(*row) for row in rows]


def make_plan(
    times: Sequence[Times],
    coarse_steps: int,
    fine_steps: int,
    coarse_rate: float,
    fine_rate: float,
) -> list[PlannedShare]:
    """Return every worker's part, from the presets of both stages."""
    coarse = _stage(times, coarse_steps, coarse_rate)
    fine = _stage(times, fine_steps, fine_rate)
    return [PlannedShare(*parts) for parts in zip(coarse, fine, strict=True)]


SAMPLE = 0.01
"""Share of the values sampled to estimate the selection threshold."""


class TopK(DeepGradientCompression):
    """``TopK(x - base, rate)``: selects the largest values of every bucket at the current rate.

    With a quantised wire, all values are sent quantised if that message is not longer than the
    selected ones, which are sent in fp32 with their positions. If the length of such a message
    would mark it as quantised, entries that add nothing are appended.
    """

    def __init__(self, wire: GradientCodec, layout: Layout) -> None:
        everything = [(1, layout.numel)]
        super().__init__(wire.plain, layout, everything, lambda samples: self.rate, sample=SAMPLE)
        self.rate = 1.0
        self.quantises = wire if isinstance(wire, QuantisedCodec) else None

    def discard(self) -> None:
        """Discard the values that were not selected."""
        if self.left is not None:
            self.left.zero_()

    # -- sizes and memory ------------------------------------------------------
    def longest(self, bucket: Bucket, samples: int) -> int:
        """Return the length of the longest message, in values of the wire's dtype."""
        return self._unambiguous_length(bucket, super().longest(bucket, samples))

    def _unambiguous_length(self, bucket: Bucket, length: int) -> int:
        while self.quantises is not None and self.quantises.reads(bucket, length):
            length += 2
        return length

    def _is_quantised(self, bucket: Bucket, message: Tensor) -> bool:
        return self.quantises is not None and self.quantises.reads(bucket, message.numel())

    def buffer_for(self, vector: Tensor) -> Tensor:
        """Return a buffer for the messages of ``vector``."""
        return (self.quantises or self.plain).buffer_for(vector)

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """Return the values in a message, for the check that they are finite."""
        if self.quantises is not None and self._is_quantised(bucket, message):
            return self.quantises.numbers(bucket, message)
        return super().numbers(bucket, message)

    def extra_bytes(self, bucket: Bucket, nbytes: int) -> int:
        """Return the bytes moved in memory besides the message itself."""
        quantises = self.quantises
        if quantises is not None and quantises.reads(bucket, nbytes // self.dtype.itemsize):
            return quantises.extra_bytes(bucket, nbytes)
        return super().extra_bytes(bucket, nbytes)

    # -- sending and receiving -------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, out: Tensor
    ) -> tuple[Tensor, Event | None]:
        """Write a bucket's values as a quantised or a sparse message, whichever is shorter."""
        quantises = self.quantises
        if quantises is None or quantises.length(bucket) > self.longest(bucket, samples):
            return super().compress(bucket, values, samples, out)
        if self.left is None:
            return quantises.compress(bucket, values, samples, out)
        left = self.left[bucket.part].add_(values)
        sent = quantises.compress(bucket, left, samples, out)
        left.zero_()
        return sent

    def _take_largest(self, bucket: Bucket, left: Tensor, samples: int) -> Tensor:
        message = super()._take_largest(bucket, left, samples)
        length = self._unambiguous_length(bucket, message.numel())
        if length > message.numel():
            positions, values = message.chunk(2)
            padding = message.new_zeros((length - message.numel()) // 2)
            message = torch.cat((positions, padding, values, padding))
        return message

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times the values of a message to ``target``."""
        if self.quantises is not None and self._is_quantised(bucket, message):
            self.quantises.add(bucket, message, target, alpha)
        else:
            super().add(bucket, message, target, alpha)

    # -- checkpoints -----------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of selection and of quantisation."""
        quantises = self.quantises.state_dict() if self.quantises is not None else None
        return {**super().state_dict(), "few_bits": quantises}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        if self.quantises is not None:
            self.quantises.load_state_dict(state["few_bits"])


_log = logging.getLogger(__name__)


class Phase(IntEnum):
    """The stage of the training."""

    COARSE = 0
    FINE = 1


class _Profile:
    """Times measured by a worker in its first iterations, each with an exchange."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.measured: list[list[float]] = [[], [], []]
        """Times of steps, pushes and pulls, in seconds."""

    @property
    def done(self) -> bool:
        steps, _, _ = self.measured
        return len(steps) >= self.iterations

    def exchanged(self, push: float, whole: float) -> None:
        """Record the time of a push and of the whole exchange.

        Push and pull transfer the same amount. The transport may buffer a message long before
        it has arrived, so a push takes at least half the time of both.
        """
        _, pushes, pulls = self.measured
        if len(pushes) < self.iterations:
            push = max(push, whole / 2)
            pushes.append(push)
            pulls.append(whole - push)

    def times(self, compress: float) -> Times:
        """Return the medians: the first iteration is often much longer."""
        step, push, pull = (median(times or [0.0]) for times in self.measured)
        return Times(step, push, pull, compress)


class AshlWorker(TrainingWorker):
    """Algorithm 3, worker: H_i local steps, push ``TopK(x - base, R_i)``, pull."""

    SAVED = TrainingWorker.SAVED | saved(
        profile="profile.measured", outbox="link", plan="planned", phase="phase"
    )

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: AshlOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.top_k = TopK(wire, worker.layout)
        self.local = LocalDifference(worker, optimizer, wire, self.top_k)
        self.link = self.local.link
        self.options = options
        self.profile = _Profile(options.profile)
        self.planned: list[float] | None = None
        """This worker's part of the plan, as the first server sends it."""
        self.phase = int(Phase.COARSE)

    def run(self) -> None:
        """Step; push and pull every H_i steps, and push at the end."""
        self.local.open()
        for _ in self.worker.batches():
            self.local.step()
            if self.local.steps >= self.stage.steps:
                self._exchange()
        if self.local.steps:
            self._push()
        self.local.close()

    @property
    def plan(self) -> PlannedShare | None:
        """This worker's part of the plan, once it has been received."""
        return _unpack(self.planned) if self.planned else None

    @property
    def stage(self) -> Stage:
        """This worker's current parameters; before the plan all workers have an equal share."""
        plan = self.plan
        if plan is not None:
            return plan.fine if self.phase == Phase.FINE else plan.coarse
        steps = self.options.coarse_steps if self.profile.done else 1
        return Stage(1 / self.worker.divisor, steps, 1.0)

    def _exchange(self) -> None:
        """Push and pull, record the times, and apply the server's notes."""
        now, link = self.transport.now, self.link
        start = now()
        self._push()
        link.outbox.drain()
        pushed = now()
        link.pull()
        self.profile.exchanged(pushed - start, now() - start)
        self._apply_notes(link.inbox.notes)

    def _push(self) -> None:
        """Push the difference since the last exchange."""
        notes = [self.stage.share, self.phase, self.local.loss, *self._measure()]
        self.top_k.rate = self.stage.rate
        self.local.push(*notes)
        if not self.options.error_feedback:
            self.top_k.discard()

    def _measure(self) -> list[float]:
        """Record the step time; return all times with the profile's last message, else nothing."""
        if self.profile.done:
            return []
        self.profile.measured[0].append(self.local.step_seconds)
        return list(self.profile.times(self._selection_seconds())) if self.profile.done else []

    def _selection_seconds(self) -> float:
        """Return the time to select the largest values, in seconds."""
        start = self.worker.transport.now()
        if self.options.fine_rate < 1 and not self.x.is_meta:
            moved = self.x - self.local.base
            for bucket in self.worker.layout.buckets:
                wanted = max(1, int(self.options.fine_rate * bucket.numel))
                select(moved[bucket.part], wanted, SAMPLE)
        return self.worker.transport.now() - start

    def _apply_notes(self, notes: tuple[float, ...]) -> None:
        phase, *plan = notes
        self.phase = int(phase)
        self.planned = plan or self.planned


class AshlServer(ServerAlgorithm):
    """Algorithm 3, server: ``W <- W + D_i dW_i``; in SHL it delays workers too far ahead."""

    SAVED = ServerAlgorithm.SAVED | saved("head")

    def __init__(self, server: ParameterServer, options: AshlOptions) -> None:
        super().__init__(server)
        assert isinstance(server.arriving, TopK)
        self.codec = server.arriving
        self.bound = StalenessBound(self.n, server.buckets, options.bound, self.reply)
        self.head = TrainingPlanner(server, options) if server.transport.rank == 0 else None

    def run(self) -> None:
        """Add; answer at once (AHL), or once ``step_i - min(step) <= s`` (SHL)."""
        self.bound.open()  # all start a segment with the same model
        for arrival in self.arrivals(self._ended):
            _, phase, *_ = arrival.notes
            self._add(arrival)
            if phase == Phase.COARSE:
                self.reply(arrival.worker, arrival.bucket)
            else:
                self.bound.advance(arrival.worker, arrival.bucket)
                self.bound.hold(arrival.worker, arrival.bucket)

    def _add(self, arrival: ReceivedBucket) -> None:
        """Apply ``W <- W + D_i dW_i``."""
        share, _, loss, *times = arrival.notes
        if self.head is not None and arrival.bucket is self.server.buckets[0]:
            self.head.record(arrival.worker, loss, arrival.count, times)
        message = arrival.storage[: arrival.length]
        self.codec.add(arrival.bucket, message, self.server.values[arrival.bucket.index], share)

    def reply(self, worker: int, bucket: Bucket) -> None:
        """Send the model, with the worker's stage and part of the plan."""
        notes = self.head.notes(worker) if self.head is not None else ()
        self.server.send_model(worker, bucket, notes=notes)

    def _ended(self, worker: int) -> None:
        """Stop waiting for a worker that has ended or failed."""
        self.bound.ended(worker)
        if self.head is not None and self.server.has_failed(worker):
            self.head.loss.exclude(worker)

    def facts(self) -> dict[str, Any]:
        """Return the plan and the start of the fine stage, for the summary."""
        return {} if self.head is None else {"ashl": self.head.facts()}

    def merged(
        self, states: Sequence[dict[str, Any] | None], layout: Layout
    ) -> dict[str, Any] | None:
        """Merge the servers' states, with the first server's ``head``."""
        merged = super().merged(states, layout)
        if merged is not None:
            merged["head"] = next(state["head"] for state in states if state is not None)
        return merged

    def resize(self, merged: MergedState) -> None:
        """Restore the stage; the new workers are measured for a new plan."""
        super().resize(merged)
        head = merged.server.get("head")
        if self.head is not None and head is not None:  # else the server that had it is lost
            self.head.phase, self.head.fine_from = head["phase"], head["fine_from"]


class TrainingPlanner(Stateful):
    """The first server's additional state: the plan, and the stage of the training."""

    SAVED = saved(loss="loss.newest", times="times", plan="planned") | saved("phase", "fine_from")

    def __init__(self, server: ParameterServer, options: AshlOptions) -> None:
        self.server = server
        self.options = options
        self.loss = GlobalLoss(server.worker_count)
        self.times: dict[int, list[float]] = {}
        """Each worker's :class:`Times`."""
        self.planned: list[list[float]] = []
        """The plan in the form that is sent."""
        self.phase = int(Phase.COARSE)
        self.fine_from: int | None = None
        """Sample number of the run at which the fine stage began."""

    def record(self, worker: int, loss: float, gradients: int, times: list[float]) -> None:
        """Record a worker's loss and, once, its times."""
        self.loss.report(worker, loss, gradients)
        if times:
            self.times[worker] = times
        if not self.planned and self.times:
            missing = [w for w in range(self.server.worker_count) if w not in self.times]
            if all(self.server.has_failed(w) for w in missing):
                # A failed worker gets a part too, which is never requested.
                self.times |= dict.fromkeys(missing, next(iter(self.times.values())))
                self._make_plan()
        if self.planned and self.phase == Phase.COARSE and self._is_fine():
            self.phase, self.fine_from = int(Phase.FINE), self.server.samples

    @property
    def plan(self) -> list[PlannedShare]:
        """Every worker's part; empty until all have been measured."""
        return [_unpack(numbers) for numbers in self.planned]

    def _make_plan(self) -> None:
        options = self.options
        plan = make_plan(
            [Times(*self.times[worker]) for worker in sorted(self.times)],
            options.coarse_steps,
            options.fine_steps,
            options.coarse_rate,
            options.fine_rate,
        )
        _log.info("ashl: plan %s", plan)
        self.planned = [_pack(share) for share in plan]

    def _is_fine(self) -> bool:
        if self.options.stage != "auto":
            return self.options.stage == "fine"
        return self.loss.value <= self.options.loss

    def notes(self, worker: int) -> tuple[float, ...]:
        """Return the stage and, once there is a plan, the worker's part of it."""
        return (float(self.phase), *(_pack(self._part(worker)) if self.planned else ()))

    def _part(self, worker: int) -> PlannedShare:
        """Return the worker's part; the shares of failed workers are divided among the others."""
        plan = self.plan
        surviving = [part for w, part in enumerate(plan) if not self.server.has_failed(w)]
        part, rate = plan[worker], self.server.surviving_workers / self.server.divisor
        coarse, fine = sum(s.coarse.share for s in surviving), sum(s.fine.share for s in surviving)
        return PlannedShare(
            part.coarse._replace(share=part.coarse.share / coarse * rate),
            part.fine._replace(share=part.fine.share / fine * rate),
        )

    def facts(self) -> dict[str, Any]:
        """Return the plan, one row per worker, and the sample at which the fine stage began."""
        rows = [
            {"coarse": share.coarse._asdict(), "fine": share.fine._asdict()} for share in self.plan
        ]
        return {"plan": rows, "fine_from": self.fine_from}


def _pack(share: PlannedShare) -> list[float]:
    return [*map(float, share.coarse), *map(float, share.fine)]


def _unpack(numbers: list[float]) -> PlannedShare:
    coarse, fine = numbers[:3], numbers[3:]
    return PlannedShare(*(Stage(share, int(steps), rate) for share, steps, rate in (coarse, fine)))


register(
    ASHL,
    worker=lambda worker, optimizer, wire, run: AshlWorker(
        worker, optimizer, wire, own(run, AshlOptions)
    ),
    server=lambda server, optimizer, run: AshlServer(server, own(run, AshlOptions)),
    arriving=TopK,
)
