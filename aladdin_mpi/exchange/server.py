"""Server runtime: supplies gradients in order of arrival to an algorithm, and sends models.

Nothing here waits for one particular worker: receives are always posted for each worker,
messages are handled in order of arrival, and a worker that receives slowly does not delay
the others.
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

    The first gradient after :meth:`clear` is kept in its receive buffer instead of being added to
    zeros, which saves three memory passes in each round. The sum is then added to each further
    gradient in that gradient's receive buffer, which becomes the sum.
    """

    def __init__(self, numel: int, largest: int, like: Tensor) -> None:
        self._storage = torch.zeros(largest, dtype=full(like.dtype), device=like.device)
        self._numel = numel
        self.count = 0
        self.is_empty = True
        """Whether nothing has been added. A message without gradients, which sends what a codec had
        held back, adds 0 to ``count``."""

    @property
    def values(self) -> Tensor:
        """The sum; meaningless while :attr:`is_empty`."""
        return cut(self._storage, 0, self._numel)

    @property
    def saved(self) -> Tensor | None:
        """The sum for a checkpoint; None if it is empty."""
        return None if self.is_empty else self.values

    @saved.setter
    def saved(self, values: Tensor | None) -> None:
        self.is_empty = values is None
        if values is not None:
            self.values.copy_(values)

    def add(self, arrival: ReceivedBucket) -> bool:
        """Add an arrived bucket; return False if it is refused, as the sum would not be finite.

        It is counted in either case: zeros replace a refused bucket.
        """
        refused = arrival.refused
        if self._storage.is_meta:
            pass
        elif not self.is_empty and self._is_kept(arrival):
            self._add_to_message(arrival)
        else:
            if not arrival.is_finite:
                arrival.refuse()
            self._add_message(arrival)
        self.is_empty = False
        self.count += arrival.count
        return refused or not arrival.refused

    def _add_to_message(self, arrival: ReceivedBucket) -> None:
        """Add the sum to the message's buffer; if the result is not finite, keep the old sum."""
        if arrival.refused:
            return
        if add_if_finite(arrival.values, self.values):
            self._storage = arrival.exchange(self._storage)
        else:
            arrival.refuse()

    def _add_message(self, arrival: ReceivedBucket) -> None:
        if not self.is_empty:
            arrival.add_to(self.values)
        elif self._is_kept(arrival):
            self._storage = arrival.exchange(self._storage)
        elif arrival.is_dense:
            self.values.copy_(arrival.values)
        else:
            self.values.zero_()
            arrival.add_to(self.values)

    def _is_kept(self, arrival: ReceivedBucket) -> bool:
        """Return whether the receive buffer can hold the sum."""
        return arrival.is_dense and arrival.storage.dtype == self._storage.dtype

    def clear(self) -> None:
        """Start a new sum."""
        self.count = 0
        self.is_empty = True


class ParameterServer(Stateful):
    """One server: its buckets of the global model, and its communication with the workers.

    Args:
        parameters: the whole initial model; the server copies its own buckets.
        schedule: learning rate as a function of the samples drawn by all workers.
        notes: largest number of notes with a gradient.
        sizes: lengths of the parameters, in flat order; without them all count as used.
        projections: applied to changed buckets before they are sent.
        lr_scale: factor of the learning rate as a function of the number of workers.
        arriving: codec that reads messages, if not ``codec``.
        whole: transport among all ranks, if it differs.
        senders: the workers' ranks in ``whole``; empty: those after the servers.
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
        whole: Transport | None = None,
        senders: Sequence[int] = (),
    ) -> None:
        self._lr_scale = lr_scale
        self.transport = transport
        self._whole = whole or transport
        self._senders = senders or range(layout.servers, transport.size)
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
        """Gradients of each bucket from workers that failed before all buckets had arrived."""
        self.given = [0] * self.worker_count
        """Complete gradients from every worker, up to the last segment."""
        self.from_former = 0
        """Complete gradients from workers that had failed before a checkpoint was written."""
        self.taken = self._nothing_taken()
        """Gradients taken in this segment, for every worker and bucket."""
        self._on_update: list[Callable[[Bucket], None]] = []
        self.due: Callable[[], float | None] = lambda: None
        """Called before each wait for a gradient: does what is due, and returns the seconds until
        more will be, or None."""
        self._is_open = False
        self._seen = [0] * self.worker_count
        self._schedule = schedule
        self._marks = UnusedMarks(sizes, layout)
        self._projections = projections
        self._projected = {i: x.clone() for i, x in self.values.items()} if projections else {}
        """Each bucket after its last projection; initially the initial model."""
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
        """Return the parts of a bucket of a gradient, or a sum, that no worker has used."""
        return self._marks.read(bucket, total)

    def on_update(self, action: Callable[[Bucket], None]) -> None:
        """Call ``action`` with a bucket after a gradient for it has been processed."""
        self._on_update.append(action)

    def _nothing_taken(self) -> list[dict[int, int]]:
        return [{b.index: 0 for b in self.buckets} for _ in range(self.worker_count)]

    def gradients(
        self,
        on_end: Callable[[int], None] | None = None,
        look: bool = True,
        at_end: Callable[[], None] | None = None,
    ) -> Iterator[ReceivedBucket]:
        """Yield buckets of gradients in order of arrival, until every worker has ended.

        Buckets that are not finite are refused.

        Args:
            on_end: called with each worker that ends, after its last gradient, or fails.
            look: whether to check for values that are not finite; otherwise the caller checks
                and reports them with :meth:`report_refused`.
            at_end: called once after every worker has ended; models that it sends still arrive
                in this segment. Without it a worker's segment ends as soon as it does.
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
            patience = self.due()
            self._sender.keep_up(heads)
            try:
                name = heads.wait(patience)
                if name is None or name not in still_open:
                    continue  # something is due, or a model was sent, so the next one can be
                worker = name
                yield from self._take(worker, look)
            except PeerFailedError as failure:
                worker = failure.rank - first
                if worker not in still_open:
                    continue  # it had ended; only a model to it was in flight
                self._lose(worker)
            if not self._intakes[worker].ended:
                heads.put(worker, self._intakes[worker].head)
                continue
            still_open.remove(worker)
            heads.drop(worker)
            self._intakes[worker].close()
            if on_end is not None:
                on_end(worker)
            if at_end is None:
                self._sender.end(self.layout.servers + worker)
        if at_end is not None:
            at_end()
            for worker in open_workers:
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
            extra = self.arriving.extra_bytes(arrival.bucket, arrival.nbytes)
            charge_memory(self.transport, TAKEN * arrival.nbytes + extra)
            self._sender.note(arrival)
            self.taken[worker][arrival.bucket.index] += arrival.count
            self._look(arrival, look)
            yield arrival
            intake.give_back(arrival)
            self._project(arrival.bucket)
            for action in self._on_update:
                action(arrival.bucket)

    def _project(self, bucket: Bucket) -> None:
        """Apply the projections if the bucket has been updated since the last time."""
        if self._projections is None or not self._projections:
            return
        values, projected = self.values[bucket.index], self._projected[bucket.index]
        if not torch.equal(values, projected):
            self._projections.apply_to_bucket(bucket, values)
            projected.copy_(values)

    def _lose(self, worker: int) -> None:
        """Count the incomplete gradients of a worker that has failed."""
        self._intakes[worker].ended = True
        whole = self.whole_from(worker)
        for index, taken in self.taken[worker].items():
            self.partial[index] += taken - whole

    @property
    def surviving_workers(self) -> int:
        """Number of workers that are not known to have failed; at least 1."""
        if not self.transport.failed:
            return self.worker_count
        return max(1, survivors_from(self.transport, self.layout.servers))

    @property
    def divisor(self) -> float:
        """Divisor of gradients, see :func:`~aladdin_mpi.optimizers.sgd.divisor`."""
        return divisor(self.worker_count, self.surviving_workers, self._lr_scale)

    def has_failed(self, worker: int) -> bool:
        """Return whether a worker is known to have failed."""
        return self.layout.servers + worker in self.transport.failed

    def whole_from(self, worker: int) -> int:
        """Return the number of complete gradients taken from a worker in this segment."""
        return min(self.taken[worker].values(), default=0)

    def not_given_by(self, worker: int) -> int:
        """Return the number of these that ``given`` does not include yet."""
        return self.whole_from(worker) if self._is_open else 0

    @property
    def from_failed(self) -> int:
        """Number of complete gradients taken from workers that have failed."""
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
        """Return the counters of a server whose buckets have received ``totals`` gradients each.

        Raises:
            AssertionError: they differ by more than the incomplete gradients of failed workers.
        """
        alike = {totals[index] - partial for index, partial in self.partial.items()}
        if len(alike) > 1:
            raise AssertionError(f"gradients applied differ between buckets: {sorted(alike)}")
        total = alike.pop() if alike else 0
        accounts = {"applied": total - dropped, "dropped": dropped}
        return accounts | ({"from_failed": self.from_failed} if self.from_failed else {})

    def _look(self, arrival: ReceivedBucket, thoroughly: bool) -> None:
        """Refuse a message that is damaged or, with ``thoroughly``, not finite.

        Either would corrupt the model. The check reads the values once, so that they are cached for
        the addition that follows.
        """
        if arrival.storage.is_meta:
            return
        message = arrival.storage[: arrival.length]
        if is_damaged(message):
            arrival.refuse()  # the transport has reported the damage
        elif thoroughly and not is_finite(self.arriving.numbers(arrival.bucket, message)):
            arrival.refuse()
            self.report_refused(arrival)

    def report_refused(self, arrival: ReceivedBucket) -> None:
        """Report to rank 0 a gradient that is refused because it is not finite."""
        rank = self._senders[arrival.worker]
        where = rank, arrival.bucket.index, self._intakes[arrival.worker].header.samples
        report(self._whole, Refusal(Reason.ARRIVED, *where))

    def _count(self, worker: int, header: Header) -> None:
        if header.kind == Kind.BUCKETS:
            self.samples = max(self.samples, header.samples)
            stale = self.received - self._seen[worker]
            self.staleness += 0.02 * (stale - self.staleness)
            self.received += header.gradients

    def model_level(self, worker: int, level: float) -> None:
        """Send further models to a worker at a level, if there is a choice: bits, or a share."""
        self._sender.use(self.layout.servers + worker, level)

    def workers_have_model(self) -> None:
        """Record that every worker has the current model; further ones are sent as differences."""
        for worker in range(self.worker_count):
            for bucket in self.buckets:
                rank = self.layout.servers + worker
                self._sender.adopt(rank, bucket, self.values[bucket.index])

    def send_whole(self, worker: int, bucket: Bucket, notes: NotesThen = ()) -> None:
        """Send a worker the bucket's values themselves, not their difference."""
        self._sender.forget(self.layout.servers + worker, bucket)
        self.send_model(worker, bucket, notes=notes)

    def send_model(
        self,
        worker: int,
        bucket: Bucket,
        alpha: float = 1.0,
        notes: NotesThen = (),
        exact: bool = False,
    ) -> None:
        """Send the bucket's current values to a worker, which blends them in by ``alpha``.

        If an earlier message has not been sent, newer values may be sent later instead, unless
        ``exact``. ``notes`` are sent with them; a function is called at the time of sending.
        """
        self._project(bucket)
        if bucket is self.buckets[0]:
            self._seen[worker] = self.received
        values = self.values[bucket.index]
        self._sender.send(self.layout.servers + worker, bucket, values, alpha, notes, exact)

    @classmethod
    def merged(cls, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Merge the counters of several servers."""
        merged: dict[str, Any] | None = None
        for count, state in enumerate(states, start=1):
            merged = merge(cls.SAVED, merged, state, count)
        assert merged is not None
        return {name: merged[name] for name in ("samples", "received", "staleness", "from_failed")}

    @staticmethod
    def from_survivors(state: dict[str, Any], totals: dict[int, int]) -> int:
        """Return the number of complete gradients in ``totals`` from surviving workers."""
        whole = min(total - state["partial"][index] for index, total in totals.items())
        return int(whole - state["from_failed"])

    def resize(self, merged: MergedState) -> None:
        """Restore this server's part of the global model, and the merged counters."""
        for bucket in self.buckets:
            copy(self.values[bucket.index], merged.model[bucket.part])
        joined, n = merged.server, self.worker_count
        self.samples, self.received = joined["samples"], joined["received"]
        self.staleness, self.from_former = joined["staleness"], joined["from_failed"]
        self._seen = [self.received] * n
        self.given = [int(merged.carried(COMPUTED, worker, n)) for worker in range(n)]
