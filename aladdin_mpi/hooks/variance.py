"""How far the workers' models are from each other, measured at every evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isfinite, prod
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import allreduce_tensor
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.session.context import Context
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.worker.role import Role, TrainingWorker

COUNT = 4096
"""Values of a sample, about."""
FRAME_BYTES = 16
"""Before the values: the evaluation that they are for, and where the worker is."""


Done = Callable[[int, float | None], None]


class Places(NamedTuple):
    """A sample of the flat vector's places, and how many values each stands for."""

    at: Tensor
    weight: Tensor


@lru_cache(maxsize=1)
def draw_places(sizes: tuple[int, ...], seed: int, count: int = COUNT) -> Places:
    """Draw about ``count`` places of the flat vector, the same ones for a seed.

    Each parameter is sampled by itself, without replacement: one half of the sample is dealt to
    all alike, the other in proportion to their sizes. Biases and normalisations are few values
    and much of a model's norm, which a plain sample would meet by chance only.

    Args:
        sizes: of the parameters, in flat order.
        seed: of the run. The ranks of a simulation draw once.
        count: all values are taken where there are no more.

    Returns:
        Ascending places (int64), and weights (float64) with which a sum over the sample is an
        unbiased estimate of the sum over the vector.
    """
    draw = random.Random(f"model variance {seed}")
    whole, alike = sum(sizes), count // 2 // max(1, len(sizes))
    at: list[int] = []
    weight: list[float] = []
    start = 0
    for size in filter(None, sizes):
        share = alike + count * size // (2 * whole)
        taken = size if whole <= count else min(size, max(1, share))
        at += sorted(draw.sample(range(start, start + size), taken))
        weight += [size / taken] * taken
        start += size
    return Places(torch.tensor(at), torch.tensor(weight, dtype=torch.float64))


def _by_bucket(layout: Layout, places: Places) -> list[tuple[Bucket, Tensor]]:
    """The sample's places in each bucket, from its beginning."""
    edges = torch.tensor([bucket.start for bucket in layout.buckets] + [layout.numel])
    cuts = torch.searchsorted(places.at, edges).tolist()
    return [
        (bucket, places.at[cuts[i] : cuts[i + 1]] - bucket.start)
        for i, bucket in enumerate(layout.buckets)
    ]


class ModelVariance:
    """The variance among the workers' models, over the square of their mean's norm.

    ``V = 1/n sum_i |x_i - mean x|^2 / |mean x|^2`` of the n living workers, where ``x_i`` is the
    model that a worker computes with and their mean is the plain one. It has no unit: with 0.01
    a model is a tenth of the mean's norm away from it. The numerator is also called consensus
    distance (squared; Kong et al., ICML 2021).

    Whole models are not collected: rank 0 would receive n of them where the servers alone hold
    the model. Each worker sends the same sample of its values, 16 KB, from the handler of the
    request, and rank 0 keeps their mean and its deviations as they arrive, so that its memory
    does not depend on n either. Sums over the sample are weighted to be unbiased estimates of
    those over the whole. Scalars such as each worker's distance from the global model would be
    fewer bytes; but there is none that all have, and none of the same moment.

    In lockstep each worker answers when it has done the steps of all samples before the
    evaluation, so that workers that are the same after every step have 0. Others answer at once:
    over MPI maybe between two instructions of an update.

    Args:
        role: this rank's.
        places: of the sample; the same on all ranks.
        workers: the ranks whose models these are.
        lockstep: whether workers advance in rounds.
    """

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        role: Role,
        places: Places,
        workers: Sequence[int],
        lockstep: bool,
    ) -> None:
        self._transport = transport
        self._role = role
        self._weight = places.weight
        self._parts = once(transport, ("sample", layout), lambda: _by_bucket(layout, places))
        self._lockstep = lockstep
        self._workers = workers
        self._open: dict[int, _Answers] = {}
        transport.exclude_from_traffic(Tag.SAMPLE, Tag.SAMPLED)
        if transport.rank == 0:
            transport.on_failure(self._lose)
            nbytes = FRAME_BYTES + 4 * len(places.at)
            transport.on_message(Tag.SAMPLED, nbytes, self._collect)
        else:
            transport.on_message(Tag.SAMPLE, 8, self._answer)

    # -- at an evaluation, by messages -----------------------------------------------
    def take(self, samples: int, done: Done) -> None:
        """At rank 0: start to collect, for the models that have had the first ``samples``.

        ``done`` is called with ``samples`` and the value; None: the workers were not at one
        place, one did not answer in time, or it is not finite. Unless workers are in lockstep, and
        would all wait for one that hangs, an earlier value that is not complete is given up.
        """
        if not self._lockstep:
            self.give_up()
        failed = self._transport.failed
        missing = {rank for rank in self._workers if rank not in failed}
        self._open[samples] = _Answers(missing, self._weight, done)
        for rank in sorted(missing - {0}):
            self._transport.isend(torch.tensor([samples]), rank, Tag.SAMPLE)
        if 0 in missing:
            self._when(samples, lambda: self._add(0, samples, self._place, self._values()))

    def give_up(self) -> None:
        """Wait for no more answers."""
        for samples in list(self._open):
            self._open.pop(samples).done(samples, None)

    def _answer(self, source: int, message: Tensor) -> None:
        samples = int(message.clone().view(torch.int64))

        def send() -> None:
            head = torch.tensor([samples, self._place])
            frame = torch.cat([head.view(torch.uint8), self._values().view(torch.uint8)])
            self._transport.isend(frame, source, Tag.SAMPLED)

        self._when(samples, send)

    def _when(self, samples: int, action: Callable[[], None]) -> None:
        role = self._role
        if self._lockstep and isinstance(role, TrainingWorker):
            role.worker.reached.when(samples, lambda: role.when_whole(action))
        else:
            role.when_whole(action)

    @property
    def _place(self) -> int:
        """Where this worker is, in samples; the same for all at one time in lockstep."""
        role = self._role
        return (
            role.worker.reached.samples
            if self._lockstep and isinstance(role, TrainingWorker)
            else 0
        )

    def _values(self) -> Tensor:
        """This worker's sample, in fp32 on the CPU."""
        parts = []
        for bucket, index in self._parts:
            values = self._role.part(bucket).detach()
            parts.append(values[index.to(values.device)].to("cpu", torch.float32))
        return torch.cat(parts)

    def _collect(self, source: int, message: Tensor) -> None:
        samples, place = message[:FRAME_BYTES].clone().view(torch.int64).tolist()
        self._add(source, samples, place, message[FRAME_BYTES:].clone().view(torch.float32))

    def _add(self, source: int, samples: int, place: int, values: Tensor) -> None:
        answers = self._open.get(samples)
        if answers is None or source not in answers.missing:
            return  # too late
        answers.add(source, place, values)
        self._finish(samples)

    def _lose(self, rank: int) -> None:
        for samples, answers in list(self._open.items()):
            if rank in answers.missing:
                answers.missing.discard(rank)
                self._finish(samples)

    def _finish(self, samples: int) -> None:
        if not self._open[samples].missing:
            answers = self._open.pop(samples)
            answers.done(samples, answers.variance())

    # -- at the end of the run, all ranks together --------------------------------------
    def at_end(self) -> float | None:
        """The value now; every rank has to call it, when nothing is in flight."""
        values = torch.zeros(len(self._weight) + 1, dtype=torch.float64)
        is_worker = self._transport.rank in self._workers
        if is_worker:
            values[:-1] = self._values()
            values[-1] = 1.0
        mine = values.clone()
        allreduce_tensor(self._transport, values)
        mean = values[:-1] / values[-1]
        squares = torch.zeros(2, dtype=torch.float64)
        if is_worker:
            squares[0] = self._weight @ (mine[:-1] - mean) ** 2
            squares[1] = 1.0
        allreduce_tensor(self._transport, squares)
        return _ratio(squares[0].item() / squares[1].item(), (self._weight @ mean**2).item())


def model_variance(context: Context, role: Role) -> ModelVariance:
    """Return the measurement for this rank's ``role``."""
    sizes = tuple(prod(shape) for shape in context.replica.shapes)
    places = draw_places(sizes, context.options.seed)
    return ModelVariance(
        context.transport,
        context.layout,
        role,
        places,
        context.leaders,
        context.algorithm.lockstep,
    )


class _Answers:
    """Vectors that arrive one by one: their mean and squared deviations (Welford).

    ``done`` is to be called when no rank is ``missing`` any more.
    """

    def __init__(self, missing: set[int], weight: Tensor, done: Done) -> None:
        self.missing = missing
        self.done = done
        self._weight = weight
        self._places: set[int] = set()
        self._count = 0
        self._mean = torch.zeros_like(weight)
        self._squares = 0.0

    def add(self, source: int, place: int, values: Tensor) -> None:
        """One more; of values that are all the same the deviations are exactly 0."""
        self.missing.discard(source)
        self._places.add(place)
        self._count += 1
        away = values - self._mean
        self._mean += away / self._count
        self._squares += (self._weight @ (away * (values - self._mean))).item()

    def variance(self) -> float | None:
        """The mean of the squared deviations, over the square of the mean's norm."""
        if len(self._places) != 1:
            return None
        return _ratio(self._squares / self._count, (self._weight @ self._mean**2).item())


def _ratio(variance: float, norm: float) -> float | None:
    value = variance / norm if norm else 0.0
    return value if isfinite(value) else None
