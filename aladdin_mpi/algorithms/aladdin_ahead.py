"""ALADDIN that starts a step from the predicted global model, not from a past one.

As in ALADDIN (Ko et al., CIKM 2021) a worker never waits, except in the first rounds of a run, in
which the global momentum is not known yet, and no gradient is lost. In
addition, the worker computes each gradient at the global model predicted for the moment when
that gradient is added (:mod:`~aladdin_mpi.exchange.global_model`), and models are sent to
arrive just before they are read (:mod:`~aladdin_mpi.exchange.model_requests`).
``docs/design/aladdin.md`` derives both. Each bucket is treated as a separate model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.codec.quantised import QuantisedCodec, bits_of
from aladdin_mpi.exchange.global_model import MOST_ENCODED, MOST_VECTORS, GlobalModelPredictor
from aladdin_mpi.exchange.model_requests import (
    CompressionController,
    Level,
    ModelRequestScheduler,
    due_bucket,
    fine_layout,
)
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_link import ServerLink
from aladdin_mpi.exchange.server_mailbox import Notes, ReceivedBucket
from aladdin_mpi.exchange.worker_mailbox import Model, ModelInbox, Outbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedState, saved
from aladdin_mpi.flat.vectors import clear
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import ALADDIN_AHEAD, AladdinAheadOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

RARER = (2, 4, 8)
"""Values of pi to try if bandwidth does not allow a model after each gradient."""


class AheadWorker(TrainingWorker):
    """Compute, advance the predicted model, send the step, and never wait."""

    SAVED = TrainingWorker.SAVED | saved("track", "timing", "room", "coalesced", outbox="link")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: AladdinAheadOptions,
        bits: Sequence[int],
    ) -> None:
        super().__init__(worker, optimizer)
        self.wire = wire
        if isinstance(wire, QuantisedCodec):
            wire.residual.dtype = torch.bfloat16
        self.room = CompressionController(levels(bits, options.pi))
        layout = worker.layout
        weight, lookahead = _number(options.weight), _number(options.lookahead)
        share = _number(options.send)
        new_vector = worker.replica.new_vector
        keep = MOST_ENCODED if wire.holds else MOST_VECTORS
        outbox = Outbox(worker.transport, layout, wire, new_vector, options.ring, keep)
        self.track = GlobalModelPredictor(worker, optimizer, outbox, weight, lookahead)
        self.timing = ModelRequestScheduler(
            [len(layout.owned_by(s)) for s in range(layout.servers)], share
        )
        inbox = TrackInbox(worker, wire, self.track, self.timing)
        self.link = ServerLink(worker, wire, inbox, outbox=outbox)
        self.first = options.sync_rounds
        """Rounds at the start of the run in which workers wait for each other."""
        self.coalesced = 0

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        worker, link = self.worker, self.link
        self.track.open()
        self.timing.open()
        link.outbox.open()
        link.open()
        for batch in worker.batches():
            self._adapt()
            began = worker.transport.now()
            g = link.outbox.begin(batch.start, notes=self._notes)
            self.track.begin()
            worker.gradient(g, self._send(g), link.outbox.idle_until)
            link.outbox.end()
            link.inbox.blend_into(self.x)
            if self._is_first_round:
                self._await_round(began)
        self._adapt()
        link.close()

    @property
    def _is_first_round(self) -> bool:
        """Whether this is one of the first rounds, in which workers wait for each other."""
        if self.worker.computed > self.first:  # links may be slow
            return False
        survivors = self.worker.survivors
        return survivors > 1 and min(self.track.count) < self.first * survivors

    def _await_round(self, began: float) -> None:
        """Wait for the model of this round, at most as long as the step since ``began`` took.

        So the end of the samples, or a slow or failed worker, cannot stop the others.
        """
        self.worker.settle()  # the device's part of the step counts too
        track, now = self.track, self.worker.transport.now
        survivors = self.worker.survivors
        complete = (min(track.pending[-1].base) // survivors + 1) * survivors
        end = 2 * now() - began
        while min(track.count) < complete and (left := end - now()) > 0:
            if not self.link.inbox.wait(left):
                break
            self.link.inbox.blend_into(self.x)

    def _send(self, g: Tensor) -> Callable[[Bucket], None]:
        def on_bucket(bucket: Bucket) -> None:
            self.track.make_step(bucket, g, self.worker.lr)
            self.link.outbox.put(bucket)
            self.track.advance(bucket, g)

        return on_bucket

    def _notes(self, server: int) -> Notes:
        """Return the notes for a server: the requested models and the mean age of gradients."""
        f = self.timing.shares[server], self.timing.mean_share
        return (*f, *self.room.level, self.track.mean_age)

    def _adapt(self) -> None:
        """Adapt model requests and compression to the headroom and lateness of the last step."""
        if self.track.sent % self.room.level.pi or self._is_first_round:
            return  # no model was due
        late = self.timing.end_step(self.track.sent) if self.track.sent else 0.0
        coalesced = self.link.outbox.coalesced
        added, self.coalesced = coalesced - self.coalesced, coalesced
        measure = self.timing.mean_share - late - added
        self.wire.use(self.room.end_step(measure, self.track.mean_age).bits)

    def counts(self) -> dict[str, int]:
        """Return the numbers of gradients computed and coalesced so far."""
        return {**super().counts(), "coalesced": self.link.outbox.coalesced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        if self.link.outbox.newest is None:  # the velocity includes a step that is not known
            clear(self.track.velocity)
        self.wire.use(self.room.level.bits)

    def resize(self, merged: MergedState) -> None:
        """Restore the merged state; restart the prediction and the model requests."""
        super().resize(merged)
        self.coalesced = self.link.outbox.coalesced
        self.track.restart(merged.server["applied"])

    def join(self, common: dict[str, Any]) -> None:
        """Restart the prediction from the global model, which arrives next."""
        self.track.restart()


class TrackInbox(ModelInbox):
    """Inbox whose models become the base of the prediction instead of being blended in."""

    def __init__(
        self,
        worker: Worker,
        codec: GradientCodec,
        track: GlobalModelPredictor,
        timing: ModelRequestScheduler,
    ) -> None:
        # Two models, so that one that arrives too late to be read does not delay the next.
        super().__init__(worker.transport, worker.layout, codec, models=2)
        self._track = track
        self._timing = timing
        if self._differences is not None:
            track.store_models_of(self._differences)

    def note(self, model: Model) -> None:
        """Report the arrival to the request scheduler."""
        during = int(model.notes[-1])
        self._timing.note(model.bucket.server, model.bucket.index, during)
        if self._track.x.is_meta:  # the base class blends nothing in
            self.put(self._track.x, model, model.bucket.of(self._track.x))

    def prepare(self, bucket: Bucket) -> None:
        """Keep the values from which the prediction computes the velocity."""
        self._track.prepare(bucket)

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Rebase the prediction of one bucket on its model."""
        count, own, before, _ = map(int, model.notes)
        self._track.rebase(model.bucket, values, count, own, before)


class AheadServer(ServerAlgorithm):
    """Server that adds every step on arrival and sends models when workers request them."""

    SAVED = ServerAlgorithm.SAVED | saved("before", told="newest_notes")

    def __init__(self, server: ParameterServer, first: int) -> None:
        super().__init__(server)
        self.first = first
        """Rounds at the start of the run in which models are sent when a round is complete."""
        self.places = {bucket.index: place for place, bucket in enumerate(server.buckets)}
        self.before = {bucket.index: [0] * self.n for bucket in server.buckets}
        """Number of gradients that arrived before the newest of each worker."""
        self.open_workers: set[int] = set()
        """Workers that have not ended this segment, and can still receive models."""
        self.newest_notes: dict[int, Notes] = {}
        """The newest notes of each worker."""

    def run(self) -> None:
        """Apply ``x~ <- x~ - step / n``; send models once the requested share has arrived."""
        self.open_workers = set(range(self.n))
        for arrival in self.arrivals(on_end=self.open_workers.discard):
            index, worker = arrival.bucket.index, arrival.worker
            arrival.add_to(self.server.values[index], -1 / self.server.divisor)
            self.before[index][worker] = self.applied[index] - arrival.count
            self.newest_notes[worker] = arrival.notes
            if self.applied[index] <= self.first * self.server.surviving_workers:
                self._send_round(arrival)
                continue
            share, *_ = arrival.notes
            if self.places[index] == due_bucket(share, len(self.server.buckets)):
                self._send_models(arrival)

    def _send_round(self, arrival: ReceivedBucket) -> None:
        """Send a bucket to all workers if this arrival completes a round of it."""
        index, n = arrival.bucket.index, self.server.surviving_workers
        total = self.applied[index]
        if total // n == (total - arrival.count) // n:
            return
        for worker in sorted(self.open_workers):
            notes = partial(self._notes, index, worker, self.server.taken[worker][index])
            self.server.send_model(worker, arrival.bucket, notes=notes)

    def _send_models(self, arrival: ReceivedBucket) -> None:
        """Send the models of all buckets after every pi-th gradient of the worker."""
        worker = arrival.worker
        _, _, bits, pi, _ = arrival.notes
        during = self.server.taken[worker][arrival.bucket.index]
        if during // pi == (during - arrival.count) // pi:
            return
        self.server.model_level(worker, bits)
        for each in self.server.buckets:
            notes = partial(self._notes, each.index, worker, during)
            self.server.send_model(worker, each, notes=notes)

    def _notes(self, bucket: int, worker: int, during: int) -> Notes:
        """Return what :meth:`GlobalModelPredictor.rebase` and the scheduler need with a model."""
        own = self.server.taken[worker][bucket]
        return (self.applied[bucket], own, self.before[bucket][worker], during)

    def measures(self) -> dict[str, float]:
        """Return the means of the workers' newest notes."""
        if not self.newest_notes:
            return {}
        names = ("models_sent_at", "wire_bits", "pi", "age_rounds")
        _, *columns = zip(*self.newest_notes.values(), strict=True)
        return {name: mean(column) for name, column in zip(names, columns, strict=True)}

    def resize(self, merged: MergedState) -> None:
        """Restore the merged state; all workers have just got a model."""
        super().resize(merged)
        self.before = {index: [total] * self.n for index, total in self.applied.items()}


def levels(bits: Sequence[int], pi: int | str) -> tuple[Level, ...]:
    """Return levels from generous to thrifty: first fewer bits, then fewer models.

    Args:
        bits: bits that the wire may use, in decreasing order.
        pi: fixed value, or "auto".
    """
    if isinstance(pi, int):
        return tuple(Level(each, pi) for each in bits)
    fewer = (Level(bits[-1], each) for each in RARER)
    return (*(Level(each, 1) for each in bits), *fewer)


def _number(value: float | str) -> float | None:
    """Return the number, or None for "auto"."""
    return None if isinstance(value, str) else value


register(
    ALADDIN_AHEAD,
    worker=lambda worker, optimizer, wire, run: AheadWorker(
        worker, optimizer, wire, own(run, AladdinAheadOptions), bits_of(run.wire)
    ),
    server=lambda server, optimizer, run: AheadServer(
        server, own(run, AladdinAheadOptions).sync_rounds
    ),
    layout=fine_layout,
)
