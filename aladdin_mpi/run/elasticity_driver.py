"""Driver of the elasticity machine: turns messages into events, and carries out decisions.

The rules are in :mod:`.elasticity`; excluded ranks return by :mod:`.returns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import receive_object, send_object
from aladdin_mpi.control.tags import Tag, of_incarnation
from aladdin_mpi.errors import ExcludedError, LostError, PeerFailedError, RefusedError
from aladdin_mpi.process import guard
from aladdin_mpi.run.elasticity import (
    AnnounceMembers,
    AwaitJoin,
    AwaitReadmission,
    Decision,
    ElasticityMachine,
    EndRun,
    Event,
    Excluded,
    ExcludeRank,
    GroupRevoked,
    InviteExcluded,
    JoinArrived,
    JoinRendezvous,
    JoinTimedOut,
    LeaveRun,
    MembersArrived,
    Membership,
    RanksLost,
    RanksReturned,
    Readmitted,
)
from aladdin_mpi.run.returns import Returns
from aladdin_mpi.session.islands import leaving
from aladdin_mpi.transport.base import Request, Transport

LOOK_SECONDS = 0.25
"""Seconds between two looks for messages to or from excluded ranks."""


class ElasticityDriver:
    """Connects an elasticity machine to the transport among all ranks of the job.

    A rank that does not join within ``patience`` seconds is excluded, unless that is 0.
    """

    def __init__(self, base: Transport, machine: ElasticityMachine, patience: float = 0.0) -> None:
        self._base = base
        self._machine = machine
        self._patience = patience or None
        self._listens = False
        self._returns: Returns | None = None
        if machine.may_return and base.side_channel is not None:
            self._returns = Returns(base, base.side_channel, self._incarnation)
        self._look_at = 0.0

    def _incarnation(self, rank: int) -> int:
        return self._machine.members.incarnation(rank)

    def lost(self) -> RanksLost:
        """Return the ranks that the transport knows to have failed."""
        return RanksLost(self._base.failed)

    def has_returned(self) -> bool:
        """Return whether an excluded rank has requested a place since the last look."""
        if self._returns is None or not self._base.excluded or self._base.now() < self._look_at:
            return False
        self._look_at = self._base.now() + LOOK_SECONDS
        return self._returns.look(self._base.excluded)

    def release_excluded(self) -> None:
        """Let excluded ranks leave, as the run is over."""
        if self._returns is not None:
            self._returns.release()

    def decide(self, event: Event) -> Decision | None:
        """Handle an event and those that follow from it; return a decision left to the caller.

        Raises:
            LostError: no group can be formed.
            RefusedError: no group can be formed, and another rank reports it.
            ExcludedError: the run continues without this rank's island, or has ended.
        """
        while True:
            self._note_lost()
            decisions = self._machine.handle(event)
            if not decisions:
                return None
            for decision in decisions[:-1]:
                self._act(decision)
            following = self._wait(decisions[-1])
            if following is None:
                return decisions[-1]
            event = following

    def _note_lost(self) -> None:
        """Note the failed ranks, and exclude the others of their islands."""
        self._machine.note_lost(self._base.failed)
        for rank in sorted(self._machine.failed - self._base.failed - {self._base.rank}):
            self._base.exclude(rank)

    def _act(self, decision: Decision) -> None:
        match decision:
            case ExcludeRank(rank):
                self._base.exclude(rank)
                self._tell_excluded(rank, self._machine.members.number)
            case AnnounceMembers(dests, members, facts):
                announcement = {"members": asdict(members), "facts": dict(facts)}
                for dest in dests:
                    if self._returns is not None and members.returned_at(dest) == members.number:
                        self._returns.announce(announcement, dest)
                    else:
                        tag = of_incarnation(Tag.MEMBERS, members.incarnation(dest))
                        send_object(self._base, announcement, dest, tag)
                for rank in self._base.excluded:
                    self._tell_excluded(rank, members.number - 1)

    def _tell_excluded(self, rank: int, number: int) -> None:
        if self._returns is not None:
            self._returns.tell_excluded(rank, number)

    def _wait(self, decision: Decision) -> Event | None:
        """Return the event that a decision waits for; None if it is not part of a rendezvous."""
        try:
            match decision:
                case JoinRendezvous(leader, before, facts):
                    return self._join(leader, before, facts)
                case AwaitJoin(rank):
                    return self._await_join(rank)
                case InviteExcluded(number):
                    return self._invite(number)
                case AwaitReadmission():
                    return self._await_readmission()
                case LeaveRun(lost):
                    if self._base.shares_process:
                        self._base.exclude(self._base.rank)  # does not return
                    raise ExcludedError(leaving(self._base, self._base.rank, lost))
                case EndRun(reason, reporter):
                    if reporter not in (None, self._base.rank):
                        self._base.sleep(guard.YIELD_SECONDS)  # the reporter ends the job
                        raise RefusedError
                    raise LostError(reason)
        except PeerFailedError as error:
            # An operation may detect a failure before the transport lists it.
            return RanksLost(self._base.failed | {error.rank})
        return None

    # -- rendezvous ---------------------------------------------------------------------
    def _listen(self) -> None:
        """Listen for COMING: a receive that is posted from the start would slow down each poll."""
        if not self._listens:
            self._listens = True
            self._base.on_message(Tag.COMING, 1, lambda rank, _: self._machine.coming.add(rank))

    def _join(self, leader: int, before: Membership, facts: Any) -> Event:
        self._listen()
        incarnation = before.incarnation(self._base.rank)
        join = [asdict(before), dict(facts)]
        sent = send_object(self._base, join, leader, of_incarnation(Tag.JOIN, incarnation))
        with self._watching(lambda: self._notice_exclusion(leader)) as wake:
            try:
                tag = of_incarnation(Tag.MEMBERS, incarnation)
                announced = receive_object(self._base, leader, tag, wake=wake)
            except TimeoutError:
                for request in sent:  # which the leader may never receive
                    self._base.abandon(request)
                return Excluded()
        self._readmit(announced)
        return _announced(announced)

    def _notice_exclusion(self, leader: int) -> bool:
        """Return whether this rank is excluded; exclude the leader if it is outside itself."""
        if self._has_requested(leader):
            self._base.exclude(leader)
        return self._is_excluded()

    def _is_excluded(self) -> bool:
        number = self._machine.members.number
        return self._returns is not None and self._returns.is_excluded(number)

    def _await_join(self, rank: int) -> Event:
        self._listen()
        is_coming = partial(self._machine.coming.__contains__, rank)
        tag = of_incarnation(Tag.JOIN, self._machine.newest.incarnation(rank))
        try:
            with self._watching(lambda: self._has_requested(rank) or self._is_excluded()) as wake:
                join = receive_object(self._base, rank, tag, self._patience, is_coming, wake)
        except TimeoutError:
            if self._is_excluded():
                return Excluded()
            self._machine.coming.discard(rank)
            return JoinTimedOut(rank)
        return JoinArrived(rank, _membership(join[0]), join[1])

    def _has_requested(self, rank: int) -> bool:
        return self._returns is not None and self._returns.has_requested(rank)

    @contextmanager
    def _watching(self, is_met: Callable[[], bool]) -> Iterator[Request | None]:
        """Return a request that ends once a condition about excluded ranks is met, if it can be."""
        hooks = self._base.poll_hooks
        if self._returns is None or hooks is None:
            yield None
            return
        wake = never(self._base)

        def look() -> None:
            if self._base.now() >= self._look_at:
                self._look_at = self._base.now() + LOOK_SECONDS
                with self._base.atomic():
                    if not wake.done and is_met():
                        self._base.abandon(wake)

        hooks.watch(look)
        try:
            yield wake
        finally:
            hooks.unwatch(look)
            with self._base.atomic():
                if not wake.done:
                    self._base.cancel(wake)

    # -- excluded ranks -----------------------------------------------------------------
    def _invite(self, number: int) -> Event:
        if self._returns is None:
            return RanksReturned({})
        answered = self._returns.invite(number)
        return RanksReturned({rank: n for rank, n in answered.items() if self._take_back(rank)})

    def _take_back(self, rank: int) -> bool:
        assert self._returns is not None
        is_present = self._returns.readmit(rank)
        if is_present:
            self._machine.readmit(rank)
        return is_present

    def _readmit(self, announced: dict[str, Any]) -> None:
        """Exclude no rank that the leader has readmitted."""
        for rank in self._base.excluded.intersection(announced["facts"]):
            self._take_back(rank)

    def _await_readmission(self) -> Event:
        base = self._base
        assert self._returns is not None
        announced = self._returns.wait(f"rank {base.rank} (host {base.host_names[base.rank]})")
        self._readmit(announced)
        present = {*announced["facts"], base.rank}
        for rank in set(range(base.size)) - base.failed - present:
            base.exclude(rank)
        self._machine.note_lost(base.failed)
        return Readmitted(_announced(announced))


def _announced(announcement: dict[str, Any]) -> MembersArrived:
    return MembersArrived(_membership(announcement["members"]), announcement["facts"])


def _membership(plain: dict[str, Any]) -> Membership:
    tuples = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return Membership(**{**plain, **tuples})


def never(base: Transport) -> Request:
    """Return a request that ends only if it is abandoned, which wakes a waiting rank."""
    nothing = torch.empty(0, dtype=torch.uint8)
    return base.irecv(nothing, base.rank, Tag.SPARES_GO)


SPARE_WAIT_SECONDS = 60.0
"""The longest single wait of a spare rank, which then waits again."""


class SpareWaiter:
    """Wakes a spare rank when a rank fails or the run is over.

    ``machine`` knows this rank's group.
    """

    def __init__(self, base: Transport, machine: ElasticityMachine) -> None:
        self._base = base
        self._machine = machine
        self._wake_request = never(base)
        self._called = 0
        """The newest group of which this rank knows, as its spare rank, that it is revoked."""
        self.is_over = False
        base.on_message(Tag.SPARES_GO, 1, self._end)
        base.on_message(Tag.SPARES_CALLED, 8 * (1 + base.size), self._exclude)
        base.on_failure(lambda rank: self._base.abandon(self._wake_request))

    def _end(self, source: int, message: Tensor) -> None:
        self.is_over = True
        self._base.abandon(self._wake_request)

    def _exclude(self, source: int, message: Tensor) -> None:
        number, *ranks = message.view(torch.int64).tolist()
        if number < self._machine.members.number:
            return  # an excluded rank may have returned since
        for rank in ranks:
            if rank not in self._base.failed:
                self._base.exclude(rank)
        self._called = max(self._called, number)
        self._base.abandon(self._wake_request)

    def wait(self) -> Event:
        """Wait for a failure or the end of the run, unless it has happened already."""
        seconds = None if self._base.models_time else SPARE_WAIT_SECONDS
        while not self._wake_request.done:
            self._base.wait_any([self._wake_request], seconds)
        self._wake_request = never(self._base)
        if self._called >= self._machine.members.number:
            return GroupRevoked(None)
        return RanksLost(self._base.failed)
