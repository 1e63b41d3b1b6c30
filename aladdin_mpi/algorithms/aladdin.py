"""ALADDIN: asymmetric centralised training (Ko, Choi, Jei, Lee, Kim; CIKM 2021).

The worker is the paper's Algorithm 1 and the server its Algorithm 2; each bucket is treated
as a separate shard. Numbers in brackets are the paper's lines; ``docs/design/aladdin.md``
lists the paper's contradictions and how they are resolved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.server import GradientSum, ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import ServerLink
from aladdin_mpi.exchange.server_mailbox import ReceivedBucket
from aladdin_mpi.exchange.worker_mailbox import Model, ModelInbox
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.state import MergedState, Stateful, saved
from aladdin_mpi.flat.vectors import add, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.options.algorithms import ALADDIN, AladdinOptions, own
from aladdin_mpi.options.general import GeneralOptions
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


class AladdinWorker(TrainingWorker):
    """Algorithm 1: compute, update the local model, send, and never wait."""

    SAVED = TrainingWorker.SAVED | saved(outbox="link")

    def __init__(
        self, worker: Worker, optimizer: Optimizer, wire: GradientCodec, options: AladdinOptions
    ) -> None:
        super().__init__(worker, optimizer)
        self.sends_steps = options.momentum == "worker"
        self.updates_itself = options.self_update
        self.divides = options.normalize != "none"
        steps = options.lookahead
        inbox = AheadInbox(worker, wire, optimizer, steps) if steps else None
        self.link = ServerLink(worker, wire, inbox, options.ring)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        worker, x, link = self.worker, self.x, self.link
        link.open()
        for batch in worker.batches():
            g = link.outbox.begin(batch.start)
            # [3] and, bucket by bucket, [5]
            worker.gradient(g, self._send(g), link.outbox.idle_until)
            if self.updates_itself and not self.sends_steps:
                unused = worker.unused(slice(0, g.numel()))
                self.optimizer.step(x, g, worker.lr, unused)  # [4]
            link.outbox.end()
            link.inbox.blend_into(x)  # [6, 7]
        link.close()

    def _send(self, g: Tensor) -> Callable[[Bucket], None]:
        is_real = not g.is_meta

        def on_bucket(bucket: Bucket) -> None:
            if self.sends_steps and is_real:
                # [4] at once, while the bucket is cached: backward does not need these
                # parameters after their gradients are complete.
                part, mine, x = bucket.part, bucket.of(g), bucket.of(self.x)
                unused = self.worker.unused(part)
                if self.updates_itself:
                    self.optimizer.correct_and_descend(part, mine, x, self.worker.lr, unused)
                else:
                    self.optimizer.correct(part, mine, x, unused=unused)
            self.link.outbox.put(bucket)

        return on_bucket

    def counts(self) -> dict[str, int]:
        """Return the numbers of gradients computed and coalesced so far."""
        return {**super().counts(), "coalesced": self.link.outbox.coalesced}


class AheadInbox(ModelInbox):
    """Inbox that extrapolates models by the worker's own momentum before blending them in.

    ``x <- (1 - alpha) x + alpha (x~ - steps lr v)``: the newest steps of other workers, which
    x~ lacks, are assumed to resemble the worker's own. Predicting weights from velocity and
    age follows Chen, Yang and Cheng (2018, SpecTrain) and, for asynchronous workers with their
    own momenta, Hakimi et al. (2019, DANA).

    Args:
        worker: the worker that receives the models.
        codec: codec of models.
        optimizer: the worker's optimizer; must have momentum.
        steps: number of the worker's steps to extrapolate by.
    """

    def __init__(
        self, worker: Worker, codec: GradientCodec, optimizer: Optimizer, steps: float
    ) -> None:
        super().__init__(worker.transport, worker.layout, codec)
        self._worker = worker
        assert isinstance(optimizer, MomentumSGD)
        self._velocity = optimizer.velocity
        self._steps = steps

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Blend in one bucket."""
        super().put(parameters, model, values)
        assert self._velocity is not None
        moved = model.alpha * self._steps * self._worker.lr
        add(model.bucket.of(parameters), model.bucket.of(self._velocity), alpha=-moved)


class _Shard(Stateful):
    """A bucket's ``g~`` (``sum``), ``c~`` (``counted``) and every worker's ``c_i`` (``c``).

    ``c~`` differs from the number of gradients in ``g~`` if one is dropped. The other
    attributes are totals for alpha and the counters.
    """

    SAVED = saved(sum="sum.saved", count="sum.count") | saved(
        "counted", "c", "total", "total_at_send", "applied", "dropped"
    )

    def __init__(self, bucket: Bucket, largest: int, workers: int, like: Tensor) -> None:
        self.bucket = bucket
        self.sum = GradientSum(bucket.numel, largest, like)
        self.counted = 0
        self.c = [0] * workers
        self.total = 0
        self.total_at_send = [0] * workers
        self.applied = 0
        self.dropped = 0

    def take_over(self, start: int, stop: int, state: Mapping[str, Any]) -> None:
        """Copy the sum and counters that a previous shard of ``[start, stop)`` has for this one."""
        bucket = self.bucket
        first, last = max(bucket.start, start), min(bucket.stop, stop)
        if first >= last:
            return
        self.dropped = max(self.dropped, state["dropped"])
        self.counted = max(self.counted, state["counted"])
        if state["sum"] is None:
            return
        if self.sum.is_empty:
            self.sum.saved = self.sum.values.new_zeros(bucket.numel)
        mine = self.sum.values[first - bucket.start : last - bucket.start]
        copy(mine, state["sum"][first - start : last - start])
        self.sum.count = max(self.sum.count, state["count"])


class AladdinServer(ServerAlgorithm):
    """Algorithm 2: accumulate, update lazily, and send a worker the model when it is due."""

    SAVED = saved("server", "shards", "optimizer")

    def __init__(
        self, server: ParameterServer, optimizer: Optimizer, options: AladdinOptions
    ) -> None:
        super().__init__(server, optimizer if options.momentum == "split" else None)
        self.options = options
        self.shards = {
            bucket.index: _Shard(bucket, server.layout.largest, self.n, server.values[bucket.index])
            for bucket in server.buckets
        }

    def run(self) -> None:
        """Serve until every worker has ended the segment."""
        for arrival in self.server.gradients(look=False):  # [3]
            shard = self.shards[arrival.bucket.index]
            worker = arrival.worker
            shard.total += arrival.count
            shard.counted += arrival.count  # [4]
            shard.c[worker] += arrival.count  # [4]
            due = shard.c[worker] >= self.options.pi  # [5, 7]
            self._accumulate(shard, arrival, due)  # [6]
            if due:
                alpha = self._alpha(shard, worker)  # [9]
                self._update(shard)  # [8, 11]
                self.server.send_model(worker, arrival.bucket, alpha)  # [10]
                shard.counted = shard.c[worker] = 0  # [11]
                shard.total_at_send[worker] = shard.total
            elif not self.options.lazy:
                self._update(shard)

    def _accumulate(self, shard: _Shard, arrival: ReceivedBucket, due: bool) -> None:
        if due and self.options.trigger == "drop":
            # As printed in the paper: the gradient is counted but never added.
            shard.dropped += arrival.count
            return
        if not shard.sum.add(arrival):
            self.server.report_refused(arrival)

    def _update(self, shard: _Shard) -> None:
        """Global update: ``x~ <- x~ - lr g~ / norm``, then ``g~ <- 0``."""
        count = shard.counted if self.options.lazy else shard.sum.count
        norms = {"count": count, "workers": self.server.divisor, "none": 1}
        if shard.sum.count == 0:
            return
        step = shard.sum.values
        x = self.server.values[shard.bucket.index]
        if self.optimizer is not None:
            step.div_(norms[self.options.normalize])
            unused = self.server.unused_by_all(shard.bucket, step)
            self.optimizer.correct(shard.bucket.part, step, x, unused=unused)
            add(x, step, alpha=-self.server.lr)
        else:
            add(x, step, alpha=-self.server.lr / norms[self.options.normalize])
        shard.applied += shard.sum.count
        shard.sum.clear()

    def _alpha(self, shard: _Shard, worker: int) -> float:
        """Return the weight with which a worker blends in the global model."""
        rule = self.options.alpha
        if rule == "theory":
            return 1 - 1 / sqrt(self.server.surviving_workers * self.options.pi)
        if rule == "since-last":
            return 1 - 1 / sqrt(shard.total - shard.total_at_send[worker])
        if rule == "literal":
            return 1 - 1 / sqrt(shard.counted)
        return float(rule)

    def complete(self) -> None:
        """Apply gradients that no worker has triggered by the end of the run."""
        for shard in self.shards.values():
            self._update(shard)

    def counts(self) -> dict[str, int]:
        """Return the gradients applied and dropped so far, which must be equal on all shards."""
        totals = {index: shard.applied + shard.dropped for index, shard in self.shards.items()}
        dropped = max((shard.dropped for shard in self.shards.values()), default=0)
        return self.server.books(totals, dropped)

    def totals_in(self, state: Mapping[str, Any]) -> dict[int, int]:
        """Return the total of gradients for each bucket in a server's state."""
        return {index: shard["total"] for index, shard in state["shards"].items()}

    def merged(
        self, states: Sequence[dict[str, Any] | None], layout: Layout
    ) -> dict[str, Any] | None:
        """Merge the servers' states, with each shard and the range of values that it covers."""
        merged = super().merged(states, layout)
        if merged is not None:
            shards = [item for s in states if s is not None for item in s["shards"].items()]
            buckets = layout.buckets
            merged["shards"] = [
                {"start": buckets[i].start, "stop": buckets[i].stop, "state": shard}
                for i, shard in shards
            ]
        return merged

    def resize(self, merged: MergedState) -> None:
        """Restore the merged state with sums not applied yet; all workers have just got a model."""
        super().resize(merged)
        for shard in self.shards.values():
            shard.total = merged.server["applied"]
            shard.total_at_send = [shard.total] * self.n
            for each in merged.server.get("shards", ()) if merged.keeps_sums else ():
                shard.take_over(**each)
            shard.applied = shard.total - shard.dropped - shard.sum.count


def _check_optimizer(optimizer: Optimizer, run: GeneralOptions) -> None:
    """Reject look-ahead, which requires the momentum of the built-in SGD."""
    steps = own(run, AladdinOptions).lookahead
    if steps:
        raise UserError(
            "--aladdin-lookahead requires the built-in SGD, along whose momentum workers look "
            f"ahead; this run uses another optimizer ({optimizer.name}). Leave "
            "--aladdin-lookahead out."
        )


register(
    ALADDIN,
    worker=lambda worker, optimizer, wire, run: AladdinWorker(
        worker, optimizer, wire, own(run, AladdinOptions)
    ),
    server=lambda server, optimizer, run: AladdinServer(
        server, optimizer, own(run, AladdinOptions)
    ),
    check_optimizer=_check_optimizer,
)
