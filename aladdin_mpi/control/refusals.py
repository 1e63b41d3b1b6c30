"""Refused gradients and messages: reports to rank 0, and its record of them."""

from __future__ import annotations

from enum import IntEnum
from math import log10
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.control.budget import Budget
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.state import Stateful, saved
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport


class Reason(IntEnum):
    """The reason for a refusal."""

    NAN = 1  # a bucket of a gradient contains NaN
    INFINITE = 2  # it contains an infinite value, or its sum is infinite
    LOSS = 3  # the batch's loss exceeds --max-loss
    LOSS_ONLY = 4  # the loss is not finite but the gradient is; only the gradient is used
    ARRIVED = 5  # a message to a server is not finite, although its sender has checked it
    CHECKSUM = 6  # a message was damaged in transit
    SCALE = 7  # NAN or INFINITE, with a loss that was scaled for half precision
    UNUSED = 8  # no refusal: parameters without a gradient are stepped with zero


class Refusal(NamedTuple):
    """One refusal.

    ``rank`` is the origin of the gradient or message. ``bucket`` is -1 if unknown. ``sample`` is
    the sample number at which the batch starts. ``value`` is the loss, or the tag of a message.
    ``in_a_row`` counts the rank's last steps, all of which were refused.
    """

    reason: int
    rank: int
    bucket: int = -1
    sample: int = -1
    value: float = 0.0
    in_a_row: int = 0

    def pack(self) -> Tensor:
        """Return the refusal as a message."""
        return torch.tensor(self, dtype=torch.float64)

    @staticmethod
    def unpack(message: Tensor) -> Refusal:
        """Return the refusal from the bytes of a message."""
        reason, rank, bucket, sample, value, in_a_row = message.view(torch.float64).tolist()
        return Refusal(int(reason), int(rank), int(bucket), int(sample), value, int(in_a_row))


NBYTES = 8 * len(Refusal._fields)
"""Size of a message."""


def report(transport: Transport, refusal: Refusal) -> None:
    """Report a refusal to rank 0. Never blocks; a message handler may call it."""
    transport.isend(refusal.pack(), COORDINATOR, Tag.REFUSAL)


MOST_IN_A_ROW = 20
"""Number of a worker's consecutive refused steps that ends the run."""
WARNED_ALWAYS = 3
"""Number of refusals of one kind and rank that are printed; then the 10th, the 100th, ..."""
KINDS = {
    **dict.fromkeys((Reason.NAN, Reason.INFINITE, Reason.LOSS), "gradient refused"),
    Reason.LOSS_ONLY: "loss left out",
    **dict.fromkeys((Reason.ARRIVED, Reason.CHECKSUM), "message refused"),
}


class Ledger(Stateful):
    """Rank 0's record of refusals: it warns, counts, and ends a run that cannot recover.

    Args:
        first_worker: rank of worker 0.
        budget: its loss scale is halved when a gradient overflows.
    """

    SAVED = saved(counts="_counts", first="_first")

    def __init__(self, transport: Transport, first_worker: int, budget: Budget) -> None:
        self._transport = transport
        self._first_worker = first_worker
        self._budget = budget
        self._counts: dict[tuple[int, str], int] = {}
        self._first: dict[tuple[int, str], str] = {}
        self._has_ended = False
        self._has_reported_unused = False
        transport.on_message(Tag.REFUSAL, NBYTES, self._handle)

    def count(self, kind: str) -> int:
        """Return the number of refusals of a kind, on all ranks."""
        return sum(count for (_, name), count in self._counts.items() if name == kind)

    def failures(self) -> list[dict[str, Any]]:
        """Return a line of the summary for each rank and kind."""
        return [
            {"rank": rank, "what": kind, "count": self._counts[rank, kind], "first": first}
            for (rank, kind), first in sorted(self._first.items())
        ]

    def _handle(self, source: int, message: Tensor) -> None:
        refusal = Refusal.unpack(message)
        if refusal.reason == Reason.SCALE:
            self._halve_scale(refusal)
        elif refusal.reason == Reason.UNUSED:
            self._report_unused(refusal)
        else:
            self._count(refusal, source)

    def _count(self, refusal: Refusal, source: int) -> None:
        kind = KINDS[Reason(refusal.reason)]
        key = refusal.rank, kind
        count = self._counts[key] = self._counts.get(key, 0) + 1
        why = self._why(refusal, source)
        self._first.setdefault(key, why)
        if count <= WARNED_ALWAYS or log10(count).is_integer():
            more = f" ({count} so far)" if count > 1 else ""
            self._print(f"{self._name(refusal.rank)}: {kind}: {why}{more}")
        if refusal.in_a_row >= MOST_IN_A_ROW and not self._has_ended:
            self._has_ended = True  # several threads may run handlers, so raise only once
            raise UserError(_last_words(self._name(refusal.rank), refusal, why))

    def _halve_scale(self, refusal: Refusal) -> None:
        budget, scale = self._budget, self._budget.loss_scale
        if scale.overflowed(refusal.sample, budget.drawn):
            self._print(
                f"{self._name(refusal.rank)}: a gradient overflowed float16 at sample "
                f"{refusal.sample}; the loss scale is now {2**scale.exponent}"
            )

    def _report_unused(self, refusal: Refusal) -> None:
        if self._has_reported_unused:
            return
        self._has_reported_unused = True
        self._print(
            f"warning: {self._name(refusal.rank)}: the batch at sample {refusal.sample} does not "
            "use every parameter; this run steps the unused ones with a gradient of zero, so "
            'that weight decay and momentum act on them (docs/troubleshooting.md, "Unused '
            'parameters")'
        )

    def checkpoint_skipped(self, samples: int, doubt: str) -> None:
        """Report that no checkpoint is written, and the reason."""
        self._print(f"checkpoint at {samples} samples skipped, the previous one is kept: {doubt}")

    def _print(self, text: str) -> None:
        console.say(f"aladdin_mpi: {text}")

    def _name(self, rank: int) -> str:
        where = f"rank {rank}, host {self._transport.host_names[rank]}"
        if rank < self._first_worker:
            return f"server {rank} ({where})"
        return f"worker {rank - self._first_worker} ({where})"

    def _why(self, refusal: Refusal, source: int) -> str:
        reason, at = refusal.reason, f"at sample {refusal.sample}"
        if reason == Reason.LOSS:
            return f"a loss of {refusal.value:.4g} is above --max-loss {at}"
        if reason == Reason.LOSS_ONLY:
            return f"the loss is {refusal.value} {at}, but its gradient is finite"
        if reason == Reason.ARRIVED:
            return f"bucket {refusal.bucket} was not finite when rank {source} received it {at}"
        if reason == Reason.CHECKSUM:
            name = Tag(int(refusal.value)).name.lower().replace("_", " ")
            return f"a message ({name}) had a wrong checksum when rank {source} received it"
        found = "NaN" if reason == Reason.NAN else "an infinite value"
        return f"{found} in bucket {refusal.bucket} {at}"


def _last_words(name: str, refusal: Refusal, why: str) -> str:
    if refusal.reason == Reason.LOSS:
        remedy = "Raise --max-loss, lower --lr, or lengthen --warmup-epochs."
    else:
        remedy = "Lower --lr, lengthen --warmup-epochs, or check the model and its data."
    return (
        f"{name}: the last {refusal.in_a_row} gradients were all refused (the latest: {why}). "
        f"{remedy} To return to the last checkpoint, which precedes them, pass --resume."
    )
