"""AD-PSGD: asynchronous decentralised parallel SGD (Lian, Zhang, Zhang, Liu; ICML 2018).

Every worker repeats, at its own pace::

    x^ <- x_i                                  [1]
    g at the copy x^, which grows stale        [2]
    x_i, x_j <- (x_i + x_j) / 2                [3]
    x_i <- x_i - lr opt(g)                     [4]

[3] must not happen to a worker twice at once, nor in the middle of [4]. Workers that wait
for each other in a circle would wait for ever; so the workers are split: active ones
start [3] with a passive one of their choice, and passive ones answer, even while they
compute. The copy for [3] leaves before [2], so that it travels meanwhile.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.algorithms.registry import register
from aladdin_mpi.codec.base import DenseWire, GradientCodec
from aladdin_mpi.control.exchange import barrier
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.exchange.gossip import ModelOutbox
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.flat.vectors import add, copy, host_vector
from aladdin_mpi.optimizers.base import Optimizer
from aladdin_mpi.options.algorithms import AD_PSGD, AdPsgdOptions, own
from aladdin_mpi.transport.base import Request, await_event, wait_ended
from aladdin_mpi.transport.checksums import is_void, void
from aladdin_mpi.worker.role import TrainingWorker
from aladdin_mpi.worker.worker import Worker


def passive_workers(n: int) -> list[int]:
    """Those who answer; the others are active. There is at most one more of them."""
    return list(range(0, n, 2))


def average(x: Tensor, theirs: Tensor, mine: Tensor) -> None:
    """``x <- x + (theirs - mine) / 2``, where ``mine`` is x as the other side got it.

    The other side moves by as much the other way: rounding to the wire's dtype does
    not change the sum of the two.
    """
    if not x.is_meta:
        x.add_(theirs.to(x.dtype) - mine.to(x.dtype), alpha=0.5)


class _Side(ABC):
    """A worker's part in averaging ``master`` with others."""

    def __init__(self, worker: Worker, wire: DenseWire, master: Tensor) -> None:
        self.transport = worker.transport
        self.layout = worker.layout
        self.wire = wire
        self.master = master

    @abstractmethod
    def begin(self) -> None:
        """A step begins."""

    @abstractmethod
    def end(self) -> None:
        """The step's gradient is there."""

    @abstractmethod
    def flush(self) -> None:
        """Every worker has taken its last step: wait until everything is delivered."""


class PassiveSide(_Side):
    """Answers each bucket with its own values and averages them, whatever else goes on."""

    def __init__(self, worker: Worker, wire: DenseWire, master: Tensor) -> None:
        super().__init__(worker, wire, master)
        self._next = [0] * worker.count
        self._sent: list[list[Request]] = [[] for _ in self.layout.buckets]
        nbytes = self.layout.largest * wire.dtype.itemsize
        self.transport.on_message(Tag.AVERAGE, nbytes, self._answer)

    def _answer(self, source: int, message: Tensor) -> None:
        bucket = self.layout.buckets[self._next[source]]
        self._next[source] = (bucket.index + 1) % len(self.layout.buckets)
        x = bucket.of(self.master)
        mine = self._room(bucket)
        theirs = message.view(self.wire.dtype)
        damaged = is_void(theirs)
        if damaged:
            void(mine)  # then neither side moves, and their sum stays as it is
        else:
            self.wire.encode(x, mine)
        self._sent[bucket.index].append(self.transport.isend(mine, source, Tag.AVERAGED))
        if not damaged:
            average(x, theirs, mine)

    def _room(self, bucket: Bucket) -> Tensor:
        """A buffer whose last answer is delivered, or a new one."""
        sent = self._sent[bucket.index]
        for place, request in enumerate(sent):
            if request.done:
                del sent[place]
                assert request.buffer is not None
                return request.buffer
        return self.wire.buffer(bucket.numel)

    def begin(self) -> None:
        """Nothing: others choose when to average."""

    def end(self) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Wait for the last answers."""
        wait_ended(self.transport, [request for sent in self._sent for request in sent])


class ActiveSide(_Side):
    """Averages with a passive worker of its choice in every step.

    Args:
        options: the graph: ``random`` draws from all, ``exponential`` goes 0, 1, 2, 4, ...
            passive workers further than the one before this worker.
    """

    def __init__(
        self, worker: Worker, wire: DenseWire, master: Tensor, options: AdPsgdOptions, seed: int
    ) -> None:
        super().__init__(worker, wire, master)
        self.steps = 0
        self.random = random.Random(f"ad-psgd {seed} {worker.index}")
        self._drawn = options.graph == "random"
        self._passive = passive_workers(worker.count)
        self._place = worker.index // 2
        self._hops = [0, *(2**power for power in range((len(self._passive) - 1).bit_length()))]
        self._outbox = ModelOutbox(worker, wire, Tag.AVERAGE)
        self._theirs = wire.buffer(self.layout.numel)
        self._mine = self._theirs
        self._answers: list[Request] = []

    def _choose(self) -> int | None:
        """Whom to average with in this step; None if no passive worker lives."""
        self.steps += 1
        passive = [rank for rank in self._passive if rank not in self.transport.failed]
        if not passive:
            return None
        if self._drawn:
            return self.random.choice(passive)
        hop = self._hops[self.steps % len(self._hops)]
        return passive[(self._place + hop) % len(passive)]

    def begin(self) -> None:
        """Send x, which nobody changes before :meth:`end`."""
        self._answers = []
        peer = self._choose()
        if peer is None:
            return
        self._answers = [
            self.transport.irecv(bucket.of(self._theirs), peer, Tag.AVERAGED)
            for bucket in self.layout.buckets
        ]
        self._mine = self._outbox.send(self.master, peer)

    def end(self) -> None:
        """Wait for the answer, and average; buckets that a dying peer did not answer stay."""
        for bucket, answer in zip(self.layout.buckets, self._answers, strict=False):
            part = bucket.part
            try:
                self.transport.wait(answer)
            except PeerFailedError:
                continue
            if is_void(self._theirs[part]):
                continue  # damaged on one of the two ways
            with self.transport.atomic():
                average(self.master[part], self._theirs[part], self._mine[part])

    def flush(self) -> None:
        """Everything has been answered."""
        self._outbox.flush()


class _DeviceLink:
    """Between the master, in the host's memory, and a device that computes on the copy.

    Attributes:
        room: pinned memory of a flat vector. The master itself may be changed while it is copied.
    """

    def __init__(self, worker: Worker, x: Tensor) -> None:
        self._transport = worker.transport
        self._wire = DenseWire(x.dtype, x.device)
        self.room = self._wire.buffer(x.numel())

    def read(self) -> Tensor:
        """``room`` on the device."""
        values, _ = self._wire.fetch(self.room)
        return values

    def wait_for(self, g: Tensor) -> Tensor:
        """``g`` on the host, when the device has computed it."""
        staged, event = self._wire.stage(g, self.room)
        if event is not None:
            await_event(self._transport, event)
        return staged


class AdPsgdWorker(TrainingWorker):
    """One worker; even ones are passive, odd ones active.

    ``master`` is x_i, in memory that handlers can work on; the module's own parameters
    are the copy x^.
    """

    def __init__(
        self,
        worker: Worker,
        optimizer: Optimizer,
        wire: GradientCodec,
        options: AdPsgdOptions,
        seed: int,
    ) -> None:
        super().__init__(worker, optimizer)
        self.wire = wire.plain
        self.g = worker.replica.new_vector()
        self.master = host_vector(self.x)
        copy(self.master, self.x)
        on_device = is_accelerator(self.x.device)
        self._link = _DeviceLink(worker, self.x) if on_device else None
        host_wire = DenseWire(self.wire.dtype, self.master.device) if on_device else self.wire
        self.side: _Side
        if self.index in passive_workers(self.n):
            self.side = PassiveSide(worker, host_wire, self.master)
        else:
            self.side = ActiveSide(worker, host_wire, self.master, options, seed)

    def run(self) -> None:
        """Train until the segment's samples are used up."""
        for _ in self.worker.batches():
            self._read()  # [1]
            self.side.begin()
            g = self.direction(self.g)  # [2]
            self.side.end()  # [3]
            self._step(g)  # [4]
        barrier(self.transport)  # the passive ones answer until all are done
        self.side.flush()
        self._read()

    def _read(self) -> None:
        target = self.x if self._link is None else self._link.room
        for bucket in self.layout.buckets:
            with self.transport.atomic():
                copy(bucket.of(target), bucket.of(self.master))
        if self._link is not None:
            copy(self.x, self._link.read())

    def _step(self, g: Tensor) -> None:
        if self._link is not None:
            g = self._link.wait_for(g)
        for bucket in self.layout.buckets:
            with self.transport.atomic():
                add(bucket.of(self.master), bucket.of(g), alpha=-self.worker.lr)

    @property
    def own_model(self) -> Tensor:
        """This worker's x."""
        return self.master

    def part(self, bucket: Bucket) -> Tensor:
        """This worker's x."""
        return bucket.of(self.master)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next segment depends on; x and its copy are the same now."""
        state = super().state_dict()
        if isinstance(self.side, ActiveSide):
            state |= {"steps": self.side.steps, "random": self.side.random.getstate()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        copy(self.master, self.x)
        if isinstance(self.side, ActiveSide):
            self.side.steps = state["steps"]
            self.side.random.setstate(state["random"])

    def resize(self, merged: MergedState) -> None:
        """See :meth:`TrainingWorker.resize`."""
        super().resize(merged)
        copy(self.master, self.x)


register(
    AD_PSGD,
    worker=lambda worker, optimizer, wire, run: AdPsgdWorker(
        worker, optimizer, wire, own(run, AdPsgdOptions), run.seed
    ),
)
