"""Failures of ranks while others continue, and the resulting losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aladdin_mpi.control.budget import Budget
from aladdin_mpi.control.exchange import gather
from aladdin_mpi.errors import LostError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.process import console
from aladdin_mpi.session.context import Context
from aladdin_mpi.transport.base import surviving_ranks
from aladdin_mpi.worker.role import Role

LOST = "samples_lost", "gradients_lost"


class Failures:
    """Rank 0's record of failed ranks.

    Args:
        moment: returns the run's position, such as its samples drawn.
    """

    def __init__(
        self, context: Context, budget: Budget, moment: Callable[[], dict[str, Any]]
    ) -> None:
        self._transport = transport = context.transport
        self._budget = budget
        self._first_worker = context.servers
        self._islands = context.islands
        self._needed = context.needs_all
        self._moment = moment
        self._silence = context.options.worker_timeout
        self._least = context.options.min_workers
        self._open: list[tuple[int, dict[str, Any]]] = []
        self._lost: set[int] = set()
        self._is_complete = False
        self.records: list[dict[str, Any]] = []
        """One for each failure: ``rank``, ``host``, ``what`` ("died" or "left out"), ``samples``
        and ``seconds`` of the run when it was detected, and ``samples_lost``; and for an excluded
        rank that has returned, ``returned``: the run's samples at that time."""
        transport.on_failure(self._lose)

    def note_earlier(self) -> None:
        """Record the ranks that failed before this record existed."""
        for rank in sorted(self._transport.failed):
            self._lose(rank)

    def take_over(self, losses: Sequence[Mapping[str, Any]]) -> None:
        """Record the ranks whose failure has ended the previous group, and the losses.

        Each of ``losses`` has its ``rank`` in the job, its ``host``, ``what`` ("died" or "left
        out"), the numbers of samples and gradients lost with it, and the failed ``mate`` of its
        island for which it was left out, or None. If the group has ended so that an excluded rank
        ``returns``, or could, the losses are in addition to those with its exclusion.
        """
        for loss in losses:
            known = self._lasting(loss["rank"])
            if loss["returns"] is not None:
                self._add(loss, known)
                continue
            record = next((each for each in known if "samples_lost" not in each), None)
            if known and record is None:
                continue  # it was lost in an earlier segment
            record = record or self._record_coordinator(loss)
            record |= {name: loss[name] for name in LOST}

    def _add(self, loss: Mapping[str, Any], known: Sequence[dict[str, Any]]) -> None:
        """Add a loss to the last record of its rank; a spare rank may have none."""
        for record in (known or self.records)[-1:]:
            record |= {name: record.get(name, 0) + loss[name] for name in LOST}
            if known and loss["returns"]:
                record["returned"] = self._moment()["samples"]

    def _lasting(self, rank: int) -> list[dict[str, Any]]:
        """Return the records of the failures of a rank from which it has not returned."""
        return [each for each in self.records if each["rank"] == rank and "returned" not in each]

    def _record_coordinator(self, loss: Mapping[str, Any]) -> dict[str, Any]:
        """Record the failure of a rank 0, which only its successor can do."""
        transport, moment = self._transport, self._moment()
        fate = "has failed"
        if loss["mate"] is not None:
            fate = f"is in the island of rank {loss['mate']}, which has failed, and was excluded"
        elif loss["what"] == "left out":
            fate = "has stopped responding and was excluded"
        console.say(
            f"aladdin_mpi: rank {loss['rank']} (host {loss['host']}) {fate} at sample "
            f"{moment['samples']}; rank {transport.original_ranks[0]} (host "
            f"{transport.host_names[0]}) is the new coordinator"
        )
        record = {name: loss[name] for name in ("rank", "host", "what")} | moment
        self.records.append(record)
        return record

    def complete(self) -> None:
        """Note that the model is complete on rank 0, which needs no other rank any more."""
        self._is_complete = True

    def _lose(self, rank: int) -> None:
        if rank in self._lost:
            return
        self._lost.add(rank)
        moment = self._moment()
        host = self._transport.host_names[rank]
        number = self._transport.original_ranks[rank]
        excluded = rank in self._transport.excluded
        event = self._event(rank) if excluded else "has failed"
        what = f"rank {number} (host {host}) {event} at sample {moment['samples']}"
        workers = self.surviving_workers
        self._check_can_continue(rank, what, workers)
        if self._transport.is_revoked(without=rank):
            prospect = "the surviving ranks form a new group"
        elif self._budget.used_up:
            prospect = "all samples were already assigned, and the run completes without it"
        elif workers < self._least:
            prospect = f"fewer than --min-workers {self._least} remain, and the run is saved"
        else:
            prospect = f"training continues with {workers} worker{'s' * (workers > 1)}"
        console.say(f"aladdin_mpi: {what}; {'it is excluded, and ' * excluded}{prospect}")
        fate = "left out" if excluded else "died"
        record = {"rank": number, "host": host, "what": fate, **moment}
        self._open.append((rank, record))
        self.records.append(record)

    def _event(self, rank: int) -> str:
        """Return the reason for which a rank is excluded."""
        failed = self._transport.failed - self._transport.excluded
        mates = self._islands.mates(rank) if rank >= self._first_worker else []
        lost = next((each for each in mates if each in failed), None)
        if lost is None:
            return f"has sent no heartbeat for {self._silence:g} s"
        return f"is in the island of rank {self._transport.original_ranks[lost]}, which has failed,"

    def _check_can_continue(self, rank: int, what: str, workers: int) -> None:
        """Raise LostError if the run cannot continue without the rank."""
        if self._transport.is_revoked(without=rank):
            return
        if rank < self._first_worker and not self._is_complete:
            raise LostError(f"{what}; it held a part of the model")
        if self._needed and not self._is_complete:
            raise LostError(f"{what}; {self._needed} needs every worker")
        if not self._transport.survives:
            raise LostError(
                f"{what}; without ULFM (mpirun --with-ft ulfm) the other ranks cannot continue"
            )
        if not (workers or self._is_complete):
            raise LostError(f"{what}; no worker remains")

    def close(self, taken: list[dict[str, int] | None]) -> None:
        """Count the losses of the segment that has ended.

        ``taken`` has for each rank, if it is a server, the batches taken from failed ranks.
        """
        for rank, record in self._open:
            whole = [facts[str(rank)] for facts in taken if facts and str(rank) in facts]
            steps = min(whole, default=self._budget.computed(rank))
            record["samples_lost"] = self._budget.lost(rank, steps)
        self._open.clear()

    @property
    def surviving_workers(self) -> int:
        """The number of workers that have not failed."""
        return sum(rank >= self._first_worker for rank in surviving_ranks(self._transport))

    @property
    def samples(self) -> int:
        """Total of samples lost."""
        return sum(record.get("samples_lost", 0) for record in self.records)

    @property
    def gradients(self) -> int:
        """Gradients of surviving workers that were lost when groups were revoked."""
        return sum(record.get("gradients_lost", 0) for record in self.records)


def record_losses(context: Context, role: Role, failures: Failures | None) -> None:
    """Record, on every rank at the end of a segment, the losses with failed ranks."""
    transport, first = context.transport, context.servers
    if not transport.survives:
        return
    taken = {}
    if isinstance(role, ServerAlgorithm):
        workers = [rank for rank in transport.failed if rank >= first]
        turns = len(context.whole.outside)
        number = context.islands.number
        taken = {str(rank): role.taken_from(number(rank)) // turns for rank in workers}
    everywhere = gather(transport, taken)
    if failures is not None:
        failures.close(everywhere)
