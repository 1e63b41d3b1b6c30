"""DiLoCo: workers train by themselves, and an outer optimizer steps along their mean progress.

Douillard et al., arXiv 2311.08105. After H steps of each worker's inner optimizer, with Theta the
global model, eps the outer rate and beta the outer momentum::

    Delta <- 1/n sum_i (x_i - Theta)
    u     <- beta u + Delta
    Theta <- Theta + eps (Delta + beta u)          # Nesterov, as torch.optim.SGD(nesterov=True)
    x_i   <- Theta                                 # the inner optimizer keeps its state

Streaming DiLoCo (Douillard, Donchev et al., arXiv 2501.18512, Algorithm 2) divides the model into
P fragments of equal bytes. One of them is due every H/P steps; its sum is received ``overlap``
steps later, while the workers continue, and ``x <- blend x + (1 - blend) Theta``.

When a segment ends (at a checkpoint, and at the end of the run), the progress since the last outer
step is averaged without the outer optimizer, ``Theta <- Theta + Delta``, and u stays as it is:
Nesterov's momentum would otherwise be applied once more for a few steps only. With eps = 1 and
beta = 0 this is local SGD, bit for bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.allreduce.low_rank import LowRank
from aladdin_mpi.allreduce.surviving import make_sums
from aladdin_mpi.allreduce.with_residual import SumCodec, sum_codec
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import FIRST, HELD_BACK, MergedState, saved
from aladdin_mpi.flat.vectors import add, copy, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import (
    DILOCO,
    DilocoOptions,
    own,
)
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


def fragments(layout: Layout, number: int, tensors: Sequence[int] = ()) -> list[list[Bucket]]:
    """Return ``number`` fragments of equal bytes, each a list of parts of the layout's buckets.

    Every value is in exactly one part. A part may begin or end within a tensor, unless the sizes
    of the ``tensors`` are given: then each is in the fragment in which it would begin, and
    fragments may be empty.
    """
    ends = [layout.numel * k // number for k in range(number + 1)]
    if tensors:
        edges = [0, *accumulate(tensors)]
        ends = [edges[bisect_left(edges, end)] for end in ends]
    parts: list[list[Bucket]] = []
    index = 0
    for start, stop in pairwise(ends):
        inside = [b for b in layout.buckets if b.start < stop and start < b.stop]
        parts.append([])
        for bucket in inside:
            first, last = max(start, bucket.start), min(stop, bucket.stop)
            if first < last:
                parts[-1].append(Bucket(index, first, last, bucket.server))
                index += 1
    return parts


class DilocoWorker(TrainingWorker):
    """``theta`` is the global model: between segments it is the model of every worker."""

    SAVED = TrainingWorker.SAVED | saved("u", merge=FIRST) | saved("codec", merge=HELD_BACK)

    def __init__(
        self, worker: Worker, optimizer: Optimizer, codec: SumCodec, options: DilocoOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.options = options
        new_vector = worker.replica.new_vector
        self.g = new_vector()
        self.theta = new_vector()
        copy(self.theta, self.x)
        self.u = new_vector() if options.outer_momentum else None
        self.progress = new_vector() if options.overlap else self.g  # g is free between steps
        tensors = worker.replica.sizes if isinstance(codec, LowRank) else ()
        self.fragments = fragments(self.layout, options.fragments, tensors)
        self.sent_after: int | None = None
        """Steps of the segment after which the sum in progress was started; None without one."""
        self.codec = codec
        parts = [part for fragment in self.fragments for part in fragment]
        self.sums = make_sums(
            options.allreduce, self.transport, new_vector, self.g.device, codec, parts
        )

    def run(self) -> None:
        """Train until the segment's samples are used up; then all models are equal."""
        copy(self.theta, self.x)
        steps = 0
        for _ in self.worker.batches():
            self.descend(self.worker.lr, self.g)
            steps += 1
            self._synchronise(steps)
        if steps and not self._is_equal(steps):  # the same on every worker
            self._finish_segment()
        self.sums.settle()

    def _synchronise(self, step: int) -> None:
        """Apply the sum that is due after ``step`` steps, and start the next fragment's."""
        options = self.options
        if self.sent_after is not None and step == self.sent_after + options.overlap:
            self._apply()
        turn, rest = divmod(step, options.steps // options.fragments)
        if rest == 0:
            self._start(self.fragments[(turn - 1) % options.fragments])
            self.sent_after = step
            if not options.overlap:
                self._apply()

    def _start(self, parts: list[Bucket]) -> None:
        """Start summing the workers' progress in ``parts``, the same on every worker."""
        for part in parts:
            progress = part.of(self.progress)
            copy(progress, part.of(self.x))
            add(progress, part.of(self.theta), alpha=-1.0)
            self.sums.start(progress, part)

    def _apply(self) -> None:
        """Wait for the sum, make the outer step, and blend the global model into this worker's."""
        sums, self.sent_after = self.sums.finish(), None
        blend = self.options.blend
        for part, total in sums.totals:
            self._outer_step(part, total, 1 / len(sums.ranks))
        for part, _ in sums.totals:
            x, theta = part.of(self.x), part.of(self.theta)
            if blend:
                scale(x, blend)
                add(x, theta, alpha=1.0 - blend)
            else:
                copy(x, theta)
        self.worker.project(self.x)

    def _outer_step(self, part: Bucket, total: Tensor, share: float) -> None:
        """Step along ``share * total``, the mean progress of the workers."""
        rate, momentum = self.options.outer_lr, self.options.outer_momentum
        theta = part.of(self.theta)
        if self.u is not None:
            u = part.of(self.u)
            scale(u, momentum)
            add(u, total, alpha=share)
            add(theta, u, alpha=rate * momentum)
        add(theta, total, alpha=rate * share)

    def _is_equal(self, step: int) -> bool:
        """Return whether the outer step just made has made all models equal."""
        options = self.options
        is_whole = options.fragments == 1 and not options.overlap and not options.blend
        return is_whole and step % options.steps == 0

    def _finish_segment(self) -> None:
        """Complete the sum in progress, and average the progress since the last outer steps."""
        if self.sent_after is not None:
            self._apply()
        self._start([part for parts in self.fragments for part in parts])
        sums = self.sums.finish()
        for part, total in sums.totals:
            add(part.of(self.theta), total, alpha=1 / len(sums.ranks))
        copy(self.x, self.theta)

    def part(self, bucket: Bucket) -> Tensor:
        """Return a bucket of the global model, which is the same on all workers."""
        return bucket.of(self.theta)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; between segments the global model is every worker's."""
        super().load_state_dict({"codec": {}, **state})  # absent before sums could be quantised
        copy(self.theta, self.x)

    def resize(self, merged: MergedState) -> None:
        """Start from the global model."""
        super().resize(merged)
        copy(self.theta, self.x)

    def assist(self) -> None:
        """Take part in the sums of workers that a failure has interrupted."""
        self.sums.assist()

    def close(self) -> None:
        """Close the worker and the all-reduce library."""
        super().close()
        self.sums.close()

    def describe(self) -> str:
        """Return the name of the all-reduce library."""
        return f"all-reduce: {self.sums.describe()}"


register(
    DILOCO,
    worker=lambda worker, optimizer, wire, run: DilocoWorker(
        worker, optimizer, sum_codec(wire, worker.replica, run), own(run, DilocoOptions)
    ),
)
