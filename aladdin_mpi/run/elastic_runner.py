"""A driver of the elasticity machine: it turns messages into events, and carries out decisions.

The rules are in :mod:`.elasticity`. Here are the transport and this rank's part in each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import receive_object, send_object
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import LostError, PeerFailedError, RefusedError
from aladdin_mpi.options.algorithms import OUTLAST_DEATHS, Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import guard
from aladdin_mpi.run.coordinator import RunHook
from aladdin_mpi.run.elasticity import (
    AnnounceMembers,
    AwaitJoin,
    Decision,
    Decisions,
    ElasticityMachine,
    EndRun,
    Event,
    ExcludeRank,
    FormGroup,
    GroupRevoked,
    JoinArrived,
    JoinRendezvous,
    JoinTimedOut,
    MembersArrived,
    Membership,
    RankComing,
    RanksLost,
    RecoveryRules,
    RunOver,
    SetupCompleted,
    SetupFailed,
    TrainingStarted,
    WaitForPlace,
    begin,
)
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.takeover import LoopProgress, RankSnapshot, Takeover, snapshot
from aladdin_mpi.transport.base import Request, Transport, surviving_ranks, wait_ended
from aladdin_mpi.transport.group import Group, RankLostError

T = TypeVar("T")
Assemble = Callable[[Transport, RunOptions, "Takeover | None", Sequence[RunHook]], Rank]
"""Puts this rank together in a group, with these hooks besides its own."""


class ElasticityDriver:
    """Connects an elasticity machine to the transport among all ranks of the job.

    Args:
        patience: seconds after which a rank that does not join is excluded; 0: none is.
    """

    def __init__(self, base: Transport, machine: ElasticityMachine, patience: float = 0.0) -> None:
        self._base = base
        self._machine = machine
        self._patience = patience or None
        self._hears_coming = False

    def lost(self) -> RanksLost:
        """Return the ranks that the transport knows to have failed."""
        return RanksLost(self._base.failed, self._base.excluded)

    def decide(self, event: Event) -> Decision | None:
        """Handle an event and what follows from it; return what this rank has to do outside.

        None: nothing.

        Raises:
            LostError: no group can be formed.
            RefusedError: the same, and another rank reports it.
        """
        decisions = self._handle(event)
        while decisions:
            for decision in decisions[:-1]:
                self._act(decision)
            following = self._wait(decisions[-1])
            if following is None:
                return decisions[-1]
            decisions = self._handle(following)
        return None

    def _handle(self, event: Event) -> Decisions:
        if not isinstance(event, RanksLost):  # which are noted by that event itself
            self._machine.note_lost(self._base.failed, self._base.excluded)
        return self._machine.handle(event)

    def _act(self, decision: Decision) -> None:
        match decision:
            case ExcludeRank(rank):
                self._base.exclude(rank)
            case AnnounceMembers(dests, members, facts):
                told = {"members": asdict(members), "facts": dict(facts)}
                for dest in dests:
                    send_object(self._base, told, dest, Tag.MEMBERS)

    def _wait(self, decision: Decision) -> Event | None:
        """Wait for what a decision waits for; None: for nothing in a rendezvous."""
        if isinstance(decision, JoinRendezvous | AwaitJoin):
            self._hear_coming()
        try:
            match decision:
                case JoinRendezvous(leader, before, facts):
                    join = [asdict(before), dict(facts)]
                    wait_ended(self._base, send_object(self._base, join, leader, Tag.JOIN))
                    told = receive_object(self._base, leader, Tag.MEMBERS)
                    return MembersArrived(_membership(told["members"]), told["facts"])
                case AwaitJoin(rank):
                    return self._await_join(rank)
                case EndRun(reason, reporter):
                    if reporter not in (None, self._base.rank):
                        self._base.sleep(guard.YIELD_SECONDS)  # the reporter ends the job
                        raise RefusedError
                    raise LostError(reason)
        except PeerFailedError as error:
            # An operation may find a failure before the transport lists it.
            return RanksLost(self._base.failed | {error.rank}, self._base.excluded)
        return None

    def _hear_coming(self) -> None:
        """Listen from now on: a receive that is always posted would cost in every poll."""
        if not self._hears_coming:
            self._hears_coming = True
            self._base.on_message(Tag.COMING, 1, lambda source, _: self._note_coming(source))

    def _note_coming(self, rank: int) -> None:
        self._machine.handle(RankComing(rank))

    def _await_join(self, rank: int) -> Event:
        is_coming = partial(self._machine.coming.__contains__, rank)
        try:
            join = receive_object(self._base, rank, Tag.JOIN, self._patience, is_coming)
        except TimeoutError:
            return JoinTimedOut(rank)
        return JoinArrived(rank, _membership(join[0]), join[1])


def _membership(plain: dict[str, Any]) -> Membership:
    frozen: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in plain.items()
    }
    return Membership(**frozen)


def can_follow(options: RunOptions, algorithm: Algorithm) -> bool:
    """Whether those who are left when a rank is lost can form a new group."""
    sums = getattr(getattr(options, algorithm.group, None), "allreduce", "auto")
    # Libraries need every rank that they were started with; shards are dealt once.
    return sums in OUTLAST_DEATHS and not options.node_sums and options.dataset != "shards"


LOOK_SECONDS = 60.0
"""Of a spare rank between two looks at whether it waits still: no wait lasts longer."""


class ElasticRunner(RunHook):
    """Forms groups, and trains in one after another; a hook of this rank in each of them.

    Args:
        base: the transport among all ranks of the job.
        options: of the run.
        algorithm: of the run.
        seal: puts checksums on a group's messages, where they are asked for.
        assemble: see :data:`Assemble`.
        on_change: called with this rank's part in every new group.
        may_raise: whether this rank is where an error brings it here; see :class:`.Group`.
        progress: of the user's loop at this rank.
    """

    def __init__(
        self,
        base: Transport,
        options: RunOptions,
        algorithm: Algorithm,
        seal: Callable[[Transport], Transport],
        assemble: Assemble,
        on_change: Callable[[Rank], None],
        may_raise: Callable[[], bool],
        progress: LoopProgress,
    ) -> None:
        self._base = base
        self._options = options
        self._seal = seal
        self._assemble = assemble
        self._on_change = on_change
        self._may_raise = may_raise
        self._progress = progress
        servers = options.servers if algorithm.has_servers else 0
        members = begin(base.size, servers, options.spares)
        can_regroup = can_follow(options, algorithm)
        needs_all = can_regroup and bool(algorithm.needs_all(options))
        rules = RecoveryRules(can_regroup, needs_all)
        self._machine = ElasticityMachine(
            base.rank, base.size, members, base.host_names.__getitem__, rules
        )
        patience = 0.0 if base.models_time else options.worker_timeout
        self._driver = ElasticityDriver(base, self._machine, patience)
        self._group: Group | None = None
        self.rank: Rank | None = None
        self._left: RankSnapshot | None = None
        """What is left of this rank's part in the former group, until training starts."""
        self._has_ended = False

    @property
    def members(self) -> Membership:
        """The present group."""
        return self._machine.members

    @property
    def is_spare(self) -> bool:
        """Whether this rank has no place yet."""
        return self._machine.is_spare

    def _new_transport(self) -> Transport:
        """Return the transport among the members; that of all ranks if a failure ends the job."""
        if not self._base.survives and not self.members.spares:
            return self._seal(self._base)
        members = self.members
        self._group = Group(
            self._base,
            members.ranks,
            members.number,
            self._machine.needs,
            self._may_raise,
            self._say_coming,
            self.end,
        )
        return self._seal(self._group)

    def begin(self) -> bool:
        """Take a place in the run; False: it has ended before a spare rank got one.

        Raises:
            PeerFailedError: a rank has died of which there is nothing yet to go on from.
        """
        if self.is_spare:
            return self._take_place(None, None)
        transport = self._new_transport()
        try:
            self.rank = self._assemble(transport, self._options, None, [self])
        except RankLostError as error:
            number = transport.original_ranks[error.rank]
            raise PeerFailedError(number, transport.host_names[error.rank]) from None
        self._machine.handle(SetupCompleted())
        self._on_change(self.rank)
        return True

    def _say_coming(self) -> None:
        """Report to the next leader that this rank is alive, although its step may take long."""
        leader = surviving_ranks(self._base)[0]
        if leader != self._base.rank:
            self._base.isend(torch.zeros(1, dtype=torch.uint8), leader, Tag.COMING)

    def _call_spares(self) -> None:
        """Those who wait may not know of ranks that are excluded, and may live."""
        excluded = torch.tensor(sorted(self._base.excluded), dtype=torch.int64)
        for rank in self.members.spares:
            if rank not in self._base.failed:
                self._base.isend(excluded, rank, Tag.SPARES_CALLED)

    def end(self) -> None:
        """The run is over, or refused: rank 0 lets the spare ranks go."""
        group = self._group
        if group is None or group.rank or self._has_ended:
            return
        self._has_ended = True
        for rank in self.members.spares:
            if rank not in self._base.failed:
                self._base.isend(torch.zeros(1, dtype=torch.uint8), rank, Tag.SPARES_GO)

    # -- training ---------------------------------------------------------------------
    def run(self) -> None:
        """Train until the run is over, or suspended."""
        self._go_on(lambda rank: rank.session.run())

    def complete(self) -> dict[str, Any]:
        """Complete the run; the summary at its rank 0, when that has written everything."""

        def complete(rank: Rank) -> dict[str, Any]:
            rank.session.run()  # to its end, where a loss has brought the run back
            return rank.complete()

        return self._go_on(complete)

    def _go_on(self, act: Callable[[Rank], T]) -> T:
        """Do so with this rank's part in the present group, or in one that follows."""
        while True:
            assert self.rank is not None
            try:
                return act(self.rank)
            except PeerFailedError as error:
                if self._group is None or not self._group.explains(error):
                    raise
            except RankLostError:
                pass
            left = snapshot(self.rank, self.members, self._progress)
            self._follow(replace(left, previous=self._left))

    def _follow(self, left: RankSnapshot) -> None:
        """Take a place in the next group."""
        assert self.rank is not None and self._group is not None
        self.rank.give_up()
        self._group.leave()
        self._call_spares()
        self._take_place(GroupRevoked(left.facts), left)

    def _take_place(self, event: Event | None, left: RankSnapshot | None) -> bool:
        """Take a place in a group, however often it is revoked; False: the run is over first."""
        waiter = None if left is not None else _SpareWaiter(self._base)
        event = event or self._driver.lost()
        while True:
            match self._driver.decide(event):
                case WaitForPlace():
                    assert waiter is not None
                    waiter.wait()
                    event = RunOver() if waiter.is_over else self._driver.lost()
                case FormGroup(plan):
                    self._left = left = None if left is None else left.of(plan.number)
                    if self._set_up(Takeover(self._base, plan, left)):
                        return True
                    event = SetupFailed()
                case _:
                    return False

    def _set_up(self, takeover: Takeover) -> bool:
        """Take this rank's place in the next group; return whether that succeeded."""
        options = self._options.model_copy(update={"servers": max(1, self.members.servers)})
        transport = self._new_transport()
        assert self._group is not None
        try:
            self.rank = self._assemble(transport, options, takeover, [self])
        except (RankLostError, PeerFailedError):
            self._group.leave()
            return False
        self._machine.handle(SetupCompleted())
        self._on_change(self.rank)
        return True

    def on_start(self) -> None:
        """Keep nothing of the former group any more: training starts."""
        if self.members.number > 1:
            self._machine.handle(TrainingStarted())
            self._left = None


class _SpareWaiter:
    """Wakes a spare rank when a rank fails, and when the run is over."""

    def __init__(self, base: Transport) -> None:
        self._base = base
        self._ring = self._new()
        self.is_over = False
        base.on_message(Tag.SPARES_GO, 1, self._end)
        base.on_message(Tag.SPARES_CALLED, 8 * base.size, self._exclude)
        base.on_failure(lambda rank: self._base.abandon(self._ring))

    def _new(self) -> Request:
        # A message that never comes: who waits for it is woken when it is abandoned.
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._base.irecv(nothing, self._base.rank, Tag.SPARES_GO)

    def _end(self, source: int, message: Tensor) -> None:
        self.is_over = True
        self._base.abandon(self._ring)

    def _exclude(self, source: int, message: Tensor) -> None:
        for rank in message.view(torch.int64).tolist():
            if rank not in self._base.failed:
                self._base.exclude(rank)

    def wait(self) -> None:
        """Until it rings; not at all if that has been."""
        seconds = None if self._base.models_time else LOOK_SECONDS
        while not self._ring.done:
            self._base.wait_any([self._ring], seconds)
        self._ring = self._new()
