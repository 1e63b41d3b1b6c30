"""AD-PSGD: asynchronous decentralised parallel SGD (Lian, Zhang, Zhang, Liu; ICML 2018).

Every worker repeats, at its own pace::

    x^ <- x_i                                  [1]
    g at the copy x^, which grows stale        [2]
    x_i, x_j <- (x_i + x_j) / 2                [3]
    x_i <- x_i - lr opt(g)                     [4]

[3] must not happen to a worker twice at once, nor in the middle of [4]. If workers could
wait for each other in a circle, they would deadlock. Workers are therefore split: active
ones start [3] with a passive one of their choice, and passive ones answer, even while they
compute. The copy for [3] is sent before [2], so that communication overlaps computation.
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
    """Return the ranks of the passive workers: half of all, rounded up. The others are active."""
    return list(range(0, n, 2))


def average(x: Tensor, theirs: Tensor, mine: Tensor) -> None:
    """Compute ``x <- x + (theirs - mine) / 2``; ``mine`` is x as sent to the other side.

    The other side moves by the same amount in the opposite direction, so rounding to the
    wire's dtype does not change the sum of both models.
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
        """Start a step."""

    @abstractmethod
    def end(self) -> None:
        """Finish a step after its gradient is computed."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all messages are delivered, after the last step of all workers."""


class PassiveSide(_Side):
    """Passive side: averages each received bucket with its own values and returns them."""

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
        mine = self._free_buffer(bucket)
        theirs = message.view(self.wire.dtype)
        damaged = is_void(theirs)
        if damaged:
            void(mine)  # so neither side moves, and the sum of both stays the same
        else:
            self.wire.encode(x, mine)
        self._sent[bucket.index].append(self.transport.isend(mine, source, Tag.AVERAGED))
        if not damaged:
            average(x, theirs, mine)

    def _free_buffer(self, bucket: Bucket) -> Tensor:
        """Return a buffer whose last answer is delivered, or a new one."""
        sent = self._sent[bucket.index]
        for place, request in enumerate(sent):
            if request.done:
                del sent[place]
                assert request.buffer is not None
                return request.buffer
        return self.wire.buffer(bucket.numel)

    def begin(self) -> None:
        """Do nothing: active workers choose when to average."""

    def end(self) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Wait for the last answers."""
        wait_ended(self.transport, [request for sent in self._sent for request in sent])


class ActiveSide(_Side):
    """Active side: averages with a passive worker of its choice in every step.

    Args:
        options: the graph. ``random`` draws from all passive workers; ``exponential`` moves
            0, 1, 2, 4, ... passive workers on from the one before this worker.
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
        """Return the peer of this step; None if all passive workers have failed."""
        self.steps += 1
        passive = [rank for rank in self._passive if rank not in self.transport.failed]
        if not passive:
            return None
        if self._drawn:
            return self.random.choice(passive)
        hop = self._hops[self.steps % len(self._hops)]
        return passive[(self._place + hop) % len(passive)]

    def begin(self) -> None:
        """Send x, which does not change before :meth:`end`."""
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
        """Wait for the answer and average; skip buckets that a failed peer did not answer."""
        for bucket, answer in zip(self.layout.buckets, self._answers, strict=False):
            part = bucket.part
            try:
                self.transport.wait(answer)
            except PeerFailedError:
                continue
            if is_void(self._theirs[part]):
                continue  # damaged in one of the two directions
            with self.transport.atomic():
                average(self.master[part], self._theirs[part], self._mine[part])

    def flush(self) -> None:
        """Wait until the last copy is delivered."""
        self._outbox.flush()


class _DeviceLink:
    """Link between the master in host memory and a device that computes on the copy.

    Attributes:
        staging: pinned flat vector. The master itself may change while it is being copied.
    """

    def __init__(self, worker: Worker, x: Tensor) -> None:
        self._transport = worker.transport
        self._wire = DenseWire(x.dtype, x.device)
        self.staging = self._wire.buffer(x.numel())

    def read(self) -> Tensor:
        """Return ``staging`` on the device."""
        values, _ = self._wire.fetch(self.staging)
        return values

    def wait_for(self, g: Tensor) -> Tensor:
        """Return ``g`` on the host once the device has computed it."""
        staged, event = self._wire.stage(g, self.staging)
        if event is not None:
            await_event(self._transport, event)
        return staged


class AdPsgdWorker(TrainingWorker):
    """AD-PSGD worker: passive if its index is even, active if odd.

    ``master`` is x_i, in memory that message handlers can work on; the module's own
    parameters are the copy x^.
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
        barrier(self.transport)  # passive workers answer until all workers are done
        self.side.flush()
        self._read()

    def _read(self) -> None:
        target = self.x if self._link is None else self._link.staging
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
        """Return a bucket of this worker's x."""
        return bucket.of(self.master)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for the next segment; x and its copy are equal between segments."""
        state = super().state_dict()
        if isinstance(self.side, ActiveSide):
            state |= {"steps": self.side.steps, "random": self.side.random.getstate()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        super().load_state_dict(state)
        copy(self.master, self.x)
        if isinstance(self.side, ActiveSide):
            self.side.steps = state["steps"]
            self.side.random.setstate(state["random"])

    def resize(self, merged: MergedState) -> None:
        """Restore the merged state, and copy the model to the master."""
        super().resize(merged)
        copy(self.master, self.x)


register(
    AD_PSGD,
    worker=lambda worker, optimizer, wire, run: AdPsgdWorker(
        worker, optimizer, wire, own(run, AdPsgdOptions), run.seed
    ),
)
