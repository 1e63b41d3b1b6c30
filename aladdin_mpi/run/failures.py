"""Ranks that fail while the others train on: what was lost with them, and who is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aladdin_mpi.control.budget import Budget
from aladdin_mpi.control.exchange import gather
from aladdin_mpi.errors import LostError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport, surviving_ranks
from aladdin_mpi.worker.role import Role


class Failures:
    """Rank 0's record of the ranks that have failed.

    Args:
        first_worker: the first worker's rank.
        needed: what cannot go on without a worker, such as "ar-sgd"; None: training can.
        moment: where the run is, such as its samples drawn.
        silence: seconds after which a silent rank is excluded.
    """

    def __init__(
        self,
        transport: Transport,
        budget: Budget,
        first_worker: int,
        needed: str | None,
        moment: Callable[[], dict[str, Any]],
        silence: float,
    ) -> None:
        self._transport = transport
        self._budget = budget
        self._first_worker = first_worker
        self._needed = needed
        self._moment = moment
        self._silence = silence
        self._open: list[tuple[int, dict[str, Any]]] = []
        self._lost: set[int] = set()
        self._is_complete = False
        self.records: list[dict[str, Any]] = []
        """A failure each: ``rank``, ``host``, ``what`` ("died" or "left out"), ``samples`` and
        ``seconds`` of the run when it was noticed, and ``samples_lost``."""
        transport.on_failure(self._lose)

    def note_earlier(self) -> None:
        """Take up who had failed before there was this record."""
        for rank in sorted(self._transport.failed):
            self._lose(rank)

    def take_over(self, losses: Sequence[Mapping[str, Any]]) -> None:
        """Write down the ranks whose loss has brought this group about.

        Args:
            losses: of each its ``rank`` in the job, its ``host``, "died" or "left out", and what is
                lost with it.
        """
        for loss in losses:
            known = [each for each in self.records if each["rank"] == loss["rank"]]
            record = next((each for each in known if "samples_lost" not in each), None)
            if known and record is None:
                continue  # its books are closed: it was lost in an earlier segment
            record = record or self._first_told(loss)
            record |= {name: loss[name] for name in ("samples_lost", "gradients_lost")}

    def _first_told(self, loss: Mapping[str, Any]) -> dict[str, Any]:
        """Of a rank 0, whose loss none but its successor can tell of."""
        transport, moment = self._transport, self._moment()
        fate = "hangs, and is excluded" if loss["what"] == "left out" else "has failed"
        console.say(
            f"aladdin_mpi: rank {loss['rank']} (host {loss['host']}) {fate} at sample "
            f"{moment['samples']}, and rank {transport.original_ranks[0]} (host "
            f"{transport.host_names[0]}) keeps the run's books now"
        )
        record = {name: loss[name] for name in ("rank", "host", "what")} | moment
        self.records.append(record)
        return record

    def complete(self) -> None:
        """The model is complete at rank 0: whoever fails from now on is not needed any more."""
        self._is_complete = True

    def _lose(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        moment = self._moment()
        host = self._transport.host_names[rank]
        number = self._transport.original_ranks[rank]
        what = f"rank {number} (host {host}) {self._fate(rank)} at sample {moment['samples']}"
        self._check_goes_on(rank, what)
        excluded = rank in self._transport.excluded
        prospect = self._prospect()
        if self._transport.is_revoked(without=rank):
            prospect = "the others go on from what they have"
        console.say(f"aladdin_mpi: {what}; {'it is excluded, and ' * excluded}{prospect}")
        fate = "left out" if excluded else "died"
        record = {"rank": number, "host": host, "what": fate, **moment}
        self._open.append((rank, record))
        self.records.append(record)

    @property
    def _workers(self) -> int:
        """How many are left."""
        return sum(rank >= self._first_worker for rank in surviving_ranks(self._transport))

    def _check_goes_on(self, rank: int, what: str) -> None:
        """Raise LostError if the run cannot go on without the rank."""
        if self._transport.is_revoked(without=rank):
            return
        if rank < self._first_worker and not self._is_complete:
            raise LostError(f"{what}; it kept a part of the model")
        if self._needed and not self._is_complete:
            raise LostError(f"{what}; {self._needed} needs every worker")
        if not self._transport.survives:
            raise LostError(f"{what}; without ULFM (mpirun --with-ft ulfm) the others cannot go on")
        if not (self._workers or self._is_complete):
            raise LostError(f"{what}; no worker is left")

    def _prospect(self) -> str:
        if self._budget.used_up:
            return "every sample had been drawn, and the run ends without it"
        return f"training goes on with {self._workers} worker{'s' * (self._workers > 1)}"

    def _fate(self, rank: int) -> str:
        if rank in self._transport.excluded:
            return f"has sent no heartbeat for {self._silence:g} s"
        return "has failed"

    def close(self, taken: list[dict[str, int] | None]) -> None:
        """A segment is over: count what was lost in it.

        Args:
            taken: of every rank what :func:`taken_from_failed` says there.
        """
        for rank, record in self._open:
            whole = [facts[str(rank)] for facts in taken if facts and str(rank) in facts]
            steps = min(whole, default=self._budget.computed(rank))
            record["samples_lost"] = self._budget.lost(rank, steps)
        self._open.clear()

    @property
    def samples(self) -> int:
        """Samples lost in all."""
        return sum(record.get("samples_lost", 0) for record in self.records)

    @property
    def gradients(self) -> int:
        """Gradients of workers that live which were lost when groups came apart."""
        return sum(record.get("gradients_lost", 0) for record in self.records)


def taken_from_failed(transport: Transport, role: Role, first_worker: int) -> dict[str, int]:
    """Of a server: the gradients that it has taken, in this segment, from ranks that failed."""
    if not isinstance(role, ServerAlgorithm):
        return {}
    workers = [rank for rank in transport.failed if rank >= first_worker]
    return {str(rank): role.taken_from(rank - first_worker) for rank in workers}


def record_losses(
    transport: Transport, role: Role, first_worker: int, failures: Failures | None
) -> None:
    """At the end of a segment, on every rank: what died with ranks in it."""
    if not transport.survives:
        return
    taken = gather(transport, taken_from_failed(transport, role, first_worker))
    if failures is not None:
        failures.close(taken)
