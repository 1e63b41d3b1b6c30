"""What a new group of ranks makes of the state in which the former one came apart.

As where a checkpoint is resumed by other numbers of ranks, but from the memory of those who are
left: rank 0 puts their states together and gives all what they need. Buckets of a server that is
lost are the mean of what the workers have of them. Gradients that were on their way, or had been
summed and not applied, are lost; samples that nobody had computed are granted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.control.exchange import (
    all_or_none,
    broadcast,
    broadcast_tensor,
    gather,
    receive_object,
    send_object,
)
from aladdin_mpi.control.tags import COORDINATOR, Tag
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import LostError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.exchange.server_replica import keeper_of
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.process import console
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.context import Context, make_layout
from aladdin_mpi.run.elasticity import Membership, TakeoverPlan
from aladdin_mpi.run.plan import Origin
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.resizing import StateAssembly, share, taken
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.session import Session
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import COMPUTED, TrainingWorker


@dataclass
class LoopProgress:
    """One worker's.

    Attributes:
        epoch: the present one of a loop by epochs.
        reductions: calls of ``run.reduce()``.
        first_epoch: with which a rank begins that has taken a place in mid-run; None: it has not.
    """

    epoch: int = 0
    reductions: int = 0
    first_epoch: int | None = None

    def as_plain(self) -> dict[str, int]:
        """For another rank."""
        return {"epoch": self.epoch, "reductions": self.reductions}

    def take_over(self, others: Collection[Mapping[str, Any]], is_new: bool) -> None:
        """Another group of ranks goes on.

        Args:
            others: what its workers tell of themselves, this one among them.
            is_new: this rank had no part in the former group.

        Raises:
            LostError: some workers have ended a call of ``run.reduce()`` in which others wait, who
                would wait for ever.
        """
        told = {each["reductions"] for each in others}
        if len(told) > 1:
            raise LostError(
                "a rank was lost while run.reduce() was under way, which some had ended"
            )
        if is_new and told:
            (self.reductions,) = told
            self.epoch = self.first_epoch = max(each["epoch"] for each in others)


@dataclass(frozen=True)
class RankSnapshot:
    """What is left of this rank's part in a group that has come apart.

    Attributes:
        part: its state, as a checkpoint has it.
        local: its random numbers, buffers, and what the user's loop keeps.
        folder: of the run, which rank 0 holds locked.
        facts: reported to all ranks of the rendezvous.
        previous: what is left of the group before, if training has not started since.
    """

    part: dict[str, Any]
    local: dict[str, Any]
    folder: OpenFolder
    facts: dict[str, Any]
    previous: RankSnapshot | None = None

    def of(self, group: int) -> RankSnapshot:
        """Return what is left of the group of this number, or else of the oldest group."""
        if self.facts["group"] == group or self.previous is None:
            return self
        return replace(self.previous.of(group), folder=self.folder)


def snapshot(rank: Rank, group: Membership, progress: LoopProgress) -> RankSnapshot:
    """Of ``rank``, when its group has come apart, and of the ``progress`` of its loop."""
    session, computed, taken, not_given = rank.session, 0, None, None
    role, coordinator = session.role, session.coordinator
    if isinstance(role, TrainingWorker):
        computed = role.worker.samples - session.computed_before
    elif isinstance(role, ServerAlgorithm):
        workers = range(role.n)
        taken = [role.taken_from(worker) for worker in workers]
        not_given = [role.server.not_given_by(worker) for worker in workers]
    keeper = rank.standby.copy
    if coordinator is not None:
        keeper = coordinator.knowledge()
    origin = session.origin
    facts = {
        "group": group.number,
        "ranks": list(group.ranks),
        "drawn": session.began_at,
        "ended_at": session.ended_at,
        "computed": computed,
        "progress": None if isinstance(role, ServerAlgorithm) else progress.as_plain(),
        "taken": taken,
        "not_given": not_given,
        "keeper": keeper,
        "is_first": coordinator is not None,
        "origin": {
            "workers": origin.workers,
            "servers": origin.servers,
            "past": [list(period.taken) for period in origin.past],
            "schedule_step": session.plan.schedule_step,
            "begun": origin.begun,
        },
        "folder": str(rank.folder.path.absolute()),
    }
    local = session.local.state_dict()
    local = {**local, "user": dict(local["user"])}
    with rank.context.transport.atomic():  # mirrors come by a handler
        mirrors = {} if rank.replicas is None else {k: dict(v) for k, v in rank.replicas.of.items()}
    return RankSnapshot({**session.part(), "mirrors": mirrors}, local, rank.folder, facts)


@dataclass(frozen=True)
class Takeover:
    """What a rank needs to take its place in a new group.

    Attributes:
        base: the transport among all ranks of the job.
        plan: of the new group, the same at all of its ranks.
        mine: what is left of this rank's part; None: it had none.
    """

    base: Transport
    plan: TakeoverPlan
    mine: RankSnapshot | None

    @property
    def origin(self) -> Origin:
        """Return that of the former group."""
        facts = self.plan.origin
        past = tuple(Period(tuple(taken)) for taken in facts["past"])
        begun = facts["begun"] and tuple(facts["begun"])
        return Origin(facts["workers"], facts["servers"], past, facts["schedule_step"], begun)

    def open_folder(self, transport: Transport) -> OpenFolder:
        """Open the run's folder."""
        if self.mine is not None and self.mine.folder.lock is not None:
            return self.mine.folder
        path = next(iter(self.plan.known.values()))["folder"]
        return run_folder.take_over(transport, Path(path))

    @property
    def numbers(self) -> list[int]:
        """The workers' numbers with which they began the run; spares come after all."""
        members = self.plan.members
        first, _ = members.full
        return [rank - first for rank in members.ranks[members.servers :]]

    @property
    def progress(self) -> list[dict[str, int]]:
        """The progress of the surviving workers' loops."""
        present = self.plan.present.values()
        return [each["progress"] for each in present if each["progress"] is not None]


def take_over(session: Session, takeover: Takeover) -> None:
    """Take up in a new group what is left of the former one; every rank of it calls it."""
    context = session.context
    transport, first = context.transport, context.transport.rank == COORDINATOR
    origin = takeover.origin
    options, algorithm, replica = context.options, context.algorithm, context.replica
    layout = make_layout(options, algorithm, replica, origin.servers, origin.workers)
    parts = _StateParts(transport, takeover)
    assembly = StateAssembly(parts.of, algorithm, origin, layout, session.role, replica.parameters)
    merged = all_or_none(transport, lambda: assembly.merged() if first else None)
    parts.end()
    if merged is not None:
        merged.granted = takeover.plan.accounting["granted"][origin.servers :]
    merged = share(transport, merged)
    lost = _reconcile(merged, takeover)
    past = (*origin.past, Period(taken(merged)))
    _keep_own_counts(merged, takeover)
    now = replace(origin, workers=context.workers, servers=context.servers, past=past)
    if first:
        losses = _losses(takeover, lost, options.step_size)
        known = takeover.plan.accounting
        session.take_over(takeover.plan.drawn, merged, now, known, losses)
    else:
        session.take_over(takeover.plan.drawn, merged, now)
    _take_local(session, takeover)


def _keep_own_counts(merged: MergedState, takeover: Takeover) -> None:
    """Each worker that is left counts on from what it has counted itself.

    What one has counted that is a server now goes to another: see :meth:`MergedState.carried`.
    """
    servers, counts = takeover.origin.servers, merged.counts
    was = {rank: counts[place] for place, rank in enumerate(takeover.plan.former[servers:])}
    now = takeover.plan.members.ranks[takeover.plan.members.servers :]
    kept = [was.pop(rank, None) for rank in now]
    merged.number = len(counts)
    merged.counts = [*kept, *(each for each in was.values() if each is not None)]


def _reconcile(merged: MergedState, takeover: Takeover) -> int:
    """Let the books go on as if what is lost had not been; returns how many gradients are.

    Those of workers that live, which are not applied to every bucket.
    """
    books = merged.server
    if not books:
        return 0
    computed = int(merged.total(COMPUTED))
    if not takeover.plan.has_server:
        # No server is left to say: the workers' models stand for what was applied.
        known = takeover.plan.accounting["failures"]
        books["applied"] = computed - sum(each.get("gradients_lost", 0) for each in known)
        books["from_failed"] = books["applied"] - computed
        return 0
    lost = takeover.plan.gradients_lost(computed, books["from_failed"], books["applied"])
    books["from_failed"] = books["applied"] - computed
    merged.keeps_sums = False
    return lost


def _losses(takeover: Takeover, gradients: int, step: int) -> list[dict[str, Any]]:
    """Of each rank that is lost: who it was, and what is lost with it."""
    found: list[dict[str, Any]] = [
        {
            "rank": loss.rank,
            "host": takeover.base.host_names[loss.rank],
            "what": "left out" if loss.rank in takeover.base.excluded else "died",
            "samples_lost": loss.samples,
            "gradients_lost": 0,
        }
        for loss in takeover.plan.losses(step)
    ]
    if found:
        found[0]["gradients_lost"] = gradients
        found[0]["samples_lost"] += gradients * step
    return found


class _StateParts:
    """The states of the former group, which rank 0 receives one after another."""

    def __init__(self, transport: Transport, takeover: Takeover) -> None:
        self._transport = transport
        self._plan, self._mine = takeover.plan, takeover.mine
        self._sources = self._plan.server_sources(keeper_of)
        self._sends = []
        if transport.rank and self._mine is not None and takeover.base.rank in self._plan.present:
            self._sends = send_object(transport, self._mine.part, COORDINATOR, Tag.STATE)

    def of(self, place: int) -> dict[str, Any] | None:
        """Return, at rank 0, the state of a rank of the former group; None: it is lost."""
        source = self._plan.source(place)
        if source is None:
            return None
        if source == COORDINATOR:
            assert self._mine is not None
            # What is put together is changed, and may be asked for in another group.
            part = deepcopy(self._mine.part)
        else:
            part = receive_object(self._transport, source, Tag.STATE)
        return {**part, "mirrors": self._replicas(place, part["mirrors"])}

    def _replicas(self, place: int, stored: Mapping[int, Any]) -> dict[int, Any]:
        """The replicas that the plan takes from a rank of the former group."""
        rank = self._plan.former[place]
        return {
            each.server: stored[each.server]
            for each in self._sources
            if each.kind == "replica" and each.rank == rank and each.server in stored
        }

    def end(self) -> None:
        """Rank 0 has them all."""
        self._transport.wait(*self._sends)


def _take_local(session: Session, takeover: Takeover) -> None:
    """A rank keeps what it has of its own; one that is new gets the first worker's buffers."""
    context = session.context
    transport, is_new = context.transport, takeover.mine is None
    if takeover.mine is not None:
        session.local.load_state_dict(takeover.mine.local)
    if not context.is_real:
        return
    everyone: list[bool] = broadcast(transport, gather(transport, is_new))
    if not any(everyone):
        return
    source = everyone.index(False)
    for buffer in context.replica.buffers():
        flat = buffer.view(-1) if buffer.dim() == 0 else buffer
        values = flat.detach().cpu().clone().contiguous()
        broadcast_tensor(transport, values, source)
        if is_new:
            flat.copy_(values)


def tell(context: Context, takeover: Takeover) -> None:
    """At rank 0: say that the run goes on."""
    servers, workers = context.servers, context.workers
    beside = f" and {servers} server{'s' * (servers > 1)}" if servers else ""
    console.say(
        f"aladdin_mpi: the run goes on with {workers} worker{'s' * (workers > 1)}{beside} from "
        f"sample {takeover.plan.drawn}"
    )
