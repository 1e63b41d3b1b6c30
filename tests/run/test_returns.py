"""Excluded ranks that run again return, in thousands of schedules of failures and messages."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from aladdin_mpi.errors import ExcludedError
from aladdin_mpi.run.elasticity import (
    AwaitJoin,
    AwaitReadmission,
    Excluded,
    InviteExcluded,
    JoinRendezvous,
    JoinTimedOut,
    MembersArrived,
    Membership,
    RanksLost,
    RanksReturned,
    Readmitted,
)
from aladdin_mpi.run.takeover import LoopProgress
from tests.run.elasticity_schedules import OF_GROUP, Move, Node, Simulation
from tests.run.test_elasticity import BLOCKS, PER_BLOCK

SIDE = -1
"""Tag of the side channel."""
SCHEDULES = PER_BLOCK // 2
REPEATED = 300
"""Number of repeated requests in a schedule."""


class ReturnSchedule(Simulation):
    """A schedule in which ranks that hang are excluded, run again and return; see :mod:`.returns`.

    A rank may hang again after its return.
    """

    def __init__(self, seed: int) -> None:
        self.incarnations: dict[int, int] = defaultdict(int)
        self.heard: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """For each rank the newest request of each other: its incarnation, and what it answers."""
        self.news: set[int] = set()
        """Ranks that have received a request since they last revoked a group."""
        self.invited: dict[int, set[int]] = {}
        """Ranks that a leader has invited."""
        self.detected: dict[int, set[int]] = defaultdict(set)
        """Ranks whose failure MPI has reported, by rank."""
        self.repeated = 0
        super().__init__(seed, hangs=True, may_return=True)
        self.may_return = False  # not before they are excluded

    # -- exclusions -----------------------------------------------------------------------
    def note_late(self, node: Node, rank: int) -> None:
        self.send(node.machine.rank, rank, ("out", node.machine.members.number), SIDE)

    def exclude(self, node: Node, rank: int) -> None:
        assert node.group is not None
        for other in set(node.group.ranks) - {node.machine.rank}:
            self.send(node.machine.rank, other, ("excluded", node.group.number, rank), SIDE)
        super().exclude(node, rank)

    def learn(self, node: Node, gone: int) -> None:
        self.detected[node.machine.rank].add(gone)
        super().learn(node, gone)

    def readmit(self, node: Node, rank: int) -> bool:
        node.excluded.discard(rank)
        self.heard[node.machine.rank].pop(rank, None)
        if rank in self.detected[node.machine.rank]:
            return False
        node.lost.discard(rank)
        node.machine.readmit(rank)
        return True

    # -- inside -----------------------------------------------------------------------------
    def begin_waiting(self, node: Node) -> None:
        me = node.machine.rank
        match node.waiting:
            case InviteExcluded(number):
                known = self.heard[me]
                self.invited[me] = {
                    rank
                    for rank in node.excluded.intersection(known)
                    if known[rank][0] > node.machine.newest.incarnation(rank)
                }
                for rank in self.invited[me]:
                    self.send(me, rank, ("invite", number), SIDE)
                if not self.invited[me]:
                    self.feed(node, RanksReturned({}))
            case AwaitReadmission():
                node.group = None
                node.is_set_up = node.has_started = False
                self.incarnations[me] += 1
                self.request(me)
            case _:
                super().begin_waiting(node)

    def end_invitation(self, node: Node) -> None:
        assert isinstance(node.waiting, InviteExcluded)
        me, number, incarnations = node.machine.rank, node.waiting.number, {}
        for rank in self.invited.pop(me):
            incarnation, answers = self.heard[me].pop(rank)
            if answers != number:
                self.send(me, rank, ("out", number - 1), SIDE)
            elif self.readmit(node, rank):
                incarnations[rank] = incarnation
        self.feed(node, RanksReturned(incarnations))

    def announce(self, node: Node, dests: Sequence[int], announced: MembersArrived) -> None:
        me, members = node.machine.rank, announced.members
        for dest in dests:
            tag = SIDE if members.returned_at(dest) == members.number else members.incarnation(dest)
            self.send(me, dest, announced, tag)
        for rank in node.excluded:
            self.send(me, rank, ("out", members.number - 1), SIDE)

    def revoke(self, node: Node) -> None:
        assert node.group is not None
        self.news.discard(node.machine.rank)
        for rank in node.group.ranks:
            self.send(node.machine.rank, rank, ("revoked", node.group.number), OF_GROUP)
        self.leave(node)

    # -- outside ----------------------------------------------------------------------------
    def request(self, me: int) -> None:
        for rank in set(range(self.size)) - {me}:
            self.send(me, rank, ("request", self.incarnations[me], 0), SIDE)

    def request_again(self, me: int) -> None:
        self.repeated += 1
        self.request(me)

    def resume(self, rank: int) -> None:
        super().resume(rank)
        if self.random.random() < 0.3:
            self.to_hang.append(rank)

    # -- moves --------------------------------------------------------------------------------
    def moves(self) -> list[Move]:
        moves: list[Move] = []
        for rank in self.surviving:
            node = self.nodes[rank]
            if node.is_hanging and self.is_excluded(rank):
                moves.append(partial(self.resume, rank))
            if isinstance(node.waiting, InviteExcluded) and self.random.random() < 0.1:
                moves.append(partial(self.end_invitation, node))
            leads = node.group is not None and node.group.ranks[0] == rank and node.is_set_up
            if leads and rank in self.news and not (node.is_hanging or self.ends_training):
                moves.append(partial(self.revoke, node))
        return moves + super().moves()

    def timeouts(self) -> list[Move]:
        running = [self.nodes[rank] for rank in self.surviving if not self.nodes[rank].is_hanging]
        moves: list[Move] = [
            partial(self.end_invitation, node)
            for node in running
            if isinstance(node.waiting, InviteExcluded)
        ]
        moves += [
            partial(self.feed, node, JoinTimedOut(node.waiting.rank))
            for node in running
            if isinstance(node.waiting, AwaitJoin)
        ]
        if not moves and self.repeated < REPEATED:
            outside = [node for node in running if isinstance(node.waiting, AwaitReadmission)]
            moves += [partial(self.request_again, node.machine.rank) for node in outside]
        others = super().timeouts()
        if others != [self.time_out]:
            return others or moves
        hanging = [rank for rank in self.surviving if self.nodes[rank].is_hanging]
        return [partial(self.resume, rank) for rank in hanging] or moves

    def may_complete(self, node: Node, group: Membership) -> bool:
        me = node.machine.rank
        is_excluded = any(me in self.nodes[rank].excluded for rank in group.ranks)
        return not is_excluded and super().may_complete(node, group)

    def can_take(self, node: Node, source: int, message: Any, tag: int) -> bool:
        if tag != SIDE:
            return super().can_take(node, source, message, tag)
        if node.machine.rank not in self.surviving or node.is_hanging:
            return False
        if isinstance(message, MembersArrived) or message[0] == "excluded":
            return True
        if message[0] == "request":
            return source in node.excluded or self.is_waiting_for(node, source)
        return isinstance(node.waiting, JoinRendezvous | AwaitJoin | AwaitReadmission)

    def deliver(self, source: int, dest: int, tag: int) -> None:
        node = self.nodes[dest]
        if tag != SIDE:
            message = self.messages[source, dest, tag][0]
            if isinstance(message, MembersArrived) and source not in node.excluded:
                for rank in node.excluded.intersection(message.facts):
                    self.readmit(node, rank)
            super().deliver(source, dest, tag)
            return
        match self.messages[source, dest, tag].pop(0):
            case ("excluded", number, rank):
                if node.group is not None and node.group.number == number:
                    self.take_exclusion(node, rank)
            case ("request", incarnation, answers):
                if incarnation > node.machine.newest.incarnation(source):
                    self.take_request(node, source, (incarnation, answers))
            case ("out", number):
                self.leave_rendezvous(node, number)
            case ("invite", number):
                self.leave_rendezvous(node, number)
                if isinstance(node.waiting, AwaitReadmission):
                    self.send(dest, source, ("request", self.incarnations[dest], number), SIDE)
            case MembersArrived() as announced:
                self.take_back(node, announced)

    def take_exclusion(self, node: Node, rank: int) -> None:
        if rank == node.machine.rank:
            self.feed(node, Excluded())
        elif rank not in node.lost:
            super().exclude(node, rank)

    def is_waiting_for(self, node: Node, rank: int) -> bool:
        waiting = node.waiting
        leads = isinstance(waiting, JoinRendezvous) and waiting.leader == rank
        return leads or waiting == AwaitJoin(rank)

    def take_request(self, node: Node, rank: int, request: tuple[int, int]) -> None:
        self.heard[node.machine.rank][rank] = request
        self.news.add(node.machine.rank)
        if rank not in node.excluded:
            if node.waiting == AwaitJoin(rank):
                self.feed(node, JoinTimedOut(rank))
            else:
                node.excluded.add(rank)
                node.lost.add(rank)
                self.carry_out(node, RanksLost(frozenset(node.lost)))
        self.end_complete_invitation(node)

    def leave_rendezvous(self, node: Node, number: int) -> None:
        meets = isinstance(node.waiting, JoinRendezvous | AwaitJoin)
        if meets and number >= node.machine.members.number:
            self.feed(node, Excluded())

    def end_complete_invitation(self, node: Node) -> None:
        if isinstance(node.waiting, InviteExcluded):
            heard, invited = self.heard[node.machine.rank], self.invited[node.machine.rank]
            if all(heard[rank][1] == node.waiting.number for rank in invited):
                self.end_invitation(node)

    def take_back(self, node: Node, announced: MembersArrived) -> None:
        me = node.machine.rank
        is_mine = announced.members.incarnation(me) == self.incarnations[me]
        if not (isinstance(node.waiting, AwaitReadmission) and is_mine):
            return
        for rank in node.excluded.intersection(announced.facts):
            self.readmit(node, rank)
        for rank in set(range(self.size)) - {*announced.facts, me} - node.lost:
            node.excluded.add(rank)
            node.lost.add(rank)
        self.feed(node, Readmitted(announced))

    # -- invariants ---------------------------------------------------------------------------
    @property
    def outside(self) -> set[int]:
        return {
            node.machine.rank for node in self.nodes if isinstance(node.waiting, AwaitReadmission)
        }

    @property
    def without_state(self) -> set[int]:
        known = [node.machine.members for node in self.nodes]
        last = self.trained.number
        return {r for r in range(self.size) for each in known if each.returned_at(r) > last}

    def check(self) -> None:
        super().check()
        running = {rank for rank in self.surviving if not self.nodes[rank].is_hanging}
        if self.ended is None and self.taking_part and not self.ends_training:
            assert running == self.taking_part, "a rank waits outside for ever"


@pytest.mark.parametrize("block", range(BLOCKS))
def test_excluded_ranks_return(block: int) -> None:
    """They all get a place again, the ranks agree on it, and nothing continues from their state."""
    returned = 0
    for seed in range(block * SCHEDULES, (block + 1) * SCHEDULES):
        schedule = ReturnSchedule(seed)
        try:
            schedule.run()
            schedule.check()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        returned += any(node.machine.members.returns for node in schedule.nodes)
    assert returned > SCHEDULES / 10


def test_rank_returns_unless_others_have_called_reduce_since() -> None:
    others = [{"epoch": 7, "reductions": 3}, {"epoch": 6, "reductions": 3}]
    spare = LoopProgress()
    spare.take_over(others, is_new=True)
    assert (spare.first_epoch, spare.reductions) == (7, 3)
    returning = LoopProgress(epoch=4, reductions=3, has_begun=True)
    returning.take_over(others, is_new=True)
    late = LoopProgress(epoch=4, reductions=2, has_begun=True)
    with pytest.raises(ExcludedError, match=re.escape("run.reduce()")):
        late.take_over(others, is_new=True)
