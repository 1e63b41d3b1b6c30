"""ASHL, an adaptive scheme with stages for unequal workers (IEEE Transactions on Computers 2024).

Every worker measures its times first; from these the plan says for each how many local
steps it takes between two exchanges and which share of its values it pushes: then all
need about as long (Algorithms 1 and 2, in :mod:`aladdin_mpi.algorithms.ashl_plan`). Training
(Algorithm 3) is coarse and fully asynchronous (AHL) until the training loss of all
workers is low enough, then fine and semi-asynchronous (SHL), for good.

Nobody waits for the measuring: until the plan is there, a worker that has measured goes on
with as many steps as the slowest one will take. The first server makes the plan, follows
the loss, and tells a worker the stage and its part with every model. A worker tells all
servers with every difference in which stage it was made, and its share: so all
servers treat it alike.
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
"""Seconds: a shorter step cannot be measured."""


class Times(NamedTuple):
    """What a worker has measured: a local step, a push of all values, a pull, choosing values."""

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
    """A worker's part of the plan."""

    coarse: Stage
    fine: Stage


def local_steps(times: Sequence[Times], preset: int, rate: float = 1.0) -> list[int]:
    """Algorithm 1: ``H_i``, so that all need as long as the slowest needs for ``preset`` steps.

    ``T_upd,i = T_iter,i H_preset + T_comm,i``, ``T_max = max T_upd,i``,
    ``H_i = round((T_max - T_comm,i) / T_iter,i)``, which is never below H_preset.

    Args:
        times: of every worker.
        preset: H_preset.
        rate: share of the values that is pushed, r_preset; below 1 they have to be chosen.
    """
    talk = [
        rate * worker.push + worker.pull + (worker.compress if rate < 1 else 0.0)
        for worker in times
    ]
    step = [max(worker.step, SHORTEST) for worker in times]
    longest = max(s * preset + t for s, t in zip(step, talk, strict=True))
    return [round((longest - t) / s) for s, t in zip(step, talk, strict=True)]


def shares(steps: Sequence[int]) -> list[float]:
    """``D_i = H_i / sum H``, the share of all data that a worker computes on."""
    total = sum(steps)
    return [own / total for own in steps]


def rates(times: Sequence[Times], steps: Sequence[int], preset: float) -> list[float]:
    """Algorithm 2: ``R_i``, so that who has time left pushes more than ``preset`` of the values.

    ``T_upd,i = T_iter,i H_i + T_compress,i + r_preset T_push,i + T_pull,i``,
    ``T_max = max T_upd,i``,
    ``R_i = min(1, (T_max - (T_iter,i H_i + T_compress,i + T_pull,i)) / T_push,i)``.

    With a preset of 1 nothing is chosen: all are 1. A push that takes no time is whole.
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
    """Everyone's part, from the presets of both stages."""
    coarse = _stage(times, coarse_steps, coarse_rate)
    fine = _stage(times, fine_steps, fine_rate)
    return [PlannedShare(*parts) for parts in zip(coarse, fine, strict=True)]


SAMPLE = 0.01
"""Share of the values from which the smallest of the largest is estimated."""


class TopK(DeepGradientCompression):
    """``TopK(x - base, rate)``: of every bucket the largest values, at the present ``rate``.

    With a wire of few bits all values go in few bits where that is not longer than those
    chosen, which go in fp32 as their positions do. A message of those is given entries that
    add nothing where its length would say few bits.
    """

    def __init__(self, wire: GradientCodec, layout: Layout) -> None:
        everything = [(1, layout.numel)]
        super().__init__(wire.plain, layout, everything, lambda samples: self.rate, sample=SAMPLE)
        self.rate = 1.0
        self.quantises = wire if isinstance(wire, QuantisedCodec) else None

    def discard(self) -> None:
        """Forget what was not chosen."""
        if self.left is not None:
            self.left.zero_()

    # -- sizes and memory ------------------------------------------------------
    def longest(self, bucket: Bucket, samples: int) -> int:
        """See :meth:`DeepGradientCompression.longest`."""
        return self._unlike_few_bits(bucket, super().longest(bucket, samples))

    def _unlike_few_bits(self, bucket: Bucket, length: int) -> int:
        while self.quantises is not None and self.quantises.reads(bucket, length):
            length += 2
        return length

    def _is_few_bits(self, bucket: Bucket, message: Tensor) -> bool:
        return self.quantises is not None and self.quantises.reads(bucket, message.numel())

    def buffer_for(self, vector: Tensor) -> Tensor:
        """See :meth:`GradientCodec.buffer_for`."""
        return (self.quantises or self.plain).buffer_for(vector)

    def numbers(self, bucket: Bucket, message: Tensor) -> Tensor:
        """See :meth:`GradientCodec.numbers`."""
        if self.quantises is not None and self._is_few_bits(bucket, message):
            return self.quantises.numbers(bucket, message)
        return super().numbers(bucket, message)

    def besides(self, bucket: Bucket, nbytes: int) -> int:
        """See :meth:`GradientCodec.besides`."""
        quantises = self.quantises
        if quantises is not None and quantises.reads(bucket, nbytes // self.dtype.itemsize):
            return quantises.besides(bucket, nbytes)
        return super().besides(bucket, nbytes)

    # -- sending and receiving -------------------------------------------------
    def compress(
        self, bucket: Bucket, values: Tensor, samples: int, room: Tensor
    ) -> tuple[Tensor, Event | None]:
        """See :meth:`GradientCodec.compress`."""
        quantises = self.quantises
        if quantises is None or quantises.length(bucket) > self.longest(bucket, samples):
            return super().compress(bucket, values, samples, room)
        if self.left is None:
            return quantises.compress(bucket, values, samples, room)
        left = self.left[bucket.part].add_(values)
        sent = quantises.compress(bucket, left, samples, room)
        left.zero_()
        return sent

    def _take_largest(self, bucket: Bucket, left: Tensor, samples: int) -> Tensor:
        message = super()._take_largest(bucket, left, samples)
        length = self._unlike_few_bits(bucket, message.numel())
        if length > message.numel():
            positions, values = message.chunk(2)
            nothing = message.new_zeros((length - message.numel()) // 2)
            message = torch.cat((positions, nothing, values, nothing))
        return message

    def add(self, bucket: Bucket, message: Tensor, target: Tensor, alpha: float = 1.0) -> None:
        """See :meth:`GradientCodec.add`."""
        if self.quantises is not None and self._is_few_bits(bucket, message):
            self.quantises.add(bucket, message, target, alpha)
        else:
            super().add(bucket, message, target, alpha)

    # -- checkpoints -----------------------------------------------------------
    def state_dict(self) -> dict[str, Any]:
        """What was not chosen, and what rounding has lost."""
        quantises = self.quantises.state_dict() if self.quantises is not None else None
        return {**super().state_dict(), "few_bits": quantises}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        if self.quantises is not None:
            self.quantises.load_state_dict(state["few_bits"])


_log = logging.getLogger(__name__)


class Phase(IntEnum):
    """How far the training has come."""

    COARSE = 0
    FINE = 1


class _Profile:
    """The times that a worker measures in its first iterations, each with an exchange."""

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self.measured: list[list[float]] = [[], [], []]
        """Of steps, pushes and pulls."""

    @property
    def done(self) -> bool:
        steps, _, _ = self.measured
        return len(steps) >= self.iterations

    def exchanged(self, push: float, whole: float) -> None:
        """Note the time of a push and of the whole exchange.

        Both ways carry as much. The transport may take over what is sent long before it has
        arrived, so a push takes half the time of both, if not longer.
        """
        _, pushes, pulls = self.measured
        if len(pushes) < self.iterations:
            push = max(push, whole / 2)
            pushes.append(push)
            pulls.append(whole - push)

    def times(self, compress: float) -> Times:
        """The medians: a first iteration is often much longer."""
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
        """Step; every H_i steps, and at the end, push; then pull, and hear what to do next."""
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
        """This worker's part of the plan, once it has come."""
        return _unpack(self.planned) if self.planned else None

    @property
    def stage(self) -> Stage:
        """What this worker does at present; before the plan all have an equal share."""
        plan = self.plan
        if plan is not None:
            return plan.fine if self.phase == Phase.FINE else plan.coarse
        steps = self.options.coarse_steps if self.profile.done else 1
        return Stage(1 / self.worker.divisor, steps, 1.0)

    def _exchange(self) -> None:
        """Push, pull, and note how long that takes."""
        now, link = self.transport.now, self.link
        start = now()
        self._push()
        link.outbox.drain()
        pushed = now()
        link.pull()
        self.profile.exchanged(pushed - start, now() - start)
        self._obey(link.inbox.notes)

    def _push(self) -> None:
        """What was learnt."""
        notes = [self.stage.share, self.phase, self.local.loss, *self._measure()]
        self.top_k.rate = self.stage.rate
        self.local.push(*notes)
        if not self.options.error_feedback:
            self.top_k.discard()

    def _measure(self) -> list[float]:
        """The times, with the last message of the profile."""
        if self.profile.done:
            return []
        self.profile.measured[0].append(self.local.step_seconds)
        return list(self.profile.times(self._choosing())) if self.profile.done else []

    def _choosing(self) -> float:
        """Time to choose the largest values."""
        start = self.worker.transport.now()
        if self.options.fine_rate < 1 and not self.x.is_meta:
            moved = self.x - self.local.base
            for bucket in self.worker.layout.buckets:
                wanted = max(1, int(self.options.fine_rate * bucket.numel))
                select(moved[bucket.part], wanted, SAMPLE)
        return self.worker.transport.now() - start

    def _obey(self, notes: tuple[float, ...]) -> None:
        phase, *plan = notes
        self.phase = int(phase)
        self.planned = plan or self.planned


class AshlServer(ServerAlgorithm):
    """Algorithm 3, server: ``W <- W + D_i dW_i``; in SHL it holds the answer of who is ahead."""

    SAVED = ServerAlgorithm.SAVED | saved("head")

    def __init__(self, server: ParameterServer, options: AshlOptions) -> None:
        super().__init__(server)
        assert isinstance(server.arriving, TopK)
        self.codec = server.arriving
        self.bound = StalenessBound(self.n, server.buckets, options.bound, self.reply)
        self.head = Head(server, options) if server.transport.rank == 0 else None

    def run(self) -> None:
        """Add; answer at once (AHL), or while ``step_i - min(step) <= s`` (SHL)."""
        self.bound.open()  # all begin a segment with the same model
        for arrival in self.arrivals(self._ended):
            _, phase, *_ = arrival.notes
            self._add(arrival)
            if phase == Phase.COARSE:
                self.reply(arrival.worker, arrival.bucket)
            else:
                self.bound.advance(arrival.worker, arrival.bucket)
                self.bound.hold(arrival.worker, arrival.bucket)

    def _add(self, arrival: ReceivedBucket) -> None:
        """``W <- W + D_i dW_i``."""
        share, _, loss, *times = arrival.notes
        if self.head is not None and arrival.bucket is self.server.buckets[0]:
            self.head.listen(arrival.worker, loss, arrival.count, times)
        message = arrival.storage[: arrival.length]
        self.codec.add(arrival.bucket, message, self.server.values[arrival.bucket.index], share)

    def reply(self, worker: int, bucket: Bucket) -> None:
        """Send the model, and what the worker is to do."""
        notes = self.head.word(worker) if self.head is not None else ()
        self.server.send_model(worker, bucket, notes=notes)

    def _ended(self, worker: int) -> None:
        """Nobody waits for a worker that has ended."""
        self.bound.ended(worker)
        if self.head is not None and self.server.has_failed(worker):
            self.head.loss.exclude(worker)

    def facts(self) -> dict[str, Any]:
        """The plan, and when the fine stage began, for the summary."""
        return {} if self.head is None else {"ashl": self.head.facts()}

    def merged(
        self, states: Sequence[dict[str, Any] | None], layout: Layout
    ) -> dict[str, Any] | None:
        """See :meth:`ServerAlgorithm.merged`; with the first server's ``head``."""
        merged = super().merged(states, layout)
        if merged is not None:
            merged["head"] = next(state["head"] for state in states if state is not None)
        return merged

    def resize(self, merged: MergedState) -> None:
        """The stage stays, and the new workers are measured for a plan of their own."""
        super().resize(merged)
        head = merged.server.get("head")
        if self.head is not None and head is not None:  # else the server that knew is lost
            self.head.phase, self.head.fine_from = head["phase"], head["fine_from"]


class Head(Stateful):
    """The first server's other duty: the plan, and the stage of the training."""

    SAVED = saved(loss="loss.newest", times="times", plan="planned") | saved("phase", "fine_from")

    def __init__(self, server: ParameterServer, options: AshlOptions) -> None:
        self.server = server
        self.options = options
        self.loss = GlobalLoss(server.worker_count)
        self.times: dict[int, list[float]] = {}
        """Each worker's :class:`Times`."""
        self.planned: list[list[float]] = []
        """The plan as numbers."""
        self.phase = int(Phase.COARSE)
        self.fine_from: int | None = None
        """Sample number of the run at which the fine stage began."""

    def listen(self, worker: int, loss: float, gradients: int, times: list[float]) -> None:
        """Hear a worker's loss and, once, its times."""
        self.loss.report(worker, loss, gradients)
        if times:
            self.times[worker] = times
        if not self.planned and times:
            missing = [w for w in range(self.server.worker_count) if w not in self.times]
            if all(self.server.has_failed(w) for w in missing):
                # Who has failed gets a part too, which nobody will ask for.
                self.times |= dict.fromkeys(missing, times)
                self._make_plan()
        if self.planned and self.phase == Phase.COARSE and self._is_fine():
            self.phase, self.fine_from = int(Phase.FINE), self.server.samples

    @property
    def plan(self) -> list[PlannedShare]:
        """Every worker's part; none before all have been measured."""
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

    def word(self, worker: int) -> tuple[float, ...]:
        """The stage and, once there is a plan, the worker's part of it."""
        return (float(self.phase), *(_pack(self._part(worker)) if self.planned else ()))

    def _part(self, worker: int) -> PlannedShare:
        """The worker's part; the shares of workers that have failed go to all others alike."""
        plan = self.plan
        left = [part for w, part in enumerate(plan) if not self.server.has_failed(w)]
        part, rate = plan[worker], self.server.surviving_workers / self.server.divisor
        coarse, fine = sum(s.coarse.share for s in left), sum(s.fine.share for s in left)
        return PlannedShare(
            part.coarse._replace(share=part.coarse.share / coarse * rate),
            part.fine._replace(share=part.fine.share / fine * rate),
        )

    def facts(self) -> dict[str, Any]:
        """The plan, a worker a row, and the sample at which the fine stage began."""
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
