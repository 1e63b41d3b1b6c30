"""Property tests of the elasticity machine: thousands of schedules, without MPI and without torch.

A schedule simulates every rank's machine, the messages between them, and the times at which each
rank learns of failures. All of it depends on a seed; a failed test names the seed, which replays
it. ``ALADDIN_MPI_SCHEDULES=500`` runs 25 times as many schedules.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from aladdin_mpi.errors import LostError
from aladdin_mpi.hooks.standby import standby_coordinator
from aladdin_mpi.run.elasticity import (
    AnnounceMembers,
    AwaitJoin,
    Decision,
    ElasticityMachine,
    EndRun,
    Event,
    ExcludeRank,
    FormGroup,
    GroupRevoked,
    JoinArrived,
    JoinRendezvous,
    JoinTimedOut,
    LeaveRun,
    MachineState,
    MembersArrived,
    Membership,
    RankFacts,
    RanksLost,
    TakeoverPlan,
    WaitForPlace,
    begin,
    next_membership,
    plan_takeover,
)

TIMEOUT = "the transport's timeout"
SCHEDULES = int(os.environ.get("ALADDIN_MPI_SCHEDULES", "20"))
BLOCKS = 20
PER_BLOCK = 10 * SCHEDULES
"""Schedules per test: 20 blocks of 200."""


Move = Callable[[], None]
"""An event that can happen next."""


def holder(server: int, servers: int) -> int:
    """Return the rank that keeps a server's replica, as ``server_replica.keeper_of`` does."""
    return (server + 1) % servers if servers > 1 else servers


def facts(
    rank: int, members: Membership, drawn: int, ended_at: int | None = None, standby: int = 1
) -> RankFacts:
    """Return the facts that a rank of a group reports.

    The ranks at the places 0 and ``standby`` have the accounting.
    """
    place = members.place(rank)
    assert place is not None
    accounting = {"seconds": float(members.number), "place": place}
    return {
        "group": members.number,
        "ranks": [*members.ranks],
        "drawn": drawn,
        "ended_at": ended_at,
        "computed": 0,
        "taken": None,
        "keeper": accounting if place in (0, standby) else None,
        "is_first": place == 0,
        "origin": {"workers": len(members.ranks) - members.servers, "servers": members.servers},
    }


# -- schedules of failures and messages -------------------------------------------------
@dataclass
class Node:
    """A simulated rank: its machine, and the decision that its driver carries out."""

    machine: ElasticityMachine
    waiting: Decision | None = None
    """The decision that the driver is carrying out."""
    group: Membership | None = None
    """The group whose set-up this rank has entered."""
    is_set_up: bool = False
    has_started: bool = False
    is_hanging: bool = False
    facts: RankFacts = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Failures that the transport has reported to this rank."""
    excluded: set[int] = field(default_factory=set)


def check_sources(plan: TakeoverPlan) -> None:
    """A server's replica is used if and only if the server is lost and a member has the replica."""
    for server in range(plan.servers):
        replica = plan.former[holder(server, plan.servers)]
        is_lost = plan.former[server] not in plan.present
        expected = replica if is_lost and replica in plan.present else None
        assert plan.replica_rank(server, holder) == expected
        assert expected is None or expected in plan.members.ranks
        assert is_lost == (plan.source(server) is None)


class Simulation:
    """A job whose ranks fail while it regroups.

    Messages between two ranks arrive in order, after any delay. A failed rank's messages may or
    may not arrive. Each rank learns of a failure at any later time.
    """

    def __init__(self, seed: int, hangs: bool = False, island: int = 1) -> None:
        self.random = r = random.Random(seed)
        workers = island * r.randint(1, 5)
        servers, spares = r.choice([0, 1, 1, 2, 3]), r.choice([0, 0, 1, 2, 3])
        self.size = workers + servers + spares
        self.first = begin(self.size, servers, spares)
        needs_all = r.random() < 0.5
        self.island = island
        firsts = range(servers, servers + workers, island) if island > 1 else ()
        self.islands = [range(rank, rank + island) for rank in firsts]
        self.nodes = [
            Node(
                ElasticityMachine(
                    rank, self.size, self.first, needs_all=needs_all, islands=self.islands
                )
            )
            for rank in range(self.size)
        ]
        self.surviving = set(range(self.size))
        self.messages: dict[tuple[int, int], list[Any]] = {}
        self.may_return = r.random() < 0.5
        self.ends_training = r.random() < 0.2
        failing = r.sample(range(self.size), r.randint(1, max(1, min(self.size, 4))))
        self.to_fail = failing
        hanging = set(range(self.size)) - set(failing)
        self.to_hang = r.sample(sorted(hanging), min(len(hanging), r.randint(1, 2))) * hangs
        self.ended: str | None = None
        self.trained = self.first
        """The newest group in which training has started."""
        self.formed: dict[int, dict[int, Membership]] = {}
        """For each group number, the groups in which ranks have completed their set-up."""
        self.origins: dict[Membership, tuple[int, tuple[int, ...]]] = {}
        """For each group, the group from whose state it continues."""
        self.entered: dict[Membership, set[int]] = {}
        """For each group, the ranks that have entered its set-up."""
        for node in self.nodes:
            if not node.machine.is_spare:
                node.group, node.is_set_up, node.has_started = self.first, True, True
                node.machine.complete_setup()
            else:
                self.carry_out(node, RanksLost(frozenset()))

    # -- one rank -------------------------------------------------------------------------
    def standby(self, group: Membership) -> int:
        """Return the place of the standby coordinator, which is not in the island of place 0."""
        return 1 if group.servers else self.island

    def feed(self, node: Node, event: Event) -> None:
        node.machine.note_lost(node.lost)
        mates = node.machine.failed - node.lost - {node.machine.rank}
        node.excluded |= mates
        node.lost |= mates
        self.carry_out(node, event)

    def carry_out(self, node: Node, event: Event) -> None:
        known = node.machine.failed
        decisions = node.machine.handle(event)
        me = node.machine.rank
        if isinstance(event, RanksLost) and self.is_revoked(node, node.machine.failed - known):
            self.leave(node)
            return
        if me in node.machine.failed and node.group is not None and node.is_set_up:
            self.surviving.discard(me)  # its island leaves the group, which goes on
            return
        for decision in decisions:
            match decision:
                case JoinRendezvous(leader, before, reported):
                    assert leader in self.surviving or leader not in node.lost
                    self.send(me, leader, JoinArrived(me, before, reported))
                case ExcludeRank(rank):
                    node.excluded.add(rank)
                    node.lost.add(rank)
                case AnnounceMembers(dests, members, reported_by_all):
                    for dest in dests:
                        self.send(me, dest, MembersArrived(members, reported_by_all))
                case FormGroup(plan):
                    node.group = plan.members
                    assert plan.number >= self.trained.number, "training is undone"
                    origin = self.origins.setdefault(plan.members, (plan.number, plan.former))
                    assert origin == (plan.number, plan.former), "two states for one group"
                    check_sources(plan)
                    node.is_set_up = node.has_started = False
                    self.entered.setdefault(plan.members, set()).add(me)
                case LeaveRun(lost):
                    assert any(me in island and lost in island for island in self.islands)
                    self.surviving.discard(me)
                case EndRun(reason, reporter):
                    assert reporter is None or reporter in self.nodes[me].machine.members.ranks
                    self.ended = self.ended or reason
        if decisions:
            node.waiting = decisions[-1]

    def is_revoked(self, node: Node, lost: frozenset[int]) -> bool:
        """Return whether the node's group cannot continue without the ranks ``lost``."""
        places = [node.group.place(rank) for rank in lost] if node.group is not None else []
        return any(place is not None and node.machine.needs(place) for place in places)

    def leave(self, node: Node) -> None:
        """Leave a revoked group, and notify its other ranks."""
        assert node.group is not None
        me, group = node.machine.rank, node.group
        was_set_up, node.group = node.is_set_up, None
        node.is_set_up = node.has_started = False
        for rank in group.ranks:
            if rank != me and rank not in node.lost and group.number > 1:
                self.send(me, rank, ("revoked", group.number))
        for rank in group.spares:
            self.send(me, rank, ("excluded", frozenset(node.excluded)))
        if was_set_up:
            ended_at = 100 if self.ends_training else None
            standby = self.standby(group)
            node.facts = facts(me, group, 10 * group.number, ended_at, standby)
            self.feed(node, GroupRevoked(node.facts))
        else:
            self.feed(node, GroupRevoked(None))

    def send(self, source: int, dest: int, message: Any) -> None:
        self.messages.setdefault((source, dest), []).append(message)

    # -- moves ------------------------------------------------------------------------------
    def run(self) -> None:
        while self.ended is None:
            moves = self.moves()
            if not moves:
                return
            self.random.choice(moves)()

    def moves(self) -> list[Move]:
        moves: list[Move] = []
        for rank in self.to_fail:
            moves.append(partial(self.fail, rank))
        for rank in self.to_hang:
            moves.append(partial(self.hang, rank))
        for rank in self.surviving - set(self.to_hang):
            if self.nodes[rank].is_hanging and self.may_return and not self.is_excluded(rank):
                moves.append(partial(self.resume, rank))
        for rank in self.surviving:
            node = self.nodes[rank]
            if node.is_hanging:
                continue
            for gone in set(range(self.size)) - self.surviving - node.lost:
                moves.append(partial(self.learn, node, gone))
            group = node.group
            if group is not None and node.is_set_up and not node.has_started:
                if self.is_set_up(group):
                    moves.append(partial(self.start, node))
            elif group is not None and self.may_complete(node, group):
                moves.append(partial(self.complete, node))
        for (source, dest), queue in self.messages.items():
            if queue and self.can_take(self.nodes[dest], source, queue[0]):
                moves.append(partial(self.deliver, source, dest))
        return moves or self.timeouts()

    def timeouts(self) -> list[Move]:
        """Return the events that happen when nothing else does, because ranks hang."""
        running = [self.nodes[rank] for rank in self.surviving if not self.nodes[rank].is_hanging]
        silent = [
            (node, rank)
            for node in running
            if node.is_set_up and node.group is not None
            for rank in self.hanging(node.group) - node.lost
        ]
        if silent:  # heartbeats
            return [partial(self.exclude, node, rank) for node, rank in silent]
        late = [
            (node, node.waiting.rank)
            for node in running
            if isinstance(node.waiting, AwaitJoin) and self.nodes[node.waiting.rank].is_hanging
        ]
        if late:  # in a rendezvous
            return [partial(self.feed, node, JoinTimedOut(rank)) for node, rank in late]
        return [self.time_out] if any(map(self.is_stuck, running)) else []

    def hanging(self, group: Membership) -> set[int]:
        return {rank for rank in group.ranks if self.nodes[rank].is_hanging} & self.surviving

    def is_stuck(self, node: Node) -> bool:
        """Return whether a rank waits for a hanging rank from which no heartbeats are expected."""
        if isinstance(node.waiting, JoinRendezvous):
            return self.nodes[node.waiting.leader].is_hanging
        return node.group is not None and not node.is_set_up and bool(self.hanging(node.group))

    def time_out(self) -> None:
        """The transport's timeout ends the job."""
        self.ended = TIMEOUT

    def exclude(self, node: Node, rank: int) -> None:
        node.excluded.add(rank)
        node.lost.add(rank)
        self.carry_out(node, RanksLost(frozenset(node.lost)))

    def fail(self, rank: int) -> None:
        self.to_fail.remove(rank)
        self.surviving.discard(rank)
        for (source, _), queue in self.messages.items():
            if source == rank:  # its last messages are lost
                del queue[self.random.randint(0, len(queue)) :]

    def hang(self, rank: int) -> None:
        self.to_hang.remove(rank)
        self.nodes[rank].is_hanging = True

    def resume(self, rank: int) -> None:
        self.nodes[rank].is_hanging = False

    def is_excluded(self, rank: int) -> bool:
        return any(rank in node.excluded for node in self.nodes)

    def learn(self, node: Node, gone: int) -> None:
        node.lost.add(gone)
        self.carry_out(node, RanksLost(frozenset(node.lost)))

    def may_complete(self, node: Node, group: Membership) -> bool:
        """Return whether every rank has entered the group's set-up, led by its rank 0."""
        return not node.is_set_up and self.entered[group] == {*group.ranks}

    def complete(self, node: Node) -> None:
        assert node.group is not None
        node.is_set_up = True
        self.formed.setdefault(node.machine.rank, {})[node.group.number] = node.group
        node.machine.complete_setup()
        self.check_one_group(node.group)

    def is_set_up(self, group: Membership | None) -> bool:
        """Return whether every rank has completed the group's set-up: training can start."""
        assert group is not None
        return all(self.formed.get(rank, {}).get(group.number) == group for rank in group.ranks)

    def start(self, node: Node) -> None:
        assert node.group is not None
        node.has_started = True
        if node.group.number > self.trained.number:
            self.trained = node.group
        node.machine.start_training()

    def check_one_group(self, group: Membership) -> None:
        """Check that no other active group has a common member with this one."""
        leaving = {rank for island in self.islands for rank in island} - self.taking_part
        for rank in self.surviving - leaving:
            other = self.nodes[rank]
            if other.group in (None, group) or not other.is_set_up or other.is_hanging:
                continue
            assert other.group is not None
            assert not set(group.ranks) & set(other.group.ranks) & self.surviving, "two groups"

    def can_take(self, node: Node, source: int, message: Any) -> bool:
        """Return whether a driver would receive the message now."""
        if node.machine.rank not in self.surviving or node.is_hanging:
            return False
        if isinstance(message, JoinArrived):
            return node.waiting == AwaitJoin(source) or source in node.excluded
        if isinstance(message, MembersArrived):
            return isinstance(node.waiting, JoinRendezvous) and node.waiting.leader == source
        return True

    def deliver(self, source: int, dest: int) -> None:
        message, node = self.messages[source, dest].pop(0), self.nodes[dest]
        if source in node.excluded:
            return
        if not isinstance(message, tuple):
            self.feed(node, message)
        elif message[0] == "excluded":
            node.excluded |= message[1] - node.lost
            node.lost |= message[1]
            self.carry_out(node, RanksLost(frozenset(node.lost)))
        elif node.group is not None and node.group.number == message[1]:
            self.leave(node)

    # -- invariants -------------------------------------------------------------------------
    def check(self) -> None:
        """Check the invariants when no further event is possible."""
        by_number: dict[int, set[Membership]] = {}
        for groups in self.formed.values():
            for number, group in groups.items():
                by_number.setdefault(number, set()).add(group)
        assert all(len(groups) == 1 for groups in by_number.values()), "two decisions"
        if self.ended is not None:
            self.check_end()
            return
        if not self.taking_part:
            return
        newest = {self.nodes[rank].machine.members for rank in self.taking_part}
        assert len(newest) == 1, "surviving ranks disagree"
        (members,) = newest
        for rank in self.taking_part:
            node = self.nodes[rank]
            assert node.machine.phase in (MachineState.TRAINING, MachineState.SPARE), (
                "a rank waits for ever"
            )
            assert (rank in members.ranks) == (node.machine.phase is MachineState.TRAINING)
        assert self.surviving.issuperset(members.ranks[: max(1, members.servers)])

    @property
    def taking_part(self) -> set[int]:
        """Return the ranks that have not failed, hung or been excluded, as none of their island."""
        running = {rank for rank in self.surviving if not self.nodes[rank].is_hanging}
        found = {r for r in running if not any(r in self.nodes[o].excluded for o in running)}
        broken = [island for island in self.islands if not found.issuperset(island)]
        return found.difference(*broken)

    def check_end(self) -> None:
        """Check that the run ends if and only if no group can be formed."""
        assert self.ended is not None
        participants = self.taking_part
        trained = self.trained
        if "too few" in self.ended:
            known = [self.nodes[rank].machine.members for rank in participants] or [self.first]
            newest = max(known, key=lambda members: members.number)
            with pytest.raises(LostError):
                next_membership(newest, participants, self.ends_training, self.island > 1)
        elif "both failed" in self.ended or "no surviving" in self.ended:
            places = {0, self.standby(trained)}
            accounting = {r for r in participants if trained.place(r) in places}
            workers = participants.intersection(trained.ranks[trained.servers :])
            assert not (accounting and workers), "the run could continue"
        elif self.ended == TIMEOUT:
            assert any(self.nodes[rank].is_hanging for rank in self.surviving)
        else:
            assert not participants & set(trained.ranks)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_elasticity_survives_failures_at_any_moment(block: int) -> None:
    """Surviving ranks reach one decision, and the run ends only if no group can be formed."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        check_schedule(seed)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_hanging_ranks_are_excluded(block: int) -> None:
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        check_schedule(seed, hangs=True)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_islands_fail_as_a_whole(block: int) -> None:
    """The surviving islands reach one decision; members of a failed one leave the run."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        hangs = seed % 2 == 1
        simulation = check_schedule(seed, hangs, island=2)
        if simulation.ended is None and not hangs:
            assert simulation.surviving == simulation.taking_part, seed


def check_schedule(seed: int, hangs: bool = False, island: int = 1) -> Simulation:
    simulation = Simulation(seed, hangs, island)
    try:
        simulation.run()
        simulation.check()
    except AssertionError as error:
        names = f"schedule {seed}, hangs={hangs}, island={island}"
        raise AssertionError(f"{names}: {error}") from error
    return simulation


# -- samples and gradients --------------------------------------------------------------
@dataclass
class Segment:
    """A group's segment when it is revoked, and the facts of the remaining ranks."""

    plan: TakeoverPlan
    granted: list[int]
    computed: list[int]


STEP = 4


def segment(seed: int) -> Segment:
    """Draw a segment: every worker has computed some of its leased samples."""
    r = random.Random(seed)
    servers, workers = r.choice([0, 1, 2]), r.randint(2, 5)
    first = begin(servers + workers, servers, 0)
    began_at = 100 * r.randint(0, 3)
    granted, computed = [0] * servers, [0] * servers
    for _ in range(workers):
        leases = [STEP] * r.randint(0, 6)
        granted.append(sum(leases))
        computed.append(STEP * r.randint(0, len(leases)))
    while True:
        lost = set(r.sample(first.ranks, r.randint(1, len(first.ranks) - 1)))
        if set(first.ranks[servers:]) - lost and len(first.ranks) - len(lost) > (servers > 0):
            break
    members = next_membership(first, set(first.ranks) - lost)
    is_stale = r.random() < 0.2
    budget = {
        "opened": began_at - 50 * is_stale,
        "granted": granted,
        "computed": computed,
        "passed_over": r.choice([0, 0, 7]),
    }
    accounting = {"seconds": 1.0, "budget": budget}
    taken = [each // STEP for each in computed[servers:]]
    reported = {
        rank: {
            **facts(rank, first, began_at),
            "computed": computed[rank],
            "taken": taken if rank < servers else None,
            "not_given": [0] * workers if rank < servers else None,
            "keeper": accounting,
        }
        for rank in members.ranks
    }
    return Segment(TakeoverPlan(members, 1, first.ranks, reported), granted, computed)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_sample_is_computed_leased_again_or_counted_as_lost(block: int) -> None:
    """Each leased sample is in exactly one of these states."""
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        drawn = segment(seed)
        plan, budget = drawn.plan, drawn.plan.accounting["budget"]
        by_survivors = sum(drawn.computed[rank] for rank in plan.members.ranks)
        by_lost = sum(drawn.computed[rank] for rank in plan.lost)
        lost = sum(plan.losses(STEP).values())
        assert all(samples >= 0 for samples in plan.losses(STEP).values())
        if budget["opened"] != plan.segment:  # the copy of an earlier segment
            assert (plan.drawn, lost) == (plan.segment + by_survivors, 0), seed
            continue
        granted_again = sum(drawn.granted) - by_survivors - by_lost - lost
        assert granted_again >= 0, seed
        assert plan.drawn == plan.segment + budget["passed_over"] + by_survivors + by_lost + lost


def test_every_gradient_is_applied_or_counted_as_lost() -> None:
    """Gradients that surviving workers have computed and servers have not applied count as lost."""
    for seed in range(PER_BLOCK):
        r, plan = random.Random(seed), segment(seed).plan
        computed, from_failed = r.randint(0, 50), r.randint(0, 10)
        applied = r.randint(0, computed + from_failed)
        assert plan.gradients_lost(computed, from_failed, applied) + applied == (
            computed + from_failed
        )
        assert plan.gradients_lost(computed, from_failed, computed + from_failed + 1) == 0


# -- single rules -----------------------------------------------------------------------
def test_leaders_with_different_memberships_agree() -> None:
    """Rank 0 failed after rank 4 had received its announcement and before rank 1 had."""
    first = begin(5, 1, 2)
    second = next_membership(first, {0, 1, 4})
    assert second.ranks == (0, 1, 4)
    leaders = []
    for rank, members in ((1, first), (4, second)):
        machine = ElasticityMachine(rank, 5, members)
        machine.note_lost({0, 2, 3})
        (join_or_lead, *_) = machine.handle(GroupRevoked(None))
        leader = join_or_lead.leader if isinstance(join_or_lead, JoinRendezvous) else rank
        leaders.append(leader)
    assert leaders == [1, 1]


def test_group_setup_requires_every_member() -> None:
    first = begin(4, 1, 0)
    machine = ElasticityMachine(1, 4, first)
    machine.complete_setup()
    assert [machine.needs(place) for place in range(4)] == [True, False, False, False]
    machine.handle(RanksLost(frozenset({0, 2})))
    machine.handle(GroupRevoked(facts(1, first, 0)))
    (formed,) = [
        each
        for each in machine.handle(JoinArrived(3, first, facts(3, first, 0)))
        if isinstance(each, FormGroup)
    ]
    assert formed.plan.members.ranks == (1, 3)
    assert [machine.needs(place) for place in range(2)] == [True, True]


def test_previous_group_state_is_kept_until_training_starts() -> None:
    """A rank that completed a set-up that others did not falls back to the previous group."""
    first = begin(3, 0, 0)
    second = next_membership(first, {0, 1, 2})
    third = next_membership(second, {0, 1})
    of_first = {rank: facts(rank, first, 10) for rank in (0, 1)}
    newer = {**facts(1, second, 20), "previous": of_first[1]}
    plan = plan_takeover(third, {0: of_first[0], 1: newer})
    assert plan is not None and (plan.number, plan.segment) == (1, 10)
    newer_of_0 = {**facts(0, second, 20), "previous": of_first[0]}
    plan = plan_takeover(third, {0: newer_of_0, 1: newer})
    assert plan is not None and (plan.number, plan.segment) == (2, 20)


def test_rank_in_long_step_is_not_excluded() -> None:
    first = begin(3, 0, 0)
    machine = ElasticityMachine(0, 3, first)
    machine.complete_setup()
    machine.handle(RanksLost(frozenset({2})))
    machine.handle(GroupRevoked(facts(0, first, 0)))
    machine.coming.add(1)
    assert machine.handle(JoinTimedOut(1)) == (AwaitJoin(1),)


def test_spare_rank_waits_until_a_member_fails() -> None:
    machine = ElasticityMachine(2, 3, begin(3, 0, 1))
    assert machine.handle(RanksLost(frozenset())) == (WaitForPlace(machine.members),)
    (join,) = machine.handle(RanksLost(frozenset({1})))
    assert join == JoinRendezvous(0, machine.members, {})


def test_standby_coordinator_is_on_another_host() -> None:
    assert standby_coordinator([0, 1, 2, 3], [0, 0, 1, 1]) == 2
    assert standby_coordinator([0, 1, 3], [0, 0, 1, 1]) == 3
    assert standby_coordinator([0, 1], [0, 0, 1, 1]) == 1
    assert standby_coordinator([0, 1, 2, 3], [0, 0, 0, 0], mates=[1]) == 2
    assert standby_coordinator([0, 1], [0, 0], mates=[1]) is None
    assert standby_coordinator([0], [0, 0]) is None


def test_elasticity_machine_imports_neither_torch_nor_mpi() -> None:
    code = (
        "import sys, aladdin_mpi.run.elasticity\n"
        "print([n for n in sys.modules if n in ('torch', 'mpi4py') or 'transport' in n])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "aladdin" not in run.stdout and "torch" not in run.stdout and "mpi4py" not in run.stdout
