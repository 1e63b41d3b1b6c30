"""Timing of a model's training steps, and of the gradient's completion during backward.

Steps are those of training, with the gradient reported bucket by bucket, but on random data and
without messages.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from aladdin_mpi.accelerator import Stopwatch, enter
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.exchange import barrier, gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.datasets import describe_set
from aladdin_mpi.data.models import build_model
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, cut
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.options.general import SIZE_PREFIX
from aladdin_mpi.probing.links import Flow, Length
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.run.trainer import AUTOCAST
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.gradient_pass import RealStep

WARM_UP = 2
"""Steps before timing, in which memory is allocated and kernels are selected."""
FEWEST, MOST = 3, 300
BUCKETS = 64
"""Number of parts of the gradient whose completion is timed."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class ProbeTask:
    """A model with a batch, and their device."""

    module: nn.Module
    inputs: Tensor
    labels: Tensor
    precision: str
    device: torch.device


@dataclass(frozen=True)
class StepTimes:
    """The steps of one rank.

    Attributes:
        seconds: of each step.
        forward: share of a step before backward begins.
        backward: pairs of a share of the gradient and the share of backward's time to complete it.
    """

    seconds: list[float]
    forward: float
    backward: Points


def make_task(options: ProbeOptions, device: torch.device) -> ProbeTask:
    """Return the model and a batch with the shape of its dataset.

    Raises:
        UserError: an unknown model or dataset, or they do not match.
    """
    if options.model.startswith(SIZE_PREFIX):
        raise UserError(
            f"--model {options.model}: expected a model that can be trained, got a size alone; "
            "name a model"
        )
    data = describe_set(options.dataset, None, False, options.image_size)
    torch.manual_seed(0)
    module = build_model(options.model, data.classes, data.channels, data.size).train()
    inputs = torch.randn(options.batch_size, data.channels, data.size, data.size)
    labels = torch.randint(data.classes, (options.batch_size,))
    return ProbeTask(module, inputs, labels, options.precision, device)


def time_steps(transport: Transport, task: ProbeTask, seconds: float) -> StepTimes:
    """Take steps for about ``seconds``, and at least a few.

    Raises:
        RuntimeError: the device cannot compute them, for example for lack of memory.
    """
    enter(task.device)
    timer = _StepTimer(transport, task)
    try:
        for _ in range(WARM_UP):
            timer.step()
        end = time.perf_counter() + seconds
        timed: list[tuple[float, float, Points]] = []
        while len(timed) < FEWEST or (len(timed) < MOST and time.perf_counter() < end):
            timed.append(timer.step())
    finally:
        timer.close()
    forward = median(forward / step for step, forward, _ in timed)
    shape = simplified(_typical([points for *_, points in timed]))
    return StepTimes([step for step, *_ in timed], forward, shape)


class _StepTimer:
    """Timer of a task's steps on its device."""

    def __init__(self, transport: Transport, task: ProbeTask) -> None:
        self._module = task.module.to(task.device)
        self._inputs, self._labels = task.inputs.to(task.device), task.labels.to(task.device)
        self._device, self._dtype = task.device, AUTOCAST.get(task.precision)
        replica = Replica(self._module)
        self._numel, self._vector = replica.numel, replica.new_vector()
        megabytes = 4e-6 * replica.numel
        layout = cut(replica.numel, 0, max(4e-6, megabytes / BUCKETS), megabytes)
        self._watch = Stopwatch(task.device)
        self._begun: Any = None
        self._step = RealStep(
            transport, layout, replica, self._compute, slowdown=1.0, wait_free=True
        )

    def _compute(self, lease: SampleLease) -> float:
        dtype = self._dtype or torch.bfloat16
        with torch.autocast(self._device.type, dtype, enabled=self._dtype is not None):
            outputs = self._module(self._inputs)
        loss = functional.cross_entropy(outputs.float(), self._labels)
        self._begun = self._watch.stamp()
        loss.backward()
        return float(loss.detach())

    def step(self) -> tuple[float, float, Points]:
        """Take a step; return its seconds, those of forward, and the completion of the gradient."""
        watch = self._watch
        stamps: list[tuple[Bucket, Any]] = []
        start = watch.stamp()
        self._step.compute_into(
            self._vector, SampleLease(0, 1, 1), lambda b: stamps.append((b, watch.stamp()))
        )
        end = watch.stamp()
        watch.finish()
        begun, backward = self._begun, watch.between(self._begun, end)
        points = [
            (bucket.stop / self._numel, watch.between(begun, stamp) / backward)
            for bucket, stamp in stamps
        ]
        return watch.between(start, end), watch.between(start, begun), points

    def close(self) -> None:
        """Remove the hooks of the model."""
        self._step.close()


def _typical(steps: Sequence[Points]) -> Points:
    """Return the median time of each point over all steps."""
    return [
        (of_bucket[0][0], min(1.0, max(0.0, median(time for _, time in of_bucket))))
        for of_bucket in zip(*steps, strict=True)
    ]


def simplified(points: Points, tolerance: float = 0.03) -> Points:
    """Return a subset of the points that approximates all by linear interpolation.

    Args:
        points: ascending, between the implied ends (0, 0) and (1, 1).
        tolerance: largest error, as a share of backward's time.
    """
    whole = [(0.0, 0.0), *(point for point in points if 0 < point[0] < 1), (1.0, 1.0)]
    rising: Points = []
    for gradient, moment in _split(whole, tolerance)[1:-1]:
        before = rising[-1][1] if rising else 0.0
        rising.append((round(gradient, 4), round(max(moment, before), 4)))
    return rising


def _split(points: Points, tolerance: float) -> Points:
    """Simplify by the Ramer-Douglas-Peucker algorithm (1972, 1973), with distances in time."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    distances = [abs(y - (y0 + (y1 - y0) * (x - x0) / (x1 - x0))) for x, y in points]
    worst = max(range(len(points)), key=distances.__getitem__)
    if distances[worst] <= tolerance:
        return [points[0], points[-1]]
    left = _split(points[: worst + 1], tolerance)
    return [*left[:-1], *_split(points[worst:], tolerance)]


SECONDS, BYTES = 0.2, 64_000_000
"""Most seconds and bytes of the messages sent, if they are sent alone."""
LONGER = 1.5
"""Ratio of the computing time to the time of the messages alone."""
SMALLEST, LARGEST = 64 * 1024, 4_000_000
"""Bytes of a message."""
SIDE = 128


@dataclass(frozen=True)
class Overlap:
    """The overlap of messages and computing.

    Attributes:
        moved: share of the bytes transferred when computing ended.
        slower: share of the computing lost to messages.
    """

    moved: float
    slower: float


def measure_overlap(transport: Transport, pair: Flow, rate: float) -> Overlap | None:
    """Send from one rank to another while both compute; return the overlap at rank 0, else None.

    Args:
        transport: all ranks call it.
        pair: the two ranks.
        rate: bytes/s of a stream between them without computing.
    """
    total = min(BYTES, rate * SECONDS)
    nbytes = round(min(LARGEST, max(SMALLEST, total / 16)))
    length = Length(nbytes, max(1, round(total / nbytes)))
    alone = length.nbytes * length.messages / rate
    barrier(transport)
    before = _compute(transport, LONGER * alone) if transport.rank in pair else 1.0
    barrier(transport)
    own = None
    if transport.rank in pair:
        own = _send_and_compute(transport, pair, length, alone, before)
    results = [each for each in gather(transport, own) if each is not None]
    if not results:
        return None
    return Overlap(min(moved for moved, _ in results), max(slower for _, slower in results))


def _send_and_compute(
    transport: Transport, pair: Flow, length: Length, alone: float, before: float
) -> tuple[float, float]:
    source, dest = pair
    post, other = (transport.isend, dest) if transport.rank == source else (transport.irecv, source)
    buffers = [torch.zeros(length.nbytes, dtype=torch.uint8) for _ in range(length.messages)]
    requests = [post(buffer, other, Tag.PROBE) for buffer in buffers]
    during = _compute(transport, LONGER * alone)
    end = transport.now()
    transport.wait(*requests)
    waited = transport.now() - end
    return max(0.0, 1.0 - waited / alone), max(0.0, 1.0 - during / before)


def _compute(transport: Transport, seconds: float) -> float:
    """Compute for ``seconds`` without polling; return the matrix products per second."""
    if transport.models_time:
        transport.sleep(seconds)
        return 1.0
    matrix = torch.eye(SIDE)
    start, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < seconds:
        matrix = matrix @ matrix
        count += 1
    return count / passed
