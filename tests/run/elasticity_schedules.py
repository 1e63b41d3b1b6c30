"""Schedules of failures and messages, in which every rank's elasticity machine runs.

A schedule simulates the messages between the machines, and the times at which each rank learns of
failures. All of it depends on a seed, so that a failed one can be replayed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from aladdin_mpi.errors import LostError
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
)

OF_GROUP = -2
"""Tag of notices about a group; that of a rendezvous is how often a rank has returned."""
TIMEOUT = "the transport's timeout"
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
    called: int = 0
    """The newest group whose revocation this rank knows of as its spare rank."""


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

    def __init__(
        self, seed: int, hangs: bool = False, island: int = 1, may_return: bool = False
    ) -> None:
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
                    rank,
                    self.size,
                    self.first,
                    needs_all=needs_all,
                    islands=self.islands,
                    may_return=may_return,
                )
            )
            for rank in range(self.size)
        ]
        self.surviving = set(range(self.size))
        self.messages: dict[tuple[int, int, int], list[Any]] = {}
        """By source, destination and tag."""
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
                    join = JoinArrived(me, before, reported)
                    self.send(me, leader, join, tag=before.incarnation(me))
                case ExcludeRank(rank):
                    node.excluded.add(rank)
                    node.lost.add(rank)
                    self.note_late(node, rank)
                case AnnounceMembers(dests, members, reported_by_all):
                    self.announce(node, dests, MembersArrived(members, reported_by_all))
                case FormGroup(plan):
                    node.group = plan.members
                    if not self.is_excluded(me):
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
            self.begin_waiting(node)

    def note_late(self, node: Node, rank: int) -> None:
        """Act after a rank has been excluded in a rendezvous."""

    def announce(self, node: Node, dests: Sequence[int], announced: MembersArrived) -> None:
        for dest in dests:
            self.send(node.machine.rank, dest, announced)

    def begin_waiting(self, node: Node) -> None:
        """Begin what ``node.waiting`` describes, if it is more than to wait."""
        if isinstance(node.waiting, WaitForPlace) and node.called >= node.machine.members.number:
            self.feed(node, GroupRevoked(None))

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
                self.send(me, rank, ("revoked", group.number), OF_GROUP)
        for rank in group.spares:
            self.send(me, rank, ("called", group.number, frozenset(node.excluded)), OF_GROUP)
        if was_set_up:
            ended_at = 100 if self.ends_training else None
            standby = self.standby(group)
            node.facts = facts(me, group, 10 * group.number, ended_at, standby)
            self.feed(node, GroupRevoked(node.facts))
        else:
            self.feed(node, GroupRevoked(None))

    def send(self, source: int, dest: int, message: Any, tag: int = 0) -> None:
        self.messages.setdefault((source, dest, tag), []).append(message)

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
        for (source, dest, tag), queue in self.messages.items():
            if queue and self.can_take(self.nodes[dest], source, queue[0], tag):
                moves.append(partial(self.deliver, source, dest, tag))
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
        for (source, *_), queue in self.messages.items():
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
            if self.is_excluded(rank):  # and does not know it yet
                continue
            assert other.group is not None
            assert not set(group.ranks) & set(other.group.ranks) & self.surviving, "two groups"

    def can_take(self, node: Node, source: int, message: Any, tag: int) -> bool:
        """Return whether a driver would receive the message now."""
        if node.machine.rank not in self.surviving or node.is_hanging:
            return False
        if isinstance(message, JoinArrived):
            is_awaited = node.waiting == AwaitJoin(source)
            if is_awaited and tag != node.machine.newest.incarnation(source):
                return False
            return is_awaited or source in node.excluded
        if isinstance(message, MembersArrived):
            is_awaited = isinstance(node.waiting, JoinRendezvous) and node.waiting.leader == source
            return is_awaited and tag == node.machine.members.incarnation(node.machine.rank)
        return message[0] != "revoked" or message[1] <= node.machine.members.number

    def deliver(self, source: int, dest: int, tag: int) -> None:
        message, node = self.messages[source, dest, tag].pop(0), self.nodes[dest]
        if source in node.excluded:
            return
        if not isinstance(message, tuple):
            self.feed(node, message)
        elif message[0] == "called":
            self.call_spare(node, *message[1:])
        elif node.group is not None and node.group.number == message[1]:
            self.leave(node)

    def call_spare(self, node: Node, number: int, excluded: frozenset[int]) -> None:
        if number < node.machine.members.number:
            return
        node.called = max(node.called, number)
        node.excluded |= excluded - node.lost
        node.lost |= excluded
        if node.machine.phase is MachineState.SPARE:
            self.feed(node, GroupRevoked(None))
        else:
            self.carry_out(node, RanksLost(frozenset(node.lost)))

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

    @property
    def outside(self) -> set[int]:
        """Return the excluded ranks that wait for their return."""
        return set()

    @property
    def without_state(self) -> set[int]:
        """Return the ranks that have returned since training last started."""
        return set()

    def check_end(self) -> None:
        """Check that the run ends if and only if no group can be formed."""
        assert self.ended is not None
        participants = self.taking_part - self.outside
        trained = self.trained
        if "too few" in self.ended:
            known = [self.nodes[rank].machine.members for rank in participants] or [self.first]
            newest = max(known, key=lambda members: members.number)
            with pytest.raises(LostError):
                next_membership(newest, participants, self.ends_training, self.island > 1)
        elif "both failed" in self.ended or "no surviving" in self.ended:
            places = {0, self.standby(trained)}
            with_state = participants - self.without_state
            accounting = {r for r in with_state if trained.place(r) in places}
            workers = with_state.intersection(trained.ranks[trained.servers :])
            assert not (accounting and workers), "the run could continue"
        elif self.ended == TIMEOUT:
            assert any(self.nodes[rank].is_hanging for rank in self.surviving)
        else:
            assert not participants & set(trained.ranks)


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
