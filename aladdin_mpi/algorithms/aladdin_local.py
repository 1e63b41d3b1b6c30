"""ALADDIN for links that cannot carry a gradient per step: no worker waits, no step is lost.

A worker trains with its own optimizer and never waits. After each step it sends the signs of the
largest part of its steps so far that are not sent yet, as much as its link carries during a step,
and the server answers with the largest differences of the global model from what the worker has.
With n workers, T(y) the encoding of y, r what is left to send, q a message, and p the server's
record of the worker's copy of the global model::

    worker   x <- x + u;  r <- r + u                  u: step of the worker's optimizer
             q <- T(r);  r <- r - q;  send q
    server   x~ <- x~ + q / n
             d <- T(x~ - p);  p <- p + d;  send d, and the newest own message in x~
    worker   x <- x + d - (its messages that d is the first to include)

So x is always p plus everything of the worker's own that p lacks. Two refinements: a share
``keep (1 - 1/n)`` of the newest included messages stays in x until the next ones are included,
since the other workers' steps of the same time are still under way; and the optimizer's first
moment is moved by ``mix`` towards the one whose steps are the global model's movement (see
:meth:`~aladdin_mpi.optimizers.base.Optimizer.mix`).

At the end of a segment everything left is sent exactly, and every worker gets the global model.
``docs/design/slow-links.md`` derives the rule.
"""

from __future__ import annotations

from functools import partial
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import GradientCodec
from aladdin_mpi.codec.sign_codec import SignCodec
from aladdin_mpi.errors import UserError
from aladdin_mpi.exchange.link_control import LinkControl
from aladdin_mpi.exchange.model_requests import fine_layout
from aladdin_mpi.exchange.own_steps import OwnSteps
from aladdin_mpi.exchange.server import ParameterServer
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_mailbox import Notes
from aladdin_mpi.exchange.worker_mailbox import Model, ModelInbox
from aladdin_mpi.flat.layout import Layout
from aladdin_mpi.flat.state import MergedState, saved
from aladdin_mpi.flat.vectors import add, copy
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import ALADDIN_LOCAL, AladdinLocalOptions, own
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker

RATES = 20
"""Steps whose largest learning rate bounds that of the global model's movement from below ..."""
LEAST_RATE = 1 / 3
"""... to this share of it."""


class LocalInbox(ModelInbox):
    """Inbox that replaces own steps by the global model's as soon as that includes them."""

    puts_all = True

    def __init__(
        self,
        worker: Worker,
        codec: SignCodec,
        steps: OwnSteps,
        optimizer: Optimizer,
        options: AladdinLocalOptions,
    ) -> None:
        super().__init__(worker.transport, worker.layout, codec, models=2)
        self._worker = worker
        self._codec = codec
        self._steps = steps
        self._optimizer = optimizer
        self._mix = options.mix
        self._keep = options.keep
        buckets = worker.layout.buckets
        self.count = [0] * len(buckets)
        """Number of gradients in the newest model of each bucket."""
        self._kept: list[tuple[float, list[Tensor]]] = [(0.0, []) for _ in buckets]
        """Share, and the messages of which it stays in the worker's model."""
        self.rates: list[float] = []
        """Learning rates of the worker's last :data:`RATES` steps."""
        self.is_ending = False
        self.lacks_answer = False
        """Whether an answer was damaged since the last message: the next answer replaces it."""

    def open(self) -> None:
        """Start a segment, with the global model on every worker."""
        super().open()
        self.lacks_answer = False
        self._kept = [(0.0, []) for _ in self._kept]
        self.is_ending = False

    def note_rate(self) -> None:
        """Note the learning rate of a step."""
        self.rates = [*self.rates[1 - RATES :], self._rate]

    @property
    def _rate(self) -> float:
        return self._worker.lr * self._optimizer.rate

    def note(self, model: Model) -> None:
        """Count what the model includes; with simulated computation nothing else follows."""
        super().note(model)
        if self._worker.parameters.is_meta:
            self._include(model)

    def put(self, parameters: Tensor, model: Model, values: Tensor) -> None:
        """Add a difference, or start from a whole model."""
        bucket = model.bucket
        x, add_message = bucket.of(parameters), partial(self._codec.add, bucket)
        included, rounds = self._include(model)
        is_whole = values.numel() == bucket.numel
        if is_whole:
            self._restart(model, x, values)
        else:
            add_message(values, x)
            if rounds > 0 and self._mix:
                self._mix_in(model, x, values, rounds)
        if not included:
            return
        old, kept = self._kept[bucket.index]
        new = 0.0 if self.is_ending else self._keep * (1 - 1 / self._worker.divisor)
        for message in kept:
            add_message(message, x, -old)
        for message in included:
            add_message(message, x, new if is_whole else new - 1.0)
        self._kept[bucket.index] = new, included

    def _is_damaged(self, model: Model) -> bool:
        is_damaged = super()._is_damaged(model)
        self.lacks_answer |= is_damaged
        return is_damaged

    def _include(self, model: Model) -> tuple[list[Tensor], float]:
        """Return the own messages that a model is the first to include, and the rounds it adds."""
        index = model.bucket.index
        count, own_steps = map(int, model.notes)
        rounds = (count - self.count[index]) / self._worker.divisor
        self.count[index] = count
        return self._steps.confirm(model.bucket, own_steps), rounds

    def _restart(self, model: Model, x: Tensor, values: Tensor) -> None:
        """Compute ``x <- values + own steps that these lack``."""
        bucket = model.bucket
        copy(x, values)
        add(x, bucket.of(self._steps.left))
        for message in self._steps.parts_under_way(bucket):
            self._codec.add(bucket, message, x)
        if self.is_ending:
            self._kept[bucket.index] = 0.0, []
        share, kept = self._kept[bucket.index]
        for message in kept:
            self._codec.add(bucket, message, x, share)

    def _mix_in(self, model: Model, x: Tensor, values: Tensor, rounds: float) -> None:
        """Move the optimizer's first moment towards that of the global model's movement."""
        if not self._rate:
            return
        movement = torch.zeros_like(x)
        self._codec.add(model.bucket, values, movement, 1 / rounds)
        # The steps in the movement are older: divided by a rate that has fallen to almost 0, as at
        # the end of a schedule, they would be a far too large moment.
        rate = max(self._rate, LEAST_RATE * max(self.rates, default=0.0))
        lr = self._worker.lr * rate / self._rate
        self._optimizer.mix(model.bucket.part, movement, x, lr, self._mix)


class LocalWorker(TrainingWorker):
    """Step, send what the link carries, and never wait."""

    SAVED = TrainingWorker.SAVED | saved("link", "steps", count="inbox.count", rates="inbox.rates")

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        codec: GradientCodec,
        options: AladdinLocalOptions,
    ) -> None:
        super().__init__(worker, optimizer)
        assert isinstance(codec, SignCodec)
        _check_dtype(self.x.dtype)
        self.g = worker.replica.new_vector()
        self.steps = OwnSteps(worker, codec)
        self.link = LinkControl(None if options.share == "auto" else float(options.share))
        self.inbox = LocalInbox(worker, codec, self.steps, optimizer, options)
        self._began = 0.0

    def run(self) -> None:
        """Train until the segment's samples are used up; then all models are equal."""
        self.steps.open()
        self.inbox.open()
        self.link.open()
        self._began = self.transport.now()
        for _ in self.worker.batches():
            self._receive()
            self._step()
            self._send()
        self.inbox.is_ending = True
        self.steps.send_all()
        self.inbox.drain_into(self.x)

    def _receive(self) -> None:
        """Take the models that have arrived since the last step."""
        sent = [message.at for message in self.steps.under_way]
        if self.inbox.blend_into(self.x) and self.worker.projects:
            self.project()
        now = self.transport.now()
        for at in sent[: len(sent) - len(self.steps.under_way)]:
            self.link.answered(now - at)

    def _step(self) -> None:
        """Compute ``x <- x + u``, ``r <- r + u``."""
        direction, rate = self.direction(self.g), -self.worker.lr
        add(self.x, direction, alpha=rate)
        self.steps.add(direction, alpha=rate)
        self.steps.steps += 1
        self.inbox.note_rate()

    def _send(self) -> None:
        now = self.transport.now()
        step, self._began = now - self._began, now
        oldest = next((message.at for message in self.steps.under_way), now)
        if self.link.end_step(oldest, now, step) or self.inbox.lacks_answer:
            self.inbox.lacks_answer = False
            self.steps.send(self.link.share)

    def project(self) -> None:
        """Apply the script's projections, and send their changes too."""
        before = self.x.clone()
        super().project()
        self.steps.add(self.x - before)

    def state_dict(self) -> dict[str, Any]:
        """Return all state; the model without what is left to send, which is stored apart."""
        state = super().state_dict()
        if self.steps.remaining is not None:
            state["parameters"] = state["parameters"] - self.steps.left
        return state

    def resize(self, merged: MergedState) -> None:
        """Start from the global model and the steps that it lacks."""
        super().resize(merged)
        add(self.x, self.steps.left)
        self.inbox.count = [merged.server["applied"]] * len(self.inbox.count)


class LocalServer(ServerAlgorithm):
    """Server that adds every message on arrival and answers it at once."""

    SAVED = ServerAlgorithm.SAVED | saved("shares")

    def __init__(self, server: ParameterServer) -> None:
        super().__init__(server)
        self.shares: dict[int, float] = {}
        """Share of the values in the newest message of each worker."""
        self._workers_have_model = False

    def run(self) -> None:
        """Apply ``x~ <- x~ + q / n``, and answer with as large a share of the differences."""
        if not self._workers_have_model:
            self.server.workers_have_model()
            self._workers_have_model = True
        for arrival in self.arrivals(at_end=self._send_whole):
            arrival.add_to(self.server.values[arrival.bucket.index], 1 / self.server.divisor)
            (share,) = arrival.notes
            if share:
                self.shares[arrival.worker] = share
                self.server.model_level(arrival.worker, share)
                notes = partial(self._notes, arrival.bucket.index, arrival.worker)
                self.server.send_model(arrival.worker, arrival.bucket, notes=notes)

    def _send_whole(self) -> None:
        """Send the global model to all workers at the end of a segment."""
        for worker in range(self.n):
            for bucket in self.server.buckets:
                notes = partial(self._notes, bucket.index, worker)
                self.server.send_whole(worker, bucket, notes)

    def _notes(self, bucket: int, worker: int) -> Notes:
        """Return the gradients in the model, and those of the worker among them."""
        return (self.applied[bucket], self.server.taken[worker][bucket])

    def measures(self) -> dict[str, float]:
        """Return the mean share of the values in the workers' newest messages."""
        return {"message_share": mean(self.shares.values())} if self.shares else {}


def _check_dtype(dtype: torch.dtype) -> None:
    """Raise a UserError if the model's values would be rounded."""
    if dtype != torch.float32:
        raise UserError(
            f"model: the parameters are {str(dtype).removeprefix('torch.')}, and aladdin-local "
            "sends steps with scales in float32. Convert the model with model.float(), or use "
            "another algorithm, such as local-sgd."
        )


def _make_codec(wire: GradientCodec, layout: Layout) -> SignCodec:
    _check_dtype(wire.dtype)
    return SignCodec(wire.plain)


register(
    ALADDIN_LOCAL,
    worker=lambda worker, optimizer, wire, run: LocalWorker(
        worker, optimizer, wire, own(run, AladdinLocalOptions)
    ),
    server=lambda server, optimizer, run: LocalServer(server),
    layout=fine_layout,
    codec=_make_codec,
)
