"""Elasticity as a pure state machine: membership, succession and takeover.

One machine runs on each rank of the job. Events go in through :meth:`ElasticityMachine.handle`,
decisions come out. This module performs no I/O and needs neither a transport nor torch: a driver
(:mod:`.elasticity_driver`, :mod:`.takeover`) turns messages into events and carries out the
decisions.

When a group of ranks is revoked, the surviving ranks of the job hold a rendezvous. Its leader is
the lowest surviving rank. Every other rank sends it a JOIN with its newest membership and its
facts; the leader decides on the next group and announces it. If the leader fails, the ranks that
wait for it restart the rendezvous. Two rules keep the decisions consistent:

- The leader depends only on which ranks survive, not on the newest membership that a rank knows.
  A leader that fails while it announces a group leaves ranks with different memberships.
- While a group is being set up, every member is needed. So no rank trains in a group that
  another member does not know.

Some members may complete a set-up that others do not. So each rank keeps what it has of the former
group until training starts, and the next group continues from the newest one of which every
surviving member has its state.

An excluded rank that still runs may return, as a spare rank without a state: the leader of the next
rendezvous invites it, and the announcement readmits it on every rank. As a leader could fail while
it announces that, a rank that has returned leads no rendezvous as long as another can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from typing import Any, TypeAlias

from aladdin_mpi.errors import LostError

RankFacts: TypeAlias = Mapping[str, Any]
"""A rank's report on its part in its last group, by :func:`.takeover.snapshot`; empty: none.

``previous`` has the facts about the group before it, if training has not started since.
"""


# -- membership -------------------------------------------------------------------------
@dataclass(frozen=True)
class Membership:
    """The ranks of a group by their numbers in the job, the servers first.

    Attributes:
        number: counts the groups from 1.
        ranks: the group's ranks.
        servers: number of servers among them.
        spares: ranks that wait for a place.
        full: numbers of servers and workers with which the run began.
        returns: the ranks that were excluded and have returned, each with the number of the first
            group after its last return, and how often it has returned.
    """

    number: int
    ranks: tuple[int, ...]
    servers: int
    spares: tuple[int, ...]
    full: tuple[int, int]
    returns: tuple[tuple[int, int, int], ...] = ()

    def place(self, rank: int) -> int | None:
        """Return a rank's number in the group; None: it is not a member."""
        return self.ranks.index(rank) if rank in self.ranks else None

    def returned_at(self, rank: int) -> int:
        """Return the number of the first group after a rank's last return; 0: it never returned."""
        return next((group for each, group, _ in self.returns if each == rank), 0)

    def incarnation(self, rank: int) -> int:
        """Return how often a rank has returned."""
        return next((incarnation for each, _, incarnation in self.returns if each == rank), 0)

    def with_returned(self, incarnations: Mapping[int, int]) -> Membership:
        """Return this group with excluded ranks, and how often each has returned, as spare ranks.

        They return in the next group.
        """
        others = [each for each in self.returns if each[0] not in incarnations]
        now = [(rank, self.number + 1, incarnation) for rank, incarnation in incarnations.items()]
        return replace(
            self,
            ranks=tuple(rank for rank in self.ranks if rank not in incarnations),
            servers=sum(rank not in incarnations for rank in self.ranks[: self.servers]),
            spares=(*(rank for rank in self.spares if rank not in incarnations), *incarnations),
            returns=tuple(sorted([*others, *now])),
        )


def begin(size: int, servers: int, spares: int) -> Membership:
    """Return the first group of a job of ``size`` ranks."""
    active = size - spares
    full = servers, active - servers
    return Membership(1, tuple(range(active)), servers, tuple(range(active, size)), full)


def next_membership(
    before: Membership,
    surviving: Collection[int],
    is_over: bool = False,
    keeps_workers: bool = False,
) -> Membership:
    """Return the group that follows ``before`` if only the ranks ``surviving`` are left.

    Spare ranks replace failed ones, unless the training ``is_over``. If the last server fails and
    there is no spare, a worker replaces it. With ``keeps_workers``, which form islands, no other
    rank takes the place of a worker, and no worker that of a server.

    Raises:
        LostError: no worker, or no rank for a server, is left.
    """
    servers = [rank for rank in before.ranks[: before.servers] if rank in surviving]
    workers = [rank for rank in before.ranks[before.servers :] if rank in surviving]
    waiting = [rank for rank in before.spares if rank in surviving]
    full_servers, full_workers = before.full
    needs_server = bool(full_servers) and not servers
    spares = [] if is_over and not (needs_server and len(workers) == 1) else [*waiting]
    if needs_server and (spares or (len(workers) > 1 and not keeps_workers)):
        servers = [(spares or workers).pop(0)]
    if keeps_workers:
        full_workers = 0
    for places, full in ((workers, full_workers), (servers, full_servers)):
        while spares and len(places) < full:
            places.append(spares.pop(0))
    if not workers or (full_servers and not servers):
        lost = ", ".join(str(rank) for rank in before.ranks if rank not in surviving)
        raise LostError(f"rank {lost} has failed, and too few ranks remain to train")
    return replace(
        before,
        number=before.number + 1,
        ranks=(*servers, *workers),
        servers=len(servers),
        spares=tuple(rank for rank in waiting if rank not in (*servers, *workers)),
    )


# -- events -----------------------------------------------------------------------------
@dataclass(frozen=True)
class RanksLost:
    """All ranks that this rank knows to have failed, or to be excluded."""

    failed: frozenset[int]


@dataclass(frozen=True)
class GroupRevoked:
    """This rank has left its group, or was called as a spare rank of it.

    ``facts`` are None during the group's set-up, and for a spare rank.
    """

    facts: RankFacts | None


@dataclass(frozen=True)
class JoinArrived:
    """A rank has joined the rendezvous that this rank leads.

    Attributes:
        before: the newest membership that it knows.
    """

    rank: int
    before: Membership
    facts: RankFacts


@dataclass(frozen=True)
class JoinTimedOut:
    """A rank has not joined in time."""

    rank: int


@dataclass(frozen=True)
class MembersArrived:
    """The leader has announced the next group, and the facts of every rank that joined."""

    members: Membership
    facts: Mapping[int, RankFacts]


@dataclass(frozen=True)
class Excluded:
    """The others have excluded this rank, which still runs."""


@dataclass(frozen=True)
class RanksReturned:
    """Excluded ranks that have answered the leader's invitation.

    Attributes:
        incarnations: how often each of them has returned.
    """

    incarnations: Mapping[int, int]


@dataclass(frozen=True)
class Readmitted:
    """The others have readmitted this rank.

    Attributes:
        announced: the next group, which includes this rank.
    """

    announced: MembersArrived


Event: TypeAlias = (
    RanksLost
    | GroupRevoked
    | JoinArrived
    | JoinTimedOut
    | MembersArrived
    | Excluded
    | RanksReturned
    | Readmitted
)


# -- decisions --------------------------------------------------------------------------
@dataclass(frozen=True)
class JoinRendezvous:
    """Send the leader a JOIN, and wait for its announcement."""

    leader: int
    before: Membership
    facts: RankFacts


@dataclass(frozen=True)
class AwaitJoin:
    """Wait until this rank joins."""

    rank: int


@dataclass(frozen=True)
class ExcludeRank:
    """Treat this rank as failed, although it may still run."""

    rank: int


@dataclass(frozen=True)
class InviteExcluded:
    """Invite the excluded ranks that still run, and wait briefly for their answers."""

    number: int
    """Number of the next group."""


@dataclass(frozen=True)
class AwaitReadmission:
    """Wait, as an excluded rank, until the others readmit this rank or the run ends."""


@dataclass(frozen=True)
class AnnounceMembers:
    """Send the next group and all facts to these ranks."""

    dests: tuple[int, ...]
    members: Membership
    facts: Mapping[int, RankFacts]


@dataclass(frozen=True)
class WaitForPlace:
    """Wait, as a spare rank, until a member of the group fails or the run ends."""

    members: Membership


@dataclass(frozen=True)
class FormGroup:
    """Set up this group from the state of the former one."""

    plan: TakeoverPlan


@dataclass(frozen=True)
class LeaveRun:
    """Leave the run, which continues without this rank's island.

    Attributes:
        lost: the failed rank of the island.
    """

    lost: int


@dataclass(frozen=True)
class EndRun:
    """End the run with a LostError.

    Attributes:
        reporter: the only rank that reports the reason; None: every rank does.
    """

    reason: str
    reporter: int | None = None


Decision: TypeAlias = (
    JoinRendezvous
    | AwaitJoin
    | ExcludeRank
    | InviteExcluded
    | AwaitReadmission
    | AnnounceMembers
    | WaitForPlace
    | FormGroup
    | LeaveRun
    | EndRun
)
Decisions: TypeAlias = tuple[Decision, ...]


# -- takeover ---------------------------------------------------------------------------
@dataclass(frozen=True)
class TakeoverPlan:
    """Plan for continuing in a new group from the state of the former one.

    Attributes:
        members: the new group.
        number: the former group's.
        former: the former group's ranks.
        facts: those of each rank that joined the rendezvous.
    """

    members: Membership
    number: int
    former: tuple[int, ...]
    facts: Mapping[int, RankFacts]

    @cached_property
    def known(self) -> dict[int, RankFacts]:
        """The facts about the former group, including those of ranks that have failed since."""
        return {
            rank: report
            for rank, facts in self.facts.items()
            for report in reports(facts)
            if report["group"] == self.number and report["ranks"] == [*self.former]
        }

    @cached_property
    def present(self) -> dict[int, RankFacts]:
        """The facts of the new group's ranks that had a part in the former one."""
        return {r: each for r, each in self.known.items() if r in self.members.ranks}

    @property
    def origin(self) -> RankFacts:
        """The former group's numbers of workers and servers, and its history."""
        origin: RankFacts = next(iter(self.known.values()))["origin"]
        return origin

    @property
    def servers(self) -> int:
        """The former group's number of servers."""
        return int(self.origin["servers"])

    @property
    def _surviving(self) -> list[int]:
        """Ranks of the former group that are in the new one, and have not been excluded since."""
        has_returned = self.members.returned_at
        return [
            rank
            for rank in self.former
            if rank in self.members.ranks and has_returned(rank) <= self.number
        ]

    @property
    def lost(self) -> list[int]:
        """Ranks of the former group whose state is lost."""
        return [rank for rank in self.former if rank not in self._surviving]

    @property
    def is_complete(self) -> bool:
        """Whether every member of the former group that survives has its state."""
        surviving = set(self._surviving)
        return bool(surviving) and surviving == set(self.present)

    @property
    def is_accounting_known(self) -> bool:
        """Whether a surviving rank has the accounting of the former rank 0."""
        return any(each["keeper"] is not None for each in self.known.values())

    @property
    def has_worker(self) -> bool:
        """Whether a worker of the former group survives, with its model."""
        return any(self.former.index(rank) >= self.servers for rank in self.present)

    @cached_property
    def accounting(self) -> dict[str, Any]:
        """The accounting of the former rank 0: its own, or else the newest standby copy."""
        known = [each for each in self.known.values() if each["keeper"] is not None]
        newest = max(known, key=lambda each: (each["is_first"], each["keeper"]["seconds"]))
        accounting: dict[str, Any] = newest["keeper"]
        return accounting

    # -- samples ------------------------------------------------------------------------
    @property
    def segment(self) -> int:
        """The samples drawn when the newest segment began."""
        return int(max(each["drawn"] for each in self.present.values()))

    @property
    def is_segment_accounted(self) -> bool:
        """Whether the accounting is of the newest segment; a standby copy may be older."""
        return bool(self.accounting["budget"]["opened"] == self.segment)

    @property
    def drawn(self) -> int:
        """Samples drawn and not granted again: those computed, and those granted to lost ranks."""
        present = self.present.values()
        if ended_at := next(filter(None, (each["ended_at"] for each in present)), None):
            return int(ended_at)
        computed = sum(each["computed"] for each in present if each["drawn"] == self.segment)
        drawn = int(self.segment + computed)
        if not self.is_segment_accounted:
            return drawn
        budget = self.accounting["budget"]
        granted = sum(budget["granted"][self.former.index(rank)] for rank in self.lost)
        return int(drawn + granted + budget["passed_over"])

    def _taken_by_servers(self, worker: int, name: str) -> int | None:
        """Return a worker's gradients that all servers have; None: there are no servers."""
        taken = [each[name] for each in self.present.values() if each[name] is not None]
        return min((each[worker] for each in taken if worker >= 0), default=None)

    def _worker(self, rank: int) -> int:
        """Return the number of a rank, or of its island, among the former workers; or below 0."""
        place = self.former.index(rank)
        islands = self.origin.get("islands", ())
        numbers = (n for n, island in enumerate(islands) if place in island)
        return next(numbers, place - self.servers)

    def losses(self, step: float) -> dict[int, int]:
        """Return the samples lost with each lost rank; a gradient stands for ``step`` samples."""
        return {rank: self._samples_lost(rank, step) for rank in self.lost}

    def _samples_lost(self, rank: int, step: float) -> int:
        budget, place = self.accounting["budget"], self.former.index(rank)
        if place < self.servers or not self.is_segment_accounted:
            return 0  # samples of another segment are computed, or granted again
        granted = budget["granted"][place]
        taken = self._taken_by_servers(self._worker(rank), "taken")
        if taken is not None:
            return max(0, int(granted - step * taken))
        return int(granted - budget["computed"][place])

    # -- gradients ----------------------------------------------------------------------
    @property
    def has_server(self) -> bool:
        """Whether a server of the former group survives, with its count of applied gradients."""
        return any(each["taken"] is not None for each in self.present.values())

    def gradients_lost(self, computed: int, from_failed: int, applied: int) -> int:
        """Return how many gradients of surviving workers are not applied to every bucket.

        Args:
            computed: gradients of surviving workers.
            from_failed: gradients of workers that had failed before, as far as they are applied.
            applied: gradients that the servers have applied.
        """
        workers = {self._worker(rank) for rank in self.lost}
        from_lost = sum(self._taken_by_servers(worker, "not_given") or 0 for worker in workers)
        return max(0, int(computed + from_failed + from_lost - applied))

    # -- state --------------------------------------------------------------------------
    def source(self, place: int) -> int | None:
        """Return the new group's rank that has a former rank's state; None: it is lost."""
        rank = self.former[place]
        return self.members.place(rank) if rank in self.present else None

    def replica_rank(self, server: int, holder: Callable[[int, int], int]) -> int | None:
        """Return the rank whose replica replaces a lost server's state, or None.

        The mean of the workers' models replaces buckets without a replica. ``holder`` returns the
        place of the rank that holds the replica of a server, given the number of servers.
        """
        keeper = self.former[holder(server, self.servers)]
        is_lost = self.former[server] not in self.present
        return keeper if is_lost and keeper in self.present else None


def reports(facts: RankFacts) -> Iterator[RankFacts]:
    """Yield a rank's facts about each group of which it has any, the newest group first."""
    while "ranks" in facts:
        yield facts
        facts = facts.get("previous", {})


def plan_takeover(members: Membership, facts: Mapping[int, RankFacts]) -> TakeoverPlan | None:
    """Return the plan from the newest usable state; None if no rank has any state.

    If the run cannot continue, the plan is that of the newest group.
    """
    groups = {
        (int(report["group"]), tuple(report["ranks"]))
        for each in facts.values()
        for report in reports(each)
    }
    plans = [TakeoverPlan(members, *group, facts) for group in sorted(groups, reverse=True)]
    possible = [plan for plan in plans if plan.is_accounting_known and plan.has_worker]
    complete = [plan for plan in possible if plan.is_complete]
    return next(iter([*complete, *possible, *plans]), None)


# -- the machine ------------------------------------------------------------------------
class MachineState(Enum):
    """State of a rank's elasticity machine."""

    SETUP = auto()
    """The rank takes its place in a group."""
    TRAINING = auto()
    SPARE = auto()
    """The rank waits for a place."""
    LEADING = auto()
    """The rank waits for the others to join the rendezvous."""
    JOINING = auto()
    """The rank has joined the rendezvous, and waits for the leader."""
    EXCLUDED = auto()
    """The rank is excluded, and waits for its return."""
    ENDED = auto()


class ElasticityMachine:
    """The elasticity of one rank: events in, decisions out.

    The decisions of :meth:`handle` replace earlier ones that have not been carried out. The last
    one is the next action.

    Args:
        rank: this rank's number in the job.
        size: the number of ranks in the job.
        members: the first group.
        host_name: returns the name of a rank's host.
        can_regroup: whether the surviving ranks can form a new group.
        needs_all: whether the algorithm needs each of its workers.
        islands: ranks that form one worker, and fail together.
        may_return: whether excluded ranks may return.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        members: Membership,
        host_name: Callable[[int], str] = str,
        can_regroup: bool = True,
        needs_all: bool = False,
        islands: Sequence[Sequence[int]] = (),
        may_return: bool = False,
    ) -> None:
        self.rank = rank
        self.members = members
        self.may_return = may_return and can_regroup and not islands
        self.failed: frozenset[int] = frozenset()
        """Ranks that are lost to the run, with the other ranks of their islands."""
        self._found_lost: frozenset[int] = frozenset()
        self.phase = MachineState.SPARE if self.is_spare else MachineState.SETUP
        self.coming: set[int] = set()
        """Ranks that have announced, since the last rendezvous, that they will join."""
        self._all = range(size)
        self._host_name = host_name
        self._can_regroup, self._needs_all = can_regroup, needs_all
        self._islands = {rank: frozenset(island) for island in islands for rank in island}
        self._facts: RankFacts = {}
        """This rank's facts about groups from which the next one may have to continue."""
        self._leader = rank
        self._newest = members
        """The newest membership known to the ranks that have joined, at the leader."""
        self._joined: dict[int, RankFacts] = {}
        """Facts of the ranks that have joined, at the leader."""
        self._has_invited = False
        """Whether this rank has invited the excluded ranks, as the leader."""

    @property
    def next_leader(self) -> int:
        """The rank that would lead a rendezvous now."""
        eligible = [rank for rank in self.surviving if not self.members.incarnation(rank)]
        return next(iter(eligible or self.surviving), self.rank)

    @property
    def newest(self) -> Membership:
        """The newest group that this rank, as the leader, knows by now."""
        return self._newest

    @property
    def surviving(self) -> list[int]:
        """The ranks of the job that are not known to have failed."""
        return [rank for rank in self._all if rank not in self.failed]

    @property
    def is_spare(self) -> bool:
        """Whether this rank has no place in the group."""
        return self.rank in self.members.spares

    def needs(self, place: int) -> bool:
        """Return whether the present group is revoked if its rank at this place fails.

        Without spares an algorithm may continue in place without some workers.
        """
        if not self._can_regroup:
            return False
        is_new = self.phase is MachineState.SETUP and self.members.number > 1
        if self._needs_all or bool(self.members.spares) or is_new:
            return True
        ranks = self.members.ranks
        island = self._islands.get(ranks[place], {ranks[place]})
        return not island.isdisjoint(ranks[: max(1, self.members.servers)])

    def note_lost(self, failed: Collection[int]) -> None:
        """Update the ranks that are known to have failed, for the next event.

        The others of an island are lost too, although they may still run.
        """
        self._found_lost |= frozenset(failed)
        self.failed |= frozenset(failed).union(*(self._islands.get(rank, ()) for rank in failed))

    def readmit(self, rank: int) -> None:
        """Note that a rank has returned, before the event in which the others learn that."""
        self.failed -= {rank}
        self._found_lost -= {rank}

    def complete_setup(self) -> None:
        """Note that this rank has taken its place in the group."""
        self.phase = MachineState.TRAINING

    def start_training(self) -> None:
        """Note that every rank has taken its place: nothing continues from former groups."""
        self._facts = {}

    def handle(self, event: Event) -> Decisions:
        """Return the decisions that follow from an event."""
        if self.phase is MachineState.ENDED:
            return ()
        match event:
            case RanksLost(failed):
                return self._lose(failed)
            case GroupRevoked(facts):
                if facts is not None:
                    self._facts = {**facts, "previous": self._facts}
                return self._meet()
            case JoinArrived(rank, before, facts):
                return self._let_join(rank, before, facts)
            case JoinTimedOut(rank):
                return self._exclude_late(rank)
            case MembersArrived(members, facts_of_all):
                return self._take_members(members, facts_of_all)
            case Excluded():
                self.phase, self._facts = MachineState.EXCLUDED, {}
                return (AwaitReadmission(),)
            case RanksReturned(incarnations):
                return self._take_back(incarnations)
            case Readmitted(announced):
                return self._enter(announced.members, announced.facts)

    def _lose(self, failed: frozenset[int]) -> Decisions:
        self.note_lost(failed)
        if self.phase is MachineState.SPARE:
            return self._wait_for_place()
        meets = self.phase in (MachineState.JOINING, MachineState.LEADING)
        if meets and not {self.rank, self._leader}.isdisjoint(self.failed):
            return self._meet()
        return self._await_next() if self.phase is MachineState.LEADING else ()

    def _next(
        self, before: Membership, surviving: Collection[int], is_over: bool = False
    ) -> Membership:
        return next_membership(before, surviving, is_over, bool(self._islands))

    # -- rendezvous ---------------------------------------------------------------------
    def _meet(self) -> Decisions:
        """Join a rendezvous, or lead it."""
        try:
            self._next(self.members, self.surviving)
        except LostError as error:
            return self._end(str(error))
        if self.rank in self.failed:
            return self._leave()
        self._leader = self.next_leader
        if self._leader != self.rank:
            self.phase = MachineState.JOINING
            return (JoinRendezvous(self._leader, self.members, self._facts),)
        self.phase = MachineState.LEADING
        self._newest, self._joined = self.members, {self.rank: self._facts}
        self._has_invited = not self.may_return
        return self._await_next()

    def _let_join(self, rank: int, before: Membership, facts: RankFacts) -> Decisions:
        if self.phase is not MachineState.LEADING:
            return ()
        self._joined[rank] = facts
        self._newest = max(self._newest, before, key=lambda each: each.number)
        return self._await_next()

    def _exclude_late(self, rank: int) -> Decisions:
        if self.phase is not MachineState.LEADING or rank in self.failed or rank in self._joined:
            return ()
        if rank in self.coming:
            return (AwaitJoin(rank),)
        self.note_lost((rank,))
        return (ExcludeRank(rank), *self._await_next())

    def _await_next(self) -> Decisions:
        awaited = [rank for rank in self.surviving if rank not in self._joined]
        if awaited:
            return (AwaitJoin(awaited[0]),)
        if not self._has_invited:
            return (InviteExcluded(self._newest.number + 1),)
        return self._decide()

    def _take_back(self, incarnations: Mapping[int, int]) -> Decisions:
        """Take back the ranks that have answered this leader's invitation."""
        if self.phase is not MachineState.LEADING:
            return ()
        self._has_invited = True
        self._newest = self._newest.with_returned(incarnations)
        self._joined |= {rank: {} for rank in incarnations}
        return self._await_next()

    def _decide(self) -> Decisions:
        """Decide on the next group: every surviving rank has joined."""
        if self.rank in self.failed:
            # Its announcement could reach some ranks only, and no member would notice its exit.
            return self._leave()
        facts = self._joined
        surviving = [rank for rank in facts if rank not in self.failed]
        is_over = any(each.get("ended_at") is not None for each in facts.values())
        try:
            members = self._next(self._newest, surviving, is_over)
        except LostError as error:
            return self._end(str(error))
        # Others of a failed island do not survive, but wait, or will.
        dests = tuple(rank for rank in self._all if rank not in {self.rank, *self._found_lost})
        return (AnnounceMembers(dests, members, facts), *self._enter(members, facts))

    def _take_members(self, members: Membership, facts: Mapping[int, RankFacts]) -> Decisions:
        if self.phase is not MachineState.JOINING:
            return ()
        late = [rank for rank in self.surviving if rank not in facts]
        self.note_lost(late)
        return (*map(ExcludeRank, late), *self._enter(members, facts))

    def _enter(self, members: Membership, facts: Mapping[int, RankFacts]) -> Decisions:
        """Take a place in the next group, or wait for one."""
        if self.rank not in (*members.ranks, *members.spares):
            return self._leave()
        self.members, self._joined = members, {}
        self.coming.clear()
        if self.is_spare:
            self.phase = MachineState.SPARE
            return self._wait_for_place()
        plan = plan_takeover(members, facts)
        if plan is None:
            return self._end("all training ranks have failed, and only spare ranks remain")
        if not plan.is_accounting_known:
            first = plan.former[0]
            reason = (
                f"rank {first} (host {self._host_name(first)}), the coordinator, and its standby "
                "have both failed"
            )
            return self._end(reason, members.ranks[0])
        if not plan.has_worker:
            return self._end(
                "no surviving rank has a worker's state to continue from", members.ranks[0]
            )
        self.phase = MachineState.SETUP
        self._facts = plan.known.get(self.rank, self._facts)
        return (FormGroup(plan),)

    def _wait_for_place(self) -> Decisions:
        if self.failed.intersection(self.members.ranks):
            return self._meet()
        return (WaitForPlace(self.members),)

    def _leave(self) -> Decisions:
        """Leave the run, because a rank of this one's island is lost."""
        self.phase = MachineState.ENDED
        mates = self._islands[self.rank] - {self.rank}
        return (LeaveRun(min(mates & self._found_lost or mates)),)

    def _end(self, reason: str, reporter: int | None = None) -> Decisions:
        self.phase = MachineState.ENDED
        return (EndRun(reason, reporter),)
