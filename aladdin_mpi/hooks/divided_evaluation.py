"""An evaluation that the workers make in equal parts, each on its own device.

Rank 0 sends the copy of the model to the first worker and each passes it on to the next, piece by
piece, from the handler of the message: every link carries it once, and nobody's own work stops.
What each part sums up goes back to rank 0.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from aladdin_mpi.accelerator import enter, is_accelerator
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.vectors import full
from aladdin_mpi.hooks.measurement import Figures, Measurement, Sums, added, copy_buffers
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.session.context import Context, share_buffers
from aladdin_mpi.transport.base import surviving_ranks

HEAD_BYTES = 16
"""Before the values of a piece: the number of the evaluation and where the piece begins."""
PIECE = 1 << 20
"""Values that are sent at a time."""
RANKS = -1
"""In place of where a piece begins: these are the ranks that take part, in order."""
SUMS_BYTES = 1 << 12
POLL = 1e-3
"""Seconds between two looks at whether an evaluation has ended."""


def is_divided(context: Context) -> bool:
    """Whether the workers share the evaluations of this run. Every rank calls it.

    Where they compute on CPUs it would slow training down more than at rank 0, whose cores may
    have nothing to do.
    """
    transport, choice = context.transport, context.options.evaluate_on
    if transport.models_time or choice == "rank-0":
        return False
    if choice == "workers":
        return True
    mine = context.is_server or is_accelerator(context.replica.parameters.device)
    return bool(broadcast(transport, all(gather(transport, mine))))


@dataclass
class _Arriving:
    """The model of an evaluation, on its way to a rank that takes part."""

    number: int
    ranks: list[int]
    vector: Tensor
    missing: int


class DividedEvaluation:
    """This rank's side of the evaluations of a run.

    ``after`` is called when this rank has measured its part, by the thread that has.
    """

    def __init__(
        self, context: Context, measurement: Measurement, after: Callable[[], None]
    ) -> None:
        self._context = context
        self._dtype = full(context.replica.parameters.dtype)
        self._measurement = measurement
        self._after = after
        self._transport = transport = context.transport
        self._copy: tuple[nn.Module, Replica] | None = None
        """Of a worker's module, on the same device."""
        if not context.is_server:
            module = copy.deepcopy(context.module)
            self._copy = module, Replica(module)
        self._arriving: _Arriving | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # At rank 0:
        self._number = 0
        self._ranks: list[int] = []
        self._sums: dict[int, Sums] = {}
        self._done: Callable[[Figures], None] = lambda figures: None
        self._give_up: Callable[[], None] = lambda: None
        transport.exclude_from_traffic(Tag.EVALUATE, Tag.EVALUATED)
        length = max(self._dtype.itemsize * min(PIECE, context.replica.numel), 8 * transport.size)
        transport.on_message(Tag.EVALUATE, HEAD_BYTES + length, self._collect)
        if transport.rank == 0:
            transport.on_message(Tag.EVALUATED, SUMS_BYTES, self._take)
            transport.on_failure(self._lose)

    # -- at rank 0 ------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Whether an evaluation is under way, or this rank's part of one."""
        return bool(self._ranks) or (self._thread is not None and self._thread.is_alive())

    def begin(
        self, vector: Tensor, done: Callable[[Figures], None], give_up: Callable[[], None]
    ) -> None:
        """Have the model ``vector`` measured: flat, on the CPU, and not changed until the end.

        ``done`` is called with the figures, as a handler, or ``give_up`` if a worker has failed.
        """
        with self._transport.atomic():
            self._number += 1
            self._done, self._give_up, self._sums = done, give_up, {}
            self._ranks = self._surviving()
            if not self._ranks:
                give_up()
                return
            self._pass_on(_frame(self._number, RANKS, torch.tensor(self._ranks)), self._ranks[0])
            for start in range(0, vector.numel(), PIECE):
                piece = _frame(self._number, start, vector[start : start + PIECE])
                self._pass_on(piece, self._ranks[0])

    def _pass_on(self, frame: Tensor, rank: int) -> None:
        if rank == self._transport.rank:
            self._collect(rank, frame)
        elif rank not in self._transport.failed:
            self._transport.isend(frame, rank, Tag.EVALUATE)

    def _surviving(self) -> list[int]:
        servers = self._context.servers
        return [rank for rank in surviving_ranks(self._transport) if rank >= servers]

    def _take(self, source: int, message: Tensor) -> None:
        number, sums = json.loads(message.numpy().tobytes())
        if number != self._number or source not in self._ranks:
            return  # that evaluation was given up
        self._sums[source] = sums
        if len(self._sums) == len(self._ranks):
            ranks, self._ranks = self._ranks, []
            self._done(self._measurement.figures(added(self._sums[rank] for rank in ranks)))

    def _lose(self, rank: int) -> None:
        """Give up: those after it may never get the model, even if it has measured its part."""
        if rank in self._ranks:
            self._ranks = []
            self._give_up()

    def _wait(self, seconds: float) -> None:
        """Wait for the end of the evaluation under way; give it up after so many seconds."""
        until = self._transport.now() + seconds
        while self._ranks and self._transport.now() < until:
            self._transport.sleep(POLL)
        with self._transport.atomic():
            if self._ranks:
                self._lose(self._ranks[0])

    # -- at every rank that takes part ------------------------------------------------
    def _collect(self, source: int, message: Tensor) -> None:
        number, start = message[:HEAD_BYTES].clone().view(torch.int64).tolist()
        values = message[HEAD_BYTES:].clone()
        if start == RANKS:
            numel, dtype = self._context.replica.numel, self._dtype
            ranks = values.view(torch.int64).tolist()
            self._arriving = _Arriving(number, ranks, torch.empty(numel, dtype=dtype), numel)
        arriving = self._arriving
        if arriving is None or arriving.number != number:
            return  # a rank on its way has died
        behind = arriving.ranks[arriving.ranks.index(self._transport.rank) + 1 :]
        if behind:
            self._pass_on(message.clone(), behind[0])
        if start == RANKS:
            return
        piece = values.view(self._dtype)
        arriving.vector[start : start + len(piece)] = piece
        arriving.missing -= len(piece)
        if not arriving.missing:
            self._arriving = None
            self._thread = threading.Thread(
                target=self._run, args=(arriving, self._thread), name="evaluation", daemon=True
            )
            self._thread.start()

    def _run(self, arrived: _Arriving, merged: threading.Thread | None) -> None:
        if merged is not None:
            merged.join()  # of an evaluation that was given up
        sums = self._measured(arrived.vector, arrived.ranks)
        packed = json.dumps([arrived.number, sums]).encode()
        message = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        with self._transport.atomic():
            if self._is_closed:
                return
            if self._transport.rank == 0:
                self._take(0, message)
            elif 0 not in self._transport.failed:
                self._transport.isend(message, 0, Tag.EVALUATED)

    def _measured(self, vector: Tensor, ranks: Sequence[int]) -> Sums:
        """Sums over this rank's part of as many equal parts as there are ranks."""
        assert self._copy is not None
        module, replica = self._copy
        enter(replica.parameters.device)
        replica.set(vector)
        with no_exit():
            self._measurement.prepare(module)
            sums = self._measurement.sums(module, ranks.index(self._transport.rank), len(ranks))
        self._after()
        return sums

    def at_end(self, vector: Tensor, seconds: float) -> Figures | None:
        """The trained model's figures, at rank 0; None elsewhere, and where a worker has failed.

        Every rank calls it with the model. Each one's module gets the statistics of batch norm
        that belong to it. An evaluation under way is waited for, ``seconds`` at most.
        """
        transport = self._transport
        if transport.rank == 0:
            self._wait(seconds)
        ranks: list[int] = broadcast(transport, self._surviving())
        if self._thread is not None:
            self._thread.join()
        mine = self._measured(vector, ranks) if transport.rank in ranks else None
        if self._copy is not None:
            copy_buffers(self._copy[0], self._context.module)
        told = gather(transport, mine)
        parts = [told[rank] for rank in ranks] if told else []
        is_whole = bool(broadcast(transport, bool(parts) and None not in parts))
        if is_whole:
            share_buffers(self._context, ranks[0])
        return self._measurement.figures(added(parts)) if is_whole and parts else None

    def close(self) -> None:
        """Send no more of what is still measured."""
        with self._transport.atomic():
            self._is_closed = True


def _frame(number: int, start: int, values: Tensor) -> Tensor:
    head = torch.tensor([number, start])
    return torch.cat([head.view(torch.uint8), values.contiguous().view(torch.uint8)])
