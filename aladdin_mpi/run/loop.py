"""The user's loop and the algorithm's: two plain loops that take turns, as greenlets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor
from torch.utils._pytree import tree_map

from aladdin_mpi.accelerator import CopyStream, is_accelerator
from aladdin_mpi.control.budget import SampleLease
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.feeds import Source
from aladdin_mpi.errors import LostError, PeerFailedError, UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.run.loop_watch import LoopWatch
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.transport.base import surviving_ranks, wait_ended
from aladdin_mpi.worker.step import SKIPPED, Loss
from aladdin_mpi.worker.worker import Worker


class Delivery:
    """Puts batches of any structure on a device: by pinned memory, on a stream of its own.

    Args:
        device: of the model.
        channels_last: images are laid out so.
    """

    def __init__(self, device: torch.device, channels_last: bool) -> None:
        self._device = device
        self._channels_last = channels_last
        self._copies = CopyStream(device) if is_accelerator(device) else None

    def __call__(self, batch: Any) -> Any:
        """The same batch there."""
        return tree_map(self._put, batch)

    def _put(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            # Such as the batches of a tokenizer, which are no containers that torch knows.
            return item.to(self._device) if callable(getattr(item, "to", None)) else item
        if self._channels_last and item.dim() == 4:
            item = item.contiguous(memory_format=torch.channels_last)
        if self._copies is None or item.device.type != "cpu" or item.is_sparse:
            return item.to(self._device, non_blocking=True)
        return self._copies.fetch(item if item.is_pinned() else item.pin_memory())[0]


def allreduce(worker: Worker, value: float | Tensor) -> tuple[Tensor, int]:
    """The sum of ``value`` over all workers that live, in fp64, and how many they are.

    Each sends its own to all others, and adds them up in the order of the workers: all have the
    same sum, to the bit. A collective of MPI would need the servers too.

    Raises:
        LostError: the group of ranks comes apart. Those who wait here cannot go on in the next one,
            whose other workers may have to make steps with them before they come here.
    """
    transport = worker.whole
    mine = torch.as_tensor(value, dtype=torch.float64).detach().cpu().reshape(-1).contiguous()
    others = [
        rank
        for rank in surviving_ranks(transport)
        if rank >= worker.servers and rank != transport.rank
    ]
    received = {rank: torch.empty_like(mine) for rank in others}
    receives = {
        rank: transport.irecv(buffer, rank, Tag.AMONG_WORKERS) for rank, buffer in received.items()
    }
    sends = [transport.isend(mine, rank, Tag.AMONG_WORKERS) for rank in others]
    values = {transport.rank: mine}
    for rank, request in receives.items():
        try:
            transport.wait(request)
        except PeerFailedError:
            continue
        values[rank] = received[rank]
    if transport.is_revoked():
        raise LostError("a rank was lost while workers waited for each other in run.reduce()")
    wait_ended(transport, sends)
    total = torch.stack([values[rank] for rank in sorted(values)]).sum(0)
    shape = value.shape if isinstance(value, Tensor) else ()
    return total.reshape(shape), len(values)


_END = object()
NO_BATCH = object()
"""In place of a batch where a worker has none, but may come to the end of an epoch."""


class Batches(Iterator[Any]):
    """The batches of a run, for one loop.

    When nobody holds it any more before it has come to its end, the loop has been left: by
    ``break``, or by an error. Which of the two cannot be told at that moment.

    Args:
        batches: of the run.
        left: called then.
        check: called before each batch.
    """

    def __init__(
        self, batches: Iterator[Any], left: Callable[[], None], check: Callable[[], None]
    ) -> None:
        self._batches = batches
        self._left = left
        self._check = check

    def __next__(self) -> Any:
        """The next batch."""
        self._check()
        return next(self._batches)

    def __del__(self) -> None:
        """Nobody holds it any more."""
        self._left()


class Epoch(Iterator[Any]):
    """The batches that a worker computes while the workers together go through the data once.

    A worker that is slow has fewer of them, or none. ``break`` ends the epoch for all.

    Args:
        number: from 0.
        batches: of the run.
        is_past: whether the next batch belongs to a later epoch, or there is none.
    """

    def __init__(self, number: int, batches: Iterator[Any], is_past: Callable[[], bool]) -> None:
        self.number = number
        self.is_done = False
        self._batches = batches
        self._is_past = is_past

    def __int__(self) -> int:
        """Its number, from 0."""
        return self.number

    __index__ = __int__

    def __str__(self) -> str:
        """Its number, from 0."""
        return str(self.number)

    def __format__(self, spec: str) -> str:
        """Its number, as ``spec`` says."""
        return format(self.number, spec)

    def __next__(self) -> Any:
        """The next batch."""
        while not self._is_past():
            batch = next(self._batches, _END)
            if batch is _END:
                break
            if batch is not NO_BATCH:
                return batch
        self.is_done = True
        raise StopIteration


class HeldBack(Iterator[Any]):
    """Batches of which the first has been asked for already, to see whether there is any."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        first = next(batches, _END)
        self._first = [] if first is _END or first is NO_BATCH else [first]

    @property
    def has_first(self) -> bool:
        """Whether it has not been taken yet."""
        return bool(self._first)

    def __next__(self) -> Any:
        """The next batch."""
        return self._first.pop() if self._first else next(self._batches)


class Loop:
    """A worker's batches for the user's loop, and the gradients for the algorithm's.

    Args:
        batch_size: of a batch; a step has several where gradients are accumulated.
        deliver: puts a batch where the loop wants it.
    """

    def __init__(self, batch_size: int, deliver: Callable[[Any], Any]) -> None:
        self.skipping = False
        """The loop has been left: what is granted still is not computed any more."""
        self.has_finished = False
        """Whether the algorithm has come to its end without an error."""
        self.lease: SampleLease | None = None
        self.batch_size = batch_size
        self._deliver = deliver
        self._rank: Rank | None = None
        self._source: Source | None = None
        self._watch: LoopWatch | None = None
        self._user_side: greenlet | None = None
        self._algorithm_side: greenlet | None = None
        self._losses: list[float | Tensor | None] = []
        self._stepped = True
        self.is_last = True
        """Whether the present batch completes its lease."""
        self._handed_over = True

    # -- the algorithm's side -------------------------------------------------------------
    def compute(self, lease: SampleLease) -> Loss:
        """Let the user's loop compute a lease's batches, to the last one's step()."""
        assert self._user_side is not None
        loss: Loss = self._user_side.switch(lease)
        return loss

    def note_empty(self, lease: SampleLease) -> None:
        """Let the user's loop end the epochs that are over by this lease, which has no samples.

        The other workers may have come to a later one, and wait at its beginning for this one.
        """
        assert self._user_side is not None
        self._user_side.switch(lease)

    # -- the user's side ------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        """Whether the algorithm has come to its end."""
        return self._algorithm_side is not None and self._algorithm_side.dead

    @property
    def is_active(self) -> bool:
        """Whether the algorithm waits for the user's loop."""
        return bool(self._algorithm_side) and not self.is_in_algorithm

    @property
    def is_in_algorithm(self) -> bool:
        """Whether it is the algorithm's side that asks."""
        return self._algorithm_side is not None and getcurrent() is self._algorithm_side

    def follow(self, rank: Rank, source: Source | None) -> None:
        """Go on with this part in the run, and these data; None: there are none."""
        self._rank, self._source = rank, source
        if self._watch is not None:
            self._watch.renew()

    def batches(self, train: Callable[[], None], watch: LoopWatch | None) -> Iterator[Any]:
        """The batches, until the budget is used up; None for each where there is no data.

        `NO_BATCH` stands for a lease without samples: see :meth:`note_empty`.

        Args:
            train: the algorithm's side.
            watch: see :class:`LoopWatch`; None: nobody watches.
        """
        self._watch = watch
        self._user_side = getcurrent()

        def train_to_end() -> None:
            train()
            self.has_finished = True

        self._algorithm_side = greenlet(train_to_end)
        self.lease = self._algorithm_side.switch()
        while not self._algorithm_side.dead:
            yield from self._step_of()

    def _step_of(self) -> Iterator[Any]:
        """The batches of one lease."""
        assert self.lease is not None
        left = self.lease.size
        self._handed_over = False
        if not left:
            yield NO_BATCH
            self.note_resumed()
        while left and not self.skipping:
            size = min(left, self.batch_size)
            left -= size
            self._begin(is_last=not left)
            source = self._source
            yield None if source is None else self._deliver(_next(source, size))
            self.note_resumed()
            if not self._stepped and not self.skipping:
                self._check_skipped()
        if not self._handed_over:
            self._hand_over()
        self._stepped = True

    def note_resumed(self) -> None:
        """Check what the user's loop did after its step: it has returned, or has been left.

        Raises:
            UserError: it has changed the model, and the algorithm would lose that.
        """
        if self._watch is not None and self._stepped:
            self._watch.resume()

    def _begin(self, is_last: bool) -> None:
        assert self._rank is not None
        self._stepped, self.is_last = False, is_last
        watch = self._rank.worker.step.watch
        if watch is not None:
            watch.enabled = is_last
        if self._watch is not None:
            self._watch.begin()

    def _check_skipped(self) -> None:
        """A batch that the loop has passed over has no gradient.

        Raises:
            UserError: it has one.
        """
        assert self._rank is not None
        replica = self._rank.context.replica
        if not self._losses and isinstance(replica, Replica) and replica.gradients.has_any():
            raise UserError(
                "training loop: expected one call of step() for each batch, got none; call "
                "run.step(loss) after loss.backward()"
            )

    def step(self, loss: Tensor | float | None) -> None:
        """A batch's gradient is there; the last of a lease lets the algorithm go on."""
        if self._algorithm_side is None or self._stepped:
            raise UserError(
                "training loop: expected step() once for each batch of run.batches(); got a call "
                "without a batch"
            )
        if self._watch is not None:
            self._watch.end()
        self._stepped = True
        self._losses.append(_value(loss))
        if self.is_last:
            self._hand_over()

    def _hand_over(self) -> None:
        """Until the algorithm wants the next gradient."""
        assert self._algorithm_side is not None
        self._handed_over = True
        value: Loss = SKIPPED if not self._losses else _total(self._losses)
        self._losses = []
        self._user_side = getcurrent()
        self._algorithm_side.parent = self._user_side
        self.lease = self._algorithm_side.switch(value)

    # -- loops that do not end by themselves ------------------------------------------------
    def drain(self) -> None:
        """Let the algorithm come to its end; what it is still granted has no gradient."""
        self._leave()
        while self.is_active:
            self._hand_over()

    def abandon(self) -> None:
        """End the algorithm where it is. No other rank may wait for this one."""
        self._leave()
        if self.is_active:
            assert self._algorithm_side is not None
            self._algorithm_side.parent = getcurrent()
            with suppress(Exception):  # of an algorithm that is cut off
                self._algorithm_side.throw(GreenletExit)

    def _leave(self) -> None:
        """Nothing more is computed."""
        self.skipping = self._stepped = True
        if self._source is not None:
            self._source.close()


def _next(source: Source, size: int) -> Any:
    with no_exit():  # the user's data set, transforms and collate_fn
        return source.next_batch(size)


def _value(loss: Tensor | float | None) -> Tensor | float | None:
    """A loss that a device is still computing stays there.

    Raises:
        UserError: it is no number.
    """
    if not isinstance(loss, Tensor):
        return loss
    if loss.numel() != 1:
        raise UserError(
            "training loop: expected one number as the loss in run.step(loss), got a tensor of "
            f"shape {list(loss.shape)}; call run.step(loss.mean())"
        )
    return loss.detach() if is_accelerator(loss.device) else loss.item()


def _total(losses: list[float | Tensor | None]) -> float | Tensor | None:
    """Of the parts of a step's loss, as far as they were told."""
    told = [loss for loss in losses if loss is not None]
    return sum(told) if told else None
