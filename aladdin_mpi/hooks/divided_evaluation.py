"""Evaluation in equal parts by the workers, each on its own device.

Rank 0 sends a copy of the model to the first worker, and each worker forwards it to the next, piece
by piece, in the message handler. So every link carries it once, and training is not interrupted.
The sums over each part return to rank 0.
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
"""Header of a piece: the number of the evaluation and the offset of the piece."""
PIECE = 1 << 20
"""Values per message."""
RANKS = -1
"""Takes the place of the offset in the message with the participating ranks, in order."""
SUMS_BYTES = 1 << 12
POLL = 1e-3
"""Seconds between two polls for the end of an evaluation."""


def is_divided(context: Context) -> bool:
    """Return whether the workers share the evaluations of this run; every rank calls it.

    With workers on CPUs, sharing would slow training down more than evaluating at rank 0, whose
    cores may be idle.
    """
    transport, choice = context.transport, context.options.evaluate_on
    if transport.models_time or choice == "rank-0":
        return False
    if choice == "workers":
        return True
    mine = context.is_server or is_accelerator(context.whole.parameters.device)
    return bool(broadcast(transport, all(gather(transport, mine))))


@dataclass
class _Arriving:
    """The model of an evaluation, while it arrives at a participating rank."""

    number: int
    ranks: list[int]
    vector: Tensor
    missing: int


class DividedEvaluation:
    """This rank's side of the evaluations of a run.

    ``after`` is called when this rank has measured its part, in the measuring thread.
    """

    def __init__(
        self, context: Context, measurement: Measurement, after: Callable[[], None]
    ) -> None:
        self._context = context
        self._dtype = full(context.whole.parameters.dtype)
        self._measurement = measurement
        self._after = after
        self._transport = transport = context.transport
        self._copy: tuple[nn.Module, Replica] | None = None
        """Copy of a worker's module, on the same device."""
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
        self._on_figures: Callable[[Figures], None] = lambda figures: None
        self._give_up: Callable[[], None] = lambda: None
        transport.exclude_from_traffic(Tag.EVALUATE, Tag.EVALUATED)
        length = max(self._dtype.itemsize * min(PIECE, context.whole.numel), 8 * transport.size)
        transport.on_message(Tag.EVALUATE, HEAD_BYTES + length, self._collect)
        if transport.rank == 0:
            transport.on_message(Tag.EVALUATED, SUMS_BYTES, self._take)
            transport.on_failure(self._lose)

    # -- at rank 0 ------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        """Whether an evaluation, or this rank's part of one, is in progress."""
        return bool(self._ranks) or (self._thread is not None and self._thread.is_alive())

    def begin(
        self, vector: Tensor, on_figures: Callable[[Figures], None], give_up: Callable[[], None]
    ) -> None:
        """Start measuring the flat model ``vector``, which is on the CPU and must not change.

        ``on_figures`` is called with the figures, in a handler, or ``give_up`` if a worker fails.
        """
        with self._transport.atomic():
            self._number += 1
            self._on_figures, self._give_up, self._sums = on_figures, give_up, {}
            self._ranks = self._surviving()
            if not self._ranks:
                give_up()
                return
            self._forward(_frame(self._number, RANKS, torch.tensor(self._ranks)), self._ranks[0])
            for start in range(0, vector.numel(), PIECE):
                piece = _frame(self._number, start, vector[start : start + PIECE])
                self._forward(piece, self._ranks[0])

    def _forward(self, frame: Tensor, rank: int) -> None:
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
            self._on_figures(self._measurement.figures(added(self._sums[rank] for rank in ranks)))

    def _lose(self, rank: int) -> None:
        """Give up if a participant fails: ranks after it may never receive the model."""
        if rank in self._ranks:
            self._ranks = []
            self._give_up()

    def _wait(self, seconds: float) -> None:
        """Wait for the evaluation in progress, and give it up after ``seconds``."""
        until = self._transport.now() + seconds
        while self._ranks and self._transport.now() < until:
            self._transport.sleep(POLL)
        with self._transport.atomic():
            if self._ranks:
                self._lose(self._ranks[0])

    # -- at every participating rank --------------------------------------------------
    def _collect(self, source: int, message: Tensor) -> None:
        number, start = message[:HEAD_BYTES].clone().view(torch.int64).tolist()
        values = message[HEAD_BYTES:].clone()
        if start == RANKS:
            numel, dtype = self._context.whole.numel, self._dtype
            ranks = values.view(torch.int64).tolist()
            self._arriving = _Arriving(number, ranks, torch.empty(numel, dtype=dtype), numel)
        arriving = self._arriving
        if arriving is None or arriving.number != number:
            return  # a rank on the path has failed
        following = arriving.ranks[arriving.ranks.index(self._transport.rank) + 1 :]
        if following:
            self._forward(message.clone(), following[0])
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

    def _run(self, arrived: _Arriving, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # of an evaluation that was given up
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
        """Return the sums over this rank's part of the data, divided equally among ``ranks``."""
        assert self._copy is not None
        module, replica = self._copy
        enter(replica.parameters.device)
        copy_buffers(self._context, self._context.module, module)
        replica.set(vector)
        with no_exit():
            self._measurement.prepare(module)
            sums = self._measurement.sums(module, ranks.index(self._transport.rank), len(ranks))
        self._after()
        return sums

    def at_end(self, vector: Tensor, seconds: float) -> Figures | None:
        """Return the trained model's figures at rank 0; None elsewhere, or if a worker fails.

        Every rank calls it with the model, and its module receives the model's batch-norm
        statistics. An evaluation in progress is awaited for at most ``seconds``.
        """
        transport = self._transport
        if transport.rank == 0:
            self._wait(seconds)
        ranks: list[int] = broadcast(transport, self._surviving())
        if self._thread is not None:
            self._thread.join()
        mine = self._measured(vector, ranks) if transport.rank in ranks else None
        if self._copy is not None:
            copy_buffers(self._context, self._copy[0], self._context.module)
        gathered = gather(transport, mine)
        parts = [gathered[rank] for rank in ranks] if gathered else []
        is_whole = bool(broadcast(transport, bool(parts) and None not in parts))
        if is_whole:
            share_buffers(self._context, ranks[0])
        return self._measurement.figures(added(parts)) if is_whole and parts else None

    def close(self) -> None:
        """Stop sending results of measurements in progress."""
        with self._transport.atomic():
            self._is_closed = True


def _frame(number: int, start: int, values: Tensor) -> Tensor:
    head = torch.tensor([number, start])
    return torch.cat([head.view(torch.uint8), values.contiguous().view(torch.uint8)])
