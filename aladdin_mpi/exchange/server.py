"""What an algorithm's server stands on: gradients in their order of arrival, models sent out.

Nothing here waits for one particular worker: receives are always posted for each,
messages are taken as they come, and a worker that is slow to take a model holds up
nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.control.refusals import Reason, Refusal, report
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.exchange.server_mailbox import (
    TAKEN,
    GradientReceiver,
    Header,
    Kind,
    ModelSender,
    NotesThen,
    ReceivedBucket,
    is_damaged,
)
from aladdin_mpi.flat.layout import Bucket, Layout
from aladdin_mpi.flat.replica import Projections
from aladdin_mpi.flat.state import FIRST, LARGEST, SMALLEST, MergedState, Stateful, merge, saved
from aladdin_mpi.flat.unused import Unused, UnusedMarks
from aladdin_mpi.flat.vectors import add_if_finite, copy, cut, full, is_finite
from aladdin_mpi.optimizers.sgd import divisor, unscaled
from aladdin_mpi.transport.base import Transport, charge_memory, survivors_from
from aladdin_mpi.worker.role import COMPUTED


class GradientSum:
    """``g~`` and ``c~``: a running sum and the number of gradients in it.

    The first gradient after :meth:`clear` is not added to zeros but kept where it
    was received, which saves three passes over memory in each round. To the others the
    sum is added, where they were received, and that is the sum from then on.
    """

    def __init__(self, numel: int, largest: int, like: Tensor) -> None:
        self._storage = torch.zeros(largest, dtype=full(like.dtype), device=like.device)
        self._numel = numel
        self.count = 0

    @property
    def values(self) -> Tensor:
        """The sum; meaningless while ``count`` is 0."""
        return cut(self._storage, 0, self._numel)

    @property
    def saved(self) -> Tensor | None:
        """The sum for a checkpoint; None if there is none."""
        return self.values if self.count else None

    @saved.setter
    def saved(self, values: Tensor | None) -> None:
        if values is not None:
            self.values.copy_(values)

    def add(self, arrival: ReceivedBucket) -> bool:
        """Add an arrived bucket; False: it is refused, as the sum would not be finite.

        It counts in either case: zeros stand in for what is refused.
        """
        refused = arrival.refused
        if self._storage.is_meta:
            pass
        elif self.count and self._is_kept(arrival):
            self._add_to_message(arrival)
        else:
            if not arrival.is_finite:
                arrival.refuse()
            self._add_message(arrival)
        self.count += arrival.count
        return refused or not arrival.refused

    def _add_to_message(self, arrival: ReceivedBucket) -> None:
        """Let the message's memory hold the sum; if that fails, the old one is still whole."""
        if arrival.refused:
            return
        if add_if_finite(arrival.values, self.values):
            self._storage = arrival.exchange(self._storage)
        else:
            arrival.refuse()

    def _add_message(self, arrival: ReceivedBucket) -> None:
        if self.count:
            arrival.add_to(self.values)
        elif self._is_kept(arrival):
            self._storage = arrival.exchange(self._storage)
        elif arrival.is_dense:
            self.values.copy_(arrival.values)
        else:
            self.values.zero_()
            arrival.add_to(self.values)

    def _is_kept(self, arrival: ReceivedBucket) -> bool:
        """Whether the memory that it was received in can hold the sum."""
        return arrival.is_dense and arrival.storage.dtype == self._storage.dtype

    def clear(self) -> None:
        """Start a new sum."""
        self.count = 0


class ParameterServer(Stateful):
    """One server: its buckets of the global model, and its talk with the workers.

    Args:
        parameters: the whole initial model; the server copies its own buckets.
        schedule: learning rate as a function of the samples drawn by all workers.
        notes: most numbers that come with a gradient.
        sizes: numbers of values of the parameters, in flat order; without them all are stepped.
        projections: applied to what gradients have changed, before it leaves.
        lr_scale: what the learning rate is multiplied by for a number of workers.
        arriving: what arriving messages are read by, if not by ``codec``.
    """

    SAVED = (
        saved("values")
        | saved("samples", "received", merge=LARGEST)
        | saved("staleness", merge=FIRST)
        | saved(seen="_seen", partial="partial")
        | saved("from_failed", merge=SMALLEST)
        | saved(given="given_by_survivors")
    )

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        parameters: Tensor,
        codec: GradientCodec,
        schedule: Callable[[int], float],
        notes: int = 0,
        sizes: Sequence[int] = (),
        projections: Projections | None = None,
        lr_scale: Callable[[int], float] = unscaled,
        arriving: GradientCodec | None = None,
    ) -> None:
        self._lr_scale = lr_scale
        self.transport = transport
        self.layout = layout
        self.codec = codec
        self.arriving = arriving or codec
        self.buckets = layout.owned_by(transport.rank)
        self.worker_count = transport.size - layout.servers
        self.values = {b.index: parameters[b.part].clone() for b in self.buckets}
        self.samples = 0
        self.received = 0
        self.staleness = 0.0
        self.partial = {b.index: 0 for b in self.buckets}
        """Gradients of a bucket whose worker failed before all buckets had come."""
        self.given = [0] * self.worker_count
        """Gradients taken as a whole from every worker, up to the last segment."""
        self.from_former = 0
        """Gradients taken as a whole from workers that had failed when a checkpoint was written."""
        self.taken = self._nothing_taken()
        """Gradients taken in this segment, for every worker and bucket."""
        self._on_update: list[Callable[[Bucket], None]] = []
        self._is_open = False
        self._seen = [0] * self.worker_count
        self._schedule = schedule
        self._marks = UnusedMarks(sizes, layout)
        self._projections = projections
        self._projected = {i: x.clone() for i, x in self.values.items()} if projections else {}
        """Each bucket after its last projection; at first the initial model."""
        self._sender = ModelSender(transport, codec, layout.largest)
        transport.on_message(Tag.WHOLE, 8, self._sender.lost)
        self._intakes = [
            GradientReceiver(
                transport, layout.servers + w, self.buckets, layout.largest, codec, notes
            )
            for w in range(self.worker_count)
        ]

    @property
    def lr(self) -> float:
        """Learning rate at the newest sample that a gradient was computed from."""
        return self._schedule(self.samples)

    def unused_by_all(self, bucket: Bucket, total: Tensor) -> Unused:
        """Return the parts of a bucket of a gradient, or a sum, that no worker has one for."""
        return self._marks.read(bucket, total)

    def on_update(self, action: Callable[[Bucket], None]) -> None:
        """Call ``action`` with every bucket that a gradient has come for, when that is used."""
        self._on_update.append(action)

    def _nothing_taken(self) -> list[dict[int, int]]:
        return [{b.index: 0 for b in self.buckets} for _ in range(self.worker_count)]

    def gradients(
        self, on_end: Callable[[int], None] | None = None, look: bool = True
    ) -> Iterator[ReceivedBucket]:
        """Buckets of gradients in their order of arrival, until every worker has ended.

        What is not finite is refused.

        Args:
            on_end: called with each worker that ends, after its last gradient, or fails.
            look: whether to look for values that are not finite; else whoever uses them
                does, and says so by :meth:`tell_refused`.
        """
        self._sender.open()
        self.taken = self._nothing_taken()
        self._is_open = True
        first, failed = self.layout.servers, self.transport.failed
        open_workers = [w for w in range(self.worker_count) if first + w not in failed]
        for worker in open_workers:
            self._intakes[worker].open()
        heads = self.transport.wait_set()
        for worker in open_workers:
            heads.put(worker, self._intakes[worker].head)
        for worker in set(range(self.worker_count)).difference(open_workers):
            if on_end is not None:
                on_end(worker)
        still_open = set(open_workers)
        while still_open:
            self._sender.keep_up(heads)
            try:
                worker = heads.wait()
                if worker not in still_open:
                    continue  # a model has left, and the next one can go
                yield from self._take(worker, look)
            except PeerFailedError as failure:
                worker = failure.rank - first
                if worker not in still_open:
                    continue  # it had ended: only a model to it was still awaited
                self._lose(worker)
            if not self._intakes[worker].ended:
                heads.put(worker, self._intakes[worker].head)
                continue
            still_open.remove(worker)
            heads.drop(worker)
            self._intakes[worker].close()
            if on_end is not None:
                on_end(worker)
            self._sender.end(self.layout.servers + worker)
        self.given = [self.given[w] + self.whole_from(w) for w in range(self.worker_count)]
        self._is_open = False
        self._sender.flush(heads)

    def _take(self, worker: int, look: bool) -> Iterator[ReceivedBucket]:
        intake = self._intakes[worker]
        arrival = intake.take(worker)
        if arrival is None:
            self._count(worker, intake.header)
        else:
            besides = self.arriving.besides(arrival.bucket, arrival.nbytes)
            charge_memory(self.transport, TAKEN * arrival.nbytes + besides)
            self._sender.note(arrival)
            self.taken[worker][arrival.bucket.index] += arrival.count
            self._look(arrival, look)
            yield arrival
            intake.give_back(arrival)
            self._project(arrival.bucket)
            for action in self._on_update:
                action(arrival.bucket)

    def _project(self, bucket: Bucket) -> None:
        """Apply the projections, if the bucket has been stepped since."""
        if self._projections is None or not self._projections:
            return
        values, projected = self.values[bucket.index], self._projected[bucket.index]
        if not torch.equal(values, projected):
            self._projections.apply_to_bucket(bucket, values)
            projected.copy_(values)

    def _lose(self, worker: int) -> None:
        """Close the books on a worker that has failed."""
        self._intakes[worker].ended = True
        whole = self.whole_from(worker)
        for index, taken in self.taken[worker].items():
            self.partial[index] += taken - whole

    @property
    def surviving_workers(self) -> int:
        """The number of workers that are not known to have failed; at least 1."""
        if not self.transport.failed:
            return self.worker_count
        return max(1, survivors_from(self.transport, self.layout.servers))

    @property
    def divisor(self) -> float:
        """What gradients are divided by: see :func:`~aladdin_mpi.optimizers.sgd.divisor`."""
        return divisor(self.worker_count, self.surviving_workers, self._lr_scale)

    def has_failed(self, worker: int) -> bool:
        """Whether a worker is known to have failed."""
        return self.layout.servers + worker in self.transport.failed

    def whole_from(self, worker: int) -> int:
        """Gradients of which all buckets have been taken from a worker in this segment."""
        return min(self.taken[worker].values(), default=0)

    def not_given_by(self, worker: int) -> int:
        """Of these, those that do not count as given yet."""
        return self.whole_from(worker) if self._is_open else 0

    @property
    def from_failed(self) -> int:
        """Gradients taken as a whole from workers that have failed."""
        return self.from_former + sum(
            given for worker, given in enumerate(self.given) if self.has_failed(worker)
        )

    @from_failed.setter
    def from_failed(self, gradients: int) -> None:
        self.from_former = gradients

    @property
    def given_by_survivors(self) -> list[int]:
        """``given``, with 0 for workers that have failed."""
        return [0 if self.has_failed(worker) else n for worker, n in enumerate(self.given)]

    @given_by_survivors.setter
    def given_by_survivors(self, given: list[int]) -> None:
        self.given = given

    def books(self, totals: dict[int, int], dropped: int = 0) -> dict[str, int]:
        """The accounts of a server whose buckets have seen ``totals`` gradients each.

        Raises:
            AssertionError: they differ by more than what failed workers sent in part.
        """
        alike = {totals[index] - partial for index, partial in self.partial.items()}
        if len(alike) > 1:
            raise AssertionError(f"gradients applied differ between buckets: {sorted(alike)}")
        total = alike.pop() if alike else 0
        accounts = {"applied": total - dropped, "dropped": dropped}
        return accounts | ({"from_failed": self.from_failed} if self.from_failed else {})

    def _look(self, arrival: ReceivedBucket, thoroughly: bool) -> None:
        """Refuse what is damaged or, with ``thoroughly``, not finite: it would spoil the model.

        That costs one reading of the values, which the cache holds then for the addition that
        follows.
        """
        if arrival.storage.is_meta:
            return
        message = arrival.storage[: arrival.length]
        if is_damaged(message):
            arrival.refuse()  # those who saw it arrive have told of it
        elif thoroughly and not is_finite(self.arriving.numbers(arrival.bucket, message)):
            arrival.refuse()
            self.tell_refused(arrival)

    def tell_refused(self, arrival: ReceivedBucket) -> None:
        """Tell rank 0 of a gradient that is refused because it is not finite."""
        rank = self.layout.servers + arrival.worker
        where = rank, arrival.bucket.index, self._intakes[arrival.worker].header.samples
        report(self.transport, Refusal(Reason.ARRIVED, *where))

    def _count(self, worker: int, header: Header) -> None:
        if header.kind == Kind.BUCKETS:
            self.samples = max(self.samples, header.samples)
            stale = self.received - self._seen[worker]
            self.staleness += 0.02 * (stale - self.staleness)
            self.received += header.gradients

    def model_bits(self, worker: int, bits: int) -> None:
        """Send a worker's models in ``bits`` a value from now on, where the wire has a choice."""
        self._sender.use(self.layout.servers + worker, bits)

    def send_model(
        self,
        worker: int,
        bucket: Bucket,
        alpha: float = 1.0,
        notes: NotesThen = (),
        exact: bool = False,
    ) -> None:
        """Send the bucket's present values to a worker, which blends them in by ``alpha``.

        If it has to wait for an earlier one to leave, newer values may be sent instead,
        unless ``exact``. ``notes`` go with them; a function is asked when they leave.
        """
        self._project(bucket)
        if bucket is self.buckets[0]:
            self._seen[worker] = self.received
        values = self.values[bucket.index]
        self._sender.send(self.layout.servers + worker, bucket, values, alpha, notes, exact)

    @classmethod
    def merged(cls, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The counters of several servers as one server's."""
        merged: dict[str, Any] | None = None
        for count, state in enumerate(states, start=1):
            merged = merge(cls.SAVED, merged, state, count)
        assert merged is not None
        return {name: merged[name] for name in ("samples", "received", "staleness", "from_failed")}

    @staticmethod
    def from_survivors(state: dict[str, Any], totals: dict[int, int]) -> int:
        """The gradients of ``totals`` that a server has taken as a whole from surviving workers."""
        whole = min(total - state["partial"][index] for index, total in totals.items())
        return int(whole - state["from_failed"])

    def resize(self, merged: MergedState) -> None:
        """Take this server's part of the global model, and the counters of another group."""
        for bucket in self.buckets:
            copy(self.values[bucket.index], merged.model[bucket.part])
        joined, n = merged.server, self.worker_count
        self.samples, self.received = joined["samples"], joined["received"]
        self.staleness, self.from_former = joined["staleness"], joined["from_failed"]
        self._seen = [self.received] * n
        self.given = [int(merged.carried(COMPUTED, worker, n)) for worker in range(n)]
