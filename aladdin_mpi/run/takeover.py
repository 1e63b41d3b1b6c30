"""What a new group of ranks makes of the state in which the former one came apart.

As where a checkpoint is resumed by other numbers of ranks, but from the memory of those who are
left: rank 0 puts their states together and gives all what they need. Buckets of a server that is
lost are the mean of what the workers have of them. Gradients that were on their way, or had been
summed and not applied, are lost; samples that nobody had computed are granted anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
from aladdin_mpi.errors import LostError, RefusedError
from aladdin_mpi.exchange.server_algorithm import ServerAlgorithm
from aladdin_mpi.process import console, guard
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.checkpoint import LocalState
from aladdin_mpi.run.context import Context, make_layout
from aladdin_mpi.run.membership import Membership, NextGroup
from aladdin_mpi.run.plan import Origin
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.resizing import StateAssembly, share
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.segments import Segments
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.merged_state import MergedState
from aladdin_mpi.worker.role import TrainingWorker


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


Brought = Mapping[str, Any]
"""What a rank tells the next group's first rank of itself; see :func:`snapshot`."""


@dataclass(frozen=True)
class RankSnapshot:
    """What is left of this rank's part in a group that has come apart.

    Attributes:
        part: its state, as a checkpoint has it.
        local: its random numbers, buffers, and what the user's loop keeps.
        folder: of the run, which rank 0 holds locked.
        brought: what all are told.
    """

    part: dict[str, Any]
    local: dict[str, Any]
    folder: OpenFolder
    brought: dict[str, Any]


def snapshot(rank: Rank, group: Membership, progress: LoopProgress) -> RankSnapshot:
    """Of ``rank``, when its group has come apart, and of the ``progress`` of its loop."""
    segments, computed, taken, not_given = rank.segments, 0, None, None
    if isinstance(rank.role, TrainingWorker):
        computed = rank.role.worker.samples - segments.computed_before
    elif isinstance(rank.role, ServerAlgorithm):
        workers = range(rank.role.n)
        taken = [rank.role.taken_from(worker) for worker in workers]
        not_given = [rank.role.server.not_given_by(worker) for worker in workers]
    keeper = rank.standby.copy
    if rank.books is not None:
        keeper = rank.books.coordinator.knowledge()
    origin = segments.origin
    brought = {
        "group": group.number,
        "ranks": list(group.ranks),
        "drawn": segments.began_at,
        "ended_at": segments.ended_at,
        "computed": computed,
        "progress": None if isinstance(rank.role, ServerAlgorithm) else progress.as_plain(),
        "taken": taken,
        "not_given": not_given,
        "keeper": keeper,
        "is_first": rank.books is not None,
        "origin": {
            "workers": origin.workers,
            "servers": origin.servers,
            "past": [list(period.taken) for period in origin.past],
            "schedule_step": rank.plan.schedule_step,
            "begun": origin.begun,
        },
        "folder": str(rank.folder.path.absolute()),
    }
    local = segments.local_state()
    local = {**local, "user": dict(local["user"])}
    with rank.context.transport.atomic():  # mirrors come by a handler
        mirrors = {} if rank.kept is None else {k: dict(v) for k, v in rank.kept.of.items()}
    return RankSnapshot({**segments.part(), "mirrors": mirrors}, local, rank.folder, brought)


@dataclass(frozen=True)
class Takeover:
    """What a rank needs to know to take its place in a new group.

    Attributes:
        base: the transport among all ranks of the job.
        members: of the new group.
        former: ranks of the former one, by their numbers in the job.
        brought: by each rank that is left.
        mine: what is left of this rank's part; None: it had none.
    """

    base: Transport
    members: Membership
    merged: Sequence[int]
    brought: Mapping[int, Brought]
    mine: RankSnapshot | None

    @property
    def told(self) -> list[Brought]:
        """What the new group's ranks bring that had a part in the former one."""
        return [
            each
            for rank, each in self.brought.items()
            if rank in self.members.ranks and each.get("ranks") == [*self.merged]
        ]

    @property
    def _known(self) -> list[Brought]:
        """The same, with that of ranks which have been lost since."""
        return [each for each in self.brought.values() if each.get("ranks") == [*self.merged]]

    @property
    def origin(self) -> Origin:
        """Of the former group."""
        told = self._known[0]["origin"]
        past = tuple(Period(tuple(taken)) for taken in told["past"])
        begun = told["begun"] and tuple(told["begun"])
        return Origin(told["workers"], told["servers"], past, told["schedule_step"], begun)

    def open_folder(self, transport: Transport) -> OpenFolder:
        """That of the run."""
        if self.mine is not None and self.mine.folder.lock is not None:
            return self.mine.folder
        return run_folder.take_over(transport, Path(self._known[0]["folder"]))

    @property
    def numbers(self) -> list[int]:
        """Of the workers, those with which they began the run; spares come behind all."""
        first, _ = self.members.full
        return [rank - first for rank in self.members.ranks[self.members.servers :]]

    def check(self) -> None:
        """Check that the run can go on.

        Raises:
            LostError: at the new rank 0: nobody is left who knows where it was.
            RefusedError: at the others.
        """
        if any(each["keeper"] is not None for each in self._known):
            return
        if self.base.rank != self.members.ranks[0]:
            self.base.sleep(guard.YIELD_SECONDS)  # that one ends the job meanwhile
            raise RefusedError
        first = self.merged[0]
        raise LostError(
            f"rank {first} (host {self.base.host_names[first]}), which kept the run's books, and "
            "its deputy are both lost"
        )

    @property
    def keeper(self) -> dict[str, Any]:
        """What the former rank 0 knew, from itself or else from its deputy."""
        known = [each for each in self._known if each["keeper"] is not None]
        first = [each for each in known if each["is_first"]]
        newest = max(known, key=lambda each: float(each["keeper"]["seconds"]))
        found: dict[str, Any] = (first[0] if first else newest)["keeper"]
        return found

    @property
    def progress(self) -> list[dict[str, int]]:
        """How far the loops have come of the workers that are left."""
        return [each["progress"] for each in self.told if each["progress"] is not None]

    @property
    def lost(self) -> list[int]:
        """Ranks of the former group that are not in the new one, by their numbers in the job."""
        return [rank for rank in self.merged if rank not in self.members.ranks]

    def taken_from(self, rank: int, name: str = "taken") -> int | None:
        """Gradients of a rank that all servers have got in the segment; None: there are none."""
        worker = self.merged.index(rank) - self.origin.servers
        taken = [each[name] for each in self.told if each[name] is not None]
        return min((each[worker] for each in taken if worker >= 0), default=None)

    @property
    def drawn(self) -> int:
        """Samples drawn and not given back: those computed, and those granted to who is lost."""
        ended_at = next((each["ended_at"] for each in self.told if each["ended_at"]), None)
        if ended_at is not None:
            return int(ended_at)
        drawn = max(each["drawn"] for each in self.told)
        computed = sum(each["computed"] for each in self.told if each["drawn"] == drawn)
        budget = self.keeper["budget"]
        if budget["opened"] != drawn:
            return drawn + computed
        granted = sum(budget["granted"][self.merged.index(rank)] for rank in self.lost)
        return int(drawn + computed + granted + budget["passed_over"])


def former_ranks(gathered: NextGroup) -> Sequence[int]:
    """The ranks of the newest group in which anybody has had a part.

    Raises:
        LostError: nobody has had any.
    """
    told = [each for each in gathered.brought.values() if "ranks" in each]
    if not told:
        raise LostError("all ranks that trained have failed, and only spare ranks are left")
    newest = max(told, key=lambda each: each["group"])
    ranks: list[int] = newest["ranks"]
    return ranks


def take_over(context: Context, local: LocalState, segments: Segments, takeover: Takeover) -> None:
    """Take up in a new group what is left of the former one; every rank of it calls it."""
    transport, first = context.transport, context.transport.rank == COORDINATOR
    origin = takeover.origin
    options, algorithm, replica = context.options, context.algorithm, context.replica
    layout = make_layout(options, algorithm, replica, origin.servers, origin.workers)
    parts = _StateParts(transport, takeover)
    assembly = StateAssembly(parts.of, algorithm, options, origin, layout, replica)
    merged = all_or_none(transport, lambda: assembly.merged(context.workers) if first else None)
    parts.end()
    if merged is not None:
        merged.granted = takeover.keeper["granted"][origin.servers :]
    merged = share(transport, merged)
    lost = _reconcile(merged, takeover)
    past = (*origin.past, Period(merged.taken))
    _keep_own_counts(merged, takeover)
    segments.origin = replace(origin, workers=context.workers, servers=context.servers, past=past)
    if first:
        losses = _losses(takeover, lost, options.step_size)
        keeper = takeover.keeper
        segments.take_over(takeover.drawn, merged, keeper, losses)
    else:
        segments.take_over(takeover.drawn, merged)
    _take_local(context, local, takeover)


def _keep_own_counts(merged: MergedState, takeover: Takeover) -> None:
    """Each worker that is left counts on from what it has counted itself.

    What one has counted that is a server now goes to another: see :meth:`MergedState.carried`.
    """
    servers, counts = takeover.origin.servers, merged.counts
    was = {rank: counts[place] for place, rank in enumerate(takeover.merged[servers:])}
    now = takeover.members.ranks[takeover.members.servers :]
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
    computed = sum(int(each["computed"]) for each in merged.counts if each is not None)
    if not any(each["taken"] is not None for each in takeover.told):
        # No server is left to say: the workers' models stand for what was applied.
        known = takeover.keeper["failures"]
        books["applied"] = computed - sum(each.get("gradients_lost", 0) for each in known)
        books["from_failed"] = books["applied"] - computed
        return 0
    from_lost = sum(takeover.taken_from(rank, "not_given") or 0 for rank in takeover.lost)
    lost = max(0, computed + books["from_failed"] + from_lost - books["applied"])
    books["from_failed"] = books["applied"] - computed
    books["pending"] = []
    return int(lost)


def _losses(takeover: Takeover, gradients: int, step: int) -> list[dict[str, Any]]:
    """Of each rank that is lost: who it was, and what is lost with it."""
    found: list[dict[str, Any]] = []
    budget, servers = takeover.keeper["budget"], takeover.origin.servers
    for rank in takeover.lost:
        place, taken = takeover.merged.index(rank), takeover.taken_from(rank)
        granted = budget["granted"][place]
        if place < servers:
            samples = 0
        elif taken is not None:
            samples = max(0, granted - step * taken)
        else:
            samples = granted - budget["computed"][place]
        found.append(
            {
                "rank": rank,
                "host": takeover.base.host_names[rank],
                "what": "left out" if rank in takeover.base.excluded else "died",
                "samples_lost": samples,
                "gradients_lost": 0,
            }
        )
    if found:
        found[0]["gradients_lost"] = gradients
        found[0]["samples_lost"] += gradients * step
    return found


class _StateParts:
    """The states of the former group, which come to rank 0 one after another."""

    def __init__(self, transport: Transport, takeover: Takeover) -> None:
        self._transport = transport
        self._takeover = takeover
        self._sends = []
        if transport.rank and takeover.mine is not None:
            self._sends = send_object(transport, takeover.mine.part, COORDINATOR, Tag.STATE)

    def of(self, place: int) -> dict[str, Any] | None:
        """At rank 0: of a rank of the former group; None: it is lost."""
        rank = self._takeover.merged[place]
        now = self._takeover.members.place(rank)
        if now is None or "ranks" not in self._takeover.brought[rank]:
            return None
        if now == COORDINATOR:
            assert self._takeover.mine is not None
            # What is put together is changed, and may be asked for in another group.
            return deepcopy(self._takeover.mine.part)
        found: dict[str, Any] = receive_object(self._transport, now, Tag.STATE)
        return found

    def end(self) -> None:
        """Rank 0 has them all."""
        self._transport.wait(*self._sends)


def _take_local(context: Context, local: LocalState, takeover: Takeover) -> None:
    """A rank keeps what it has of its own; one that is new gets the first worker's buffers."""
    transport = context.transport
    is_new = takeover.mine is None
    if takeover.mine is not None:
        local.load_state_dict(takeover.mine.local)
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
        f"sample {takeover.drawn}"
    )
