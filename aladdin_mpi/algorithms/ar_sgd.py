"""AR-SGD: synchronous SGD whose gradients are summed by an all-reduce, without a server.

The sum of each bucket starts as soon as backward has completed it and overlaps the rest
(Sergeev and Del Balso, Horovod, 2018; Li et al., PyTorch Distributed, VLDB 2020). A bucket
holds the gradients of many layers in one message, as in Horovod's tensor fusion.
"""

from __future__ import annotations

from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.allreduce.base import AllReduce, PendingSum
from aladdin_mpi.allreduce.compressed import CompressedAllReduce
from aladdin_mpi.allreduce.surviving import SurvivingSums, tolerates_failures
from aladdin_mpi.allreduce.with_residual import SumCodec, make_all_reduce, sum_codec
from aladdin_mpi.codec.dgc import DeepGradientCompression
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import HELD_BACK, saved
from aladdin_mpi.flat.unused import joined, shifted, within
from aladdin_mpi.flat.vectors import add, copy, scale
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import AR_SGD, ArSgdOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class ArSgdWorker(TrainingWorker):
    """``x <- x - lr/n (g_1 + ... + g_n)``, the same on every worker."""

    SAVED = TrainingWorker.SAVED | saved("codec", merge=HELD_BACK)

    def __init__(
        self, worker: Worker, optimizer: Optimizer, codec: SumCodec, options: ArSgdOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.g = worker.replica.new_vector()
        self.codec = codec
        self.compresses = isinstance(codec, DeepGradientCompression)
        self.sums: list[tuple[Bucket, PendingSum]] = []
        self.surviving: SurvivingSums | None = None
        if tolerates_failures(options.allreduce, self.transport, codec):
            self.surviving = SurvivingSums(
                options.allreduce,
                self.transport,
                worker.replica.new_vector,
                codec.plain.dtype,
                worker.layout.buckets,
            )
        else:
            self.all_reduce = self._make(codec, options)

    def assist(self) -> None:
        """Take part in the sums of workers that a failure has interrupted."""
        if self.surviving is not None:
            self.surviving.assist()

    def _make(self, codec: SumCodec, options: ArSgdOptions) -> AllReduce:
        transport, layout = self.worker.transport, self.worker.layout
        if isinstance(codec, DeepGradientCompression):
            return CompressedAllReduce(transport, layout, codec, lambda: self.worker.lease.start)
        device = self.g.device
        return make_all_reduce(options.allreduce, transport, device, codec, layout.buckets)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        for _ in self.worker.batches():
            self.worker.gradient(self.g, self._begin_sum)
            by_parts = self.worker.current.norm is None and self.optimizer.takes_parts
            if self.surviving is not None:
                totals, ranks = self.surviving.finish()
                self._step_all(totals, self.worker.shares_of(ranks), by_parts)
            elif by_parts or self.compresses:
                for bucket, pending in self.sums:
                    self._step(bucket, pending.wait(), self.n)
            else:
                totals = [(bucket, pending.wait()) for bucket, pending in self.sums]
                self._step_as_whole(totals, self.n)
            self.sums.clear()
        if self.surviving is not None:
            self.surviving.settle()

    def _begin_sum(self, bucket: Bucket) -> None:
        g = bucket.of(self.g)
        if self.worker.share != 1.0:
            scale(g, self.worker.share)
        if self.compresses:
            # Deep gradient compression applies each worker's own momentum before the selection.
            unused = self.worker.unused(bucket.part)
            self.optimizer.correct(bucket.part, g, bucket.of(self.x), unused=unused)
        if self.surviving is not None:
            self.surviving.start(g, bucket)
        else:
            self.sums.append((bucket, self.all_reduce.start(g, bucket.index)))

    def _step_all(
        self, totals: list[tuple[Bucket, Tensor]], divisor: float, by_parts: bool
    ) -> None:
        if not by_parts:
            self._step_as_whole(totals, divisor)
            return
        for bucket, total in totals:
            self._step(bucket, total, divisor)

    def _step(self, bucket: Bucket, total: Tensor, divisor: float) -> None:
        x, lr, mean = bucket.of(self.x), self.worker.lr, 1 / divisor
        if self.compresses:
            scale(total, mean)
            add(x, total, alpha=-lr)
        else:
            unused = self.worker.unused_by_all(bucket, total)
            self.optimizer.descend(bucket.part, total, x, lr, mean, unused)

    def _step_as_whole(self, totals: list[tuple[Bucket, Tensor]], divisor: float) -> None:
        """Step with all buckets at once, for clipping by the global norm or whole parameters."""
        worker, g = self.worker, self.g
        unused: list[slice] = []
        for bucket, total in totals:
            unused += shifted(worker.unused_by_all(bucket, total), bucket.start)
            if total.data_ptr() != bucket.of(g).data_ptr():
                copy(bucket.of(g), total)
        scale(g, 1 / divisor)
        if worker.current.norm is not None:
            worker.current.clip(g, worker.current.norm)
        whole = slice(0, g.numel())
        parts = [b.part for b in worker.layout.buckets] if self.optimizer.takes_parts else [whole]
        unused = joined(unused)
        for part in parts:
            within_part = within(part, unused)
            self.optimizer.descend(part, g[part], self.x[part], worker.lr, unused=within_part)

    def close(self) -> None:
        """Close the worker and the all-reduce library."""
        super().close()
        (self.surviving or self.all_reduce).close()

    def describe(self) -> str:
        """Return the name of the all-reduce library."""
        return f"all-reduce: {(self.surviving or self.all_reduce).describe()}"


register(
    AR_SGD,
    worker=lambda worker, optimizer, wire, run: ArSgdWorker(
        worker, optimizer, sum_codec(wire, worker.replica, run), own(run, ArSgdOptions)
    ),
)
