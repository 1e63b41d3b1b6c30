"""The variance among the workers' models, measured at every evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import allreduce_tensors
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.session.context import Context
from aladdin_mpi.transport.base import Transport, once
from aladdin_mpi.worker.role import Role, TrainingWorker

COUNT = 4096
"""Approximate number of values in a sample."""
FRAME_BYTES = 16
"""Header of the values: the samples at the evaluation, and the worker's position."""


OnVariance = Callable[[int, float | None], None]


class Places(NamedTuple):
    """A sample of positions in the flat vector, and the number of values that each represents."""

    at: Tensor
    weight: Tensor


@lru_cache(maxsize=1)
def draw_places(sizes: tuple[int, ...], seed: int, count: int = COUNT) -> Places:
    """Draw about ``count`` positions of the flat vector, determined by the seed.

    Each parameter is sampled separately, without replacement: half of the sample is divided equally
    among parameters, the other half in proportion to their sizes. Biases and normalisation
    parameters are few values but much of a model's norm, and a plain sample could miss them.

    Args:
        sizes: of the parameters, in flat order.
        seed: of the run. The ranks of a simulation draw once.
        count: with at most this many values, the sample has all of them.

    Returns:
        Ascending positions (int64), and weights (float64) with which a sum over the sample is an
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
    """Return the sample's positions in each bucket, relative to its start."""
    edges = torch.tensor([bucket.start for bucket in layout.buckets] + [layout.numel])
    cuts = torch.searchsorted(places.at, edges).tolist()
    return [
        (bucket, places.at[cuts[i] : cuts[i + 1]] - bucket.start)
        for i, bucket in enumerate(layout.buckets)
    ]


class ModelVariance:
    """The variance among the workers' models, over the square of their mean's norm.

    ``V = 1/n sum_i |x_i - mean x|^2 / |mean x|^2`` over the n surviving workers, where ``x_i`` is
    the model with which a worker computes, and the mean is unweighted. It is dimensionless: at
    0.01, the distance of a model from the mean is a tenth of the mean's norm. The numerator is
    also called (squared) consensus distance (Kong et al., ICML 2021).

    Collecting whole models would send n of them to rank 0. Instead, each worker sends the same
    sample of its values, 16 KB, in the handler of the request. Rank 0 keeps the running mean and
    deviations, so that its memory does not depend on n. Sums over the sample are weighted to be
    unbiased estimates of those over the model. Scalars such as each worker's distance from the
    global model would be smaller, but workers have no common global model of the same moment.

    Of islands, the first members answer for their lane, an equal part of every bucket.

    With lockstep, each worker answers after the steps of all samples before the evaluation, so
    that workers with identical models have 0. Otherwise workers answer at once: over MPI, possibly
    in the middle of an update.

    Args:
        role: this rank's.
        places: positions of the sample; the same on all ranks.
        workers: the ranks with the models.
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
    def take(self, samples: int, on_variance: OnVariance) -> None:
        """Start a measurement at rank 0, of the models after the first ``samples`` samples.

        ``on_variance`` is called with ``samples`` and the value, or None if the workers were at
        different positions, one did not answer in time, or the value is not finite. Without
        lockstep, an incomplete earlier measurement is given up; with it, all workers would wait
        for one that hangs.
        """
        if not self._lockstep:
            self.give_up()
        failed = self._transport.failed
        missing = {rank for rank in self._workers if rank not in failed}
        self._open[samples] = _Answers(missing, self._weight, on_variance)
        for rank in sorted(missing - {0}):
            self._transport.isend(torch.tensor([samples]), rank, Tag.SAMPLE)
        if 0 in missing:
            self._when(samples, lambda: self._add(0, samples, self._place, self._values()))

    def give_up(self) -> None:
        """Give up incomplete measurements."""
        for samples in list(self._open):
            self._open.pop(samples).on_variance(samples, None)

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
        """This worker's position in samples; in lockstep, the same for all at one time."""
        role = self._role
        return (
            role.worker.reached.samples
            if self._lockstep and isinstance(role, TrainingWorker)
            else 0
        )

    def _values(self) -> Tensor:
        """Return this worker's sample, in fp32 on the CPU."""
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
            return  # the measurement was given up
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
            answers.on_variance(samples, answers.variance())

    # -- at the end of the run, all ranks together --------------------------------------
    def at_end(self) -> float | None:
        """Return the present value; every rank calls it, when no message is in flight."""
        values = torch.zeros(len(self._weight) + 1, dtype=torch.float64)
        is_worker = self._transport.rank in self._workers
        if is_worker:
            values[:-1] = self._values()
            values[-1] = 1.0
        mine = values.clone()
        allreduce_tensors(self._transport, values)
        mean = values[:-1] / values[-1]
        squares = torch.zeros(2, dtype=torch.float64)
        if is_worker:
            squares[0] = self._weight @ (mine[:-1] - mean) ** 2
            squares[1] = 1.0
        allreduce_tensors(self._transport, squares)
        return _ratio(squares[0].item() / squares[1].item(), (self._weight @ mean**2).item())


def model_variance(context: Context, role: Role) -> ModelVariance:
    """Return the measurement for this rank's ``role``."""
    first = context.lanes[0]
    places = draw_places(tuple(first.sizes(context.whole.sizes)), context.options.seed)
    return ModelVariance(
        context.transport,
        first.layout,
        role,
        places,
        context.leaders,
        context.algorithm.lockstep,
    )


class _Answers:
    """Running mean and squared deviations (Welford) of vectors that arrive one by one.

    ``on_variance`` is to be called when no rank is ``missing`` any more.
    """

    def __init__(self, missing: set[int], weight: Tensor, on_variance: OnVariance) -> None:
        self.missing = missing
        self.on_variance = on_variance
        self._weight = weight
        self._places: set[int] = set()
        self._count = 0
        self._mean = torch.zeros_like(weight)
        self._squares = 0.0

    def add(self, source: int, place: int, values: Tensor) -> None:
        """Add a vector; if all vectors are equal, the deviations are exactly 0."""
        self.missing.discard(source)
        self._places.add(place)
        self._count += 1
        away = values - self._mean
        self._mean += away / self._count
        self._squares += (self._weight @ (away * (values - self._mean))).item()

    def variance(self) -> float | None:
        """Return the mean squared deviation over the squared norm of the mean."""
        if len(self._places) != 1:
            return None
        return _ratio(self._squares / self._count, (self._weight @ self._mean**2).item())


def _ratio(variance: float, norm: float) -> float | None:
    value = variance / norm if norm else 0.0
    return value if isfinite(value) else None
