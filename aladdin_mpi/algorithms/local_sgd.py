"""Local SGD: workers train by themselves and average their models every H steps.

Stich, ICLR 2019, Algorithm 1: ``x_i <- x_i - lr g_i``, and after every H-th step
``x_i <- 1/n (x_1 + ... + x_n)``. With H = 1 first and more later it is post-local SGD
(Lin, Stich, Patel, Jaggi; ICLR 2020).

Workers sum their differences from the last average, which is the same on all of them:
``x <- base + 1/n sum (x_i - base)``. In bf16 the models themselves would lose every change
that is smaller than the last digit of a parameter.
"""

from __future__ import annotations

from typing import Any

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.allreduce.surviving import make_sums
from aladdin_mpi.allreduce.with_residual import SumCodec, sum_codec
from aladdin_mpi.flat.state import HELD_BACK, saved
from aladdin_mpi.flat.vectors import add, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import LOCAL_SGD, LocalSgdOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class LocalSgdWorker(TrainingWorker):
    """``base`` is the last average: between segments it is the model of every worker."""

    SAVED = TrainingWorker.SAVED | saved("codec", merge=HELD_BACK)

    def __init__(
        self, worker: Worker, optimizer: Optimizer, codec: SumCodec, options: LocalSgdOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.options = options
        self.g = worker.replica.new_vector()
        self.base = worker.replica.new_vector()
        self.codec = codec
        self.sums = make_sums(
            options.allreduce,
            self.transport,
            worker.replica.new_vector,
            self.g.device,
            codec,
            self.layout.buckets,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; those from before sums could be quantised have no codec."""
        super().load_state_dict({"codec": {}, **state})

    def run(self) -> None:
        """Train until the segment's samples are used up; then all models are equal."""
        copy(self.base, self.x)
        steps = 0
        for _ in self.worker.batches():
            self.descend(self.worker.lr, self.g)
            steps += 1
            if steps >= self.local_steps:
                self.average()
                steps = 0
        if steps:  # the same number on every worker: all take part
            self.average()
        self.sums.settle()

    @property
    def local_steps(self) -> int:
        """H at the current batch, which starts at the same sample for all workers."""
        return 1 if self.worker.lease.start < self.options.post else self.options.steps

    def average(self) -> None:
        """Set ``x <- base + 1/n sum (x_i - base)``, ``base <- x``; until then x stays readable."""
        moved = self.g  # the gradient is no longer needed
        copy(moved, self.x)
        add(moved, self.base, alpha=-1.0)
        for bucket in self.layout.buckets:
            self.sums.start(bucket.of(moved), bucket)
        totals, ranks = self.sums.finish()
        for bucket, total in totals:
            add(bucket.of(self.base), total, alpha=1 / len(ranks))
        copy(self.x, self.base)

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
    LOCAL_SGD,
    worker=lambda worker, optimizer, wire, run: LocalSgdWorker(
        worker, optimizer, sum_codec(wire, worker.replica, run), own(run, LocalSgdOptions)
    ),
)
