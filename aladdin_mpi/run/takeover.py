"""Takeover of a revoked group's state by the next group of ranks.

It works like resuming a checkpoint with another number of ranks, but from memory: rank 0 merges the
states of the surviving ranks and sends the result to all. The mean of the workers' models replaces
a lost server's buckets. Gradients in flight, or summed and not applied, are lost; samples that
surviving ranks were granted and have not computed are granted again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.control.exchange import (
    packed,
    receive_object,
    send_object,
    unpacked,
)
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import ExcludedError, LostError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import keeper_of
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.process import console
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.elasticity import Membership, TakeoverPlan
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.session.context import Context, former_lanes, give_buffers
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.session.plan import Origin
from aladdin_mpi.session.resizing import describe_ranks, merge_lanes, taken
from aladdin_mpi.session.session import Session
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.worker.role import COMPUTED, TrainingWorker


@dataclass
class LoopProgress:
    """The progress of a worker's loop.

    Attributes:
        epoch: the present epoch of a loop by epochs.
        reductions: calls of ``run.reduce()``.
        first_epoch: the first epoch of a rank that joins during the run; else None.
        has_begun: whether the loop may have had a batch.
    """

    epoch: int = 0
    reductions: int = 0
    first_epoch: int | None = None
    has_begun: bool = False

    def take_over(self, others: Collection[Mapping[str, Any]], is_new: bool) -> None:
        """Continue in another group of ranks.

        Args:
            others: the progress of the group's workers, including this one.
            is_new: whether this rank had no part in the former group.

        Raises:
            LostError: some workers have completed a call of ``run.reduce()`` in which others would
                wait for ever.
            ExcludedError: this rank was excluded, and the others have made such calls since.
        """
        counts = {each["reductions"] for each in others}
        if len(counts) > 1:
            raise LostError(
                "a rank failed when only some workers had completed run.reduce() or run.gather()"
            )
        if is_new and counts:
            if self.has_begun and self.reductions not in counts:
                raise ExcludedError(
                    "a rank that was excluded cannot return, because the other workers have "
                    "called run.reduce() or run.gather() since; it exits"
                )
            (self.reductions,) = counts
            self.epoch = self.first_epoch = max(each["epoch"] for each in others)


@dataclass(frozen=True)
class RankSnapshot:
    """A rank's state in a revoked group.

    Attributes:
        part: its part of the run's state, as in a checkpoint.
        local: its random number generators and buffers, and the state of the user's loop.
        folder: of the run; rank 0 holds its lock.
        facts: reported to all ranks of the rendezvous.
        previous: its state in the group before, if training has not started since.
    """

    part: dict[str, Any]
    local: dict[str, Any]
    folder: OpenFolder
    facts: dict[str, Any]
    previous: RankSnapshot | None

    def of(self, group: int) -> RankSnapshot:
        """Return the snapshot of the group with this number, or else of the oldest group."""
        if self.facts["group"] == group or self.previous is None:
            return self
        return replace(self.previous.of(group), folder=self.folder)


def snapshot(
    rank: Rank, group: Membership, progress: LoopProgress, previous: RankSnapshot | None
) -> RankSnapshot:
    """Return the state of ``rank``, whose group is revoked."""
    session = rank.session
    role, coordinator, origin = session.role, session.coordinator, session.origin
    facts = {
        "group": group.number,
        "ranks": list(group.ranks),
        "drawn": session.began_at,
        "ended_at": session.ended_at,
        "computed": 0,
        "progress": None,
        "taken": None,
        "not_given": None,
        "keeper": rank.standby.copy if coordinator is None else coordinator.knowledge(),
        "is_first": coordinator is not None,
        "origin": {
            "workers": origin.workers,
            "servers": origin.servers,
            "past": [list(period.taken) for period in origin.past],
            "schedule_step": session.plan.schedule_step,
            "begun": origin.begun,
            **rank.context.islands.as_json(),
        },
        "folder": str(rank.folder.path.absolute()),
    }
    if isinstance(role, TrainingWorker):
        facts["computed"] = role.worker.samples - session.computed_before
    if isinstance(role, ServerAlgorithm):
        facts["taken"] = [role.taken_from(worker) for worker in range(role.n)]
        facts["not_given"] = [role.server.not_given_by(worker) for worker in range(role.n)]
    else:
        facts["progress"] = {"epoch": progress.epoch, "reductions": progress.reductions}
    local = session.local.state_dict()
    local = {**local, "user": dict(local["user"])}
    with rank.context.transport.atomic():  # replicas are received by a handler
        mirrors = {} if rank.replicas is None else {k: dict(v) for k, v in rank.replicas.of.items()}
    part = {**session.part(), "mirrors": mirrors}
    return RankSnapshot(part, local, rank.folder, facts, previous)


@dataclass(frozen=True)
class Takeover:
    """Inputs of a rank for its place in a new group.

    Attributes:
        base: the transport among all ranks of the job.
        plan: the same at all ranks of the new group.
        mine: this rank's snapshot; None if it had no part in the former group.
    """

    base: Transport
    plan: TakeoverPlan
    mine: RankSnapshot | None

    @property
    def origin(self) -> Origin:
        """The former group's origin."""
        facts = self.plan.origin
        past = tuple(Period(tuple(taken)) for taken in facts["past"])
        begun = facts["begun"] and tuple(facts["begun"])
        islands = facts.get("islands", ()), facts.get("lanes", 1)
        step = facts["schedule_step"]
        return Origin(facts["workers"], facts["servers"], past, step, begun, *islands)

    @property
    def locked_folder(self) -> OpenFolder | None:
        """The run's folder, if this rank has locked it in the former group."""
        return None if self.mine is None or self.mine.folder.lock is None else self.mine.folder

    def open_folder(self, transport: Transport) -> OpenFolder:
        """Open the run's folder."""
        if self.locked_folder is not None:
            return self.locked_folder
        path = next(iter(self.plan.known.values()))["folder"]
        return run_folder.take_over(transport, Path(path))

    @property
    def numbers(self) -> list[int]:
        """The workers' numbers at the start of the run; spares have the highest ones."""
        members = self.plan.members
        return [rank - members.full[0] for rank in members.ranks[members.servers :]]

    @property
    def progress(self) -> list[dict[str, int]]:
        """The progress of the surviving workers' loops."""
        present = self.plan.present.values()
        return [each["progress"] for each in present if each["progress"] is not None]


def take_over(session: Session, takeover: Takeover) -> None:
    """Continue in a new group from the state of the former one; every rank calls it."""
    context, plan, origin = session.context, takeover.plan, takeover.origin
    is_first = context.transport.rank == COORDINATOR
    former = origin.ranks
    parts = _StateParts(context, takeover, former)
    merged, of_all = merge_lanes(parts.of, former, context, session.role)
    parts.end()
    of_all.granted = former.divided(plan.accounting["granted"])[origin.servers :]
    lost = _reconcile(merged, plan)
    past = (*origin.past, Period(taken(of_all)))
    _keep_own_counts(merged, of_all, former, context, plan)
    now = replace(
        origin,
        workers=context.workers,
        servers=context.servers,
        past=past,
        islands=context.islands.members if context.islands.size > 1 else (),
        lanes=context.islands.lanes,
    )
    known = plan.accounting if is_first else None
    step = context.options.step_size * context.islands.size / len(context.whole.outside)
    losses = _losses(takeover, former, lost, step) if is_first else ()
    is_over = any(each["ended_at"] is not None for each in plan.present.values())
    session.take_over(plan.drawn, merged, now, of_all, is_over, known, losses)
    _take_local(session, takeover)


def _keep_own_counts(
    merged: MergedState,
    of_all: MergedState,
    former: Islands,
    context: Context,
    plan: TakeoverPlan,
) -> None:
    """Let each surviving worker continue its own counters, in its lane and in those of all.

    Another worker carries those of a worker that is now a server: :meth:`MergedState.carried`.
    """
    every = range(former.servers, len(plan.former))
    now_every = range(context.servers, context.transport.size)
    for state, before, now in (
        (merged, former.workers(), context.islands.workers()),
        (of_all, every, now_every),
    ):
        ranks = [plan.former[place] for place in before]
        was = dict(zip(ranks, state.counts, strict=bool(state.counts)))
        kept = [was.pop(plan.members.ranks[place], None) for place in now]
        state.number = len(state.counts)
        state.counts = [*kept, *(each for each in was.values() if each is not None)]


def _reconcile(merged: MergedState, plan: TakeoverPlan) -> int:
    """Make the servers' counters consistent with the losses.

    Returns:
        The number of gradients of surviving workers that are not applied to every bucket.
    """
    counters = merged.server
    if not counters:
        return 0
    computed, lost = int(merged.total(COMPUTED)), 0
    if plan.has_server:
        lost = plan.gradients_lost(computed, counters["from_failed"], counters["applied"])
        merged.keeps_sums = False
    else:  # the workers' models replace the servers' state
        failures = plan.accounting["failures"]
        counters["applied"] = computed - sum(each.get("gradients_lost", 0) for each in failures)
    counters["from_failed"] = counters["applied"] - computed
    return lost


def _losses(
    takeover: Takeover, former: Islands, gradients: int, step: float
) -> list[dict[str, Any]]:
    """Return a record of each lost rank, and of each that returns or could not, with the losses.

    ``step`` is the number of samples for each gradient.
    """
    base, members = takeover.base, takeover.plan.members
    losses: list[dict[str, Any]] = [
        {
            "rank": rank,
            "host": base.host_names[rank],
            "what": "left out" if rank in (*base.excluded, *members.ranks) else "died",
            "samples_lost": samples,
            "gradients_lost": 0,
            "mate": _failed_mate(takeover, former, rank),
            "returns": None,
        }
        for rank, samples in takeover.plan.losses(step).items()
    ]
    returned = [
        rank
        for rank in sorted({*members.ranks, *members.spares})
        if members.returned_at(rank) > takeover.plan.number
    ]
    if not losses and not returned:
        returned = sorted(base.excluded)[:1]
    losses += [
        {
            "rank": rank,
            "samples_lost": 0,
            "gradients_lost": 0,
            "returns": rank not in base.excluded,
        }
        for rank in returned
    ]
    if losses:
        losses[0]["gradients_lost"] = gradients
        losses[0]["samples_lost"] += int(gradients * step)
    return losses


def _failed_mate(takeover: Takeover, former: Islands, rank: int) -> int | None:
    """Return the failed rank for which others have excluded this member of its island."""
    base, ranks = takeover.base, takeover.plan.former
    place = ranks.index(rank)
    if place < former.servers or rank not in base.excluded:
        return None
    mates = {ranks[each] for each in former.mates(place)}
    return min(mates & (base.failed - base.excluded), default=None)


class _StateParts:
    """The states of the former group, which the first rank of each lane receives one by one.

    A rank sends its state to those whose lanes have values of its own, or to rank 0 if it had no
    lane.
    """

    def __init__(self, context: Context, takeover: Takeover, former: Islands) -> None:
        self._transport = transport = context.transport
        self._plan, self._mine = takeover.plan, takeover.mine
        self._sends: list[Request] = []
        rank = takeover.base.rank
        if self._mine is not None and rank in self._plan.present:
            for dest in _receivers(context, former, self._plan.former.index(rank)):
                if dest != transport.rank:
                    self._sends += send_object(transport, self._mine.part, dest, Tag.STATE)

    def of(self, place: int) -> dict[str, Any] | None:
        """Return the state of a rank of the former group; None if it is lost."""
        source = self._plan.source(place)
        if source is None:
            return None
        if source == self._transport.rank:
            assert self._mine is not None
            # Merging changes the states, which are on the CPU, and another takeover may need this.
            part = unpacked(packed(self._mine.part))
        else:
            part = receive_object(self._transport, source, Tag.STATE)
        rank = self._plan.former[place]
        mirrors = {
            server: stored
            for server, stored in part["mirrors"].items()
            if self._plan.replica_rank(server, keeper_of) == rank
        }
        return {**part, "mirrors": mirrors}

    def end(self) -> None:
        """Wait until all states have been received."""
        self._transport.wait(*self._sends)


def _receivers(context: Context, former: Islands, place: int) -> list[int]:
    """Return the ranks that merge the state of the former rank at this place."""
    lane = former.lane(place)
    if lane is None or former.lanes == context.islands.lanes == 1:
        return [COORDINATOR]
    mine, islands = former_lanes(context, former)[lane], context.islands
    return [islands.ranks(each.number)[0] for each in context.lanes if each.shared(mine)]


def _take_local(session: Session, takeover: Takeover) -> None:
    """Restore a rank's local state; a new rank receives the buffers of a former one."""
    if takeover.mine is not None:
        session.local.load_state_dict(takeover.mine.local)
    give_buffers(session.context, takeover.mine is None)


def print_takeover(context: Context, takeover: Takeover) -> None:
    """Print at rank 0 that the run continues."""
    members, names = takeover.plan.members, takeover.base.host_names
    for rank, group, _ in members.returns:
        if group == members.number:
            console.say(f"aladdin_mpi: rank {rank} (host {names[rank]}) has returned")
    ranks = describe_ranks(context.workers, context.servers)
    console.say(f"aladdin_mpi: the run continues with {ranks} from sample {takeover.plan.drawn}")
