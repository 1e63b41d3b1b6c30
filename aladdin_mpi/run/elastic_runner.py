"""Driver of the elasticity machine: turns messages into events, and carries out decisions.

The rules are in :mod:`.elasticity`; this module has the transport and this rank's part in each
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.control.exchange import receive_object, send_object
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import ExcludedError, LostError, PeerFailedError, RefusedError
from aladdin_mpi.options.algorithms import FAULT_TOLERANT_ALLREDUCES, Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process import guard
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
    MembersArrived,
    Membership,
    RanksLost,
    WaitForPlace,
    begin,
)
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.takeover import LoopProgress, RankSnapshot, Takeover, snapshot
from aladdin_mpi.session.coordinator import RunHook
from aladdin_mpi.session.islands import leaving
from aladdin_mpi.transport.base import Request, Transport, wait_ended
from aladdin_mpi.transport.group import Group, RankLostError
from aladdin_mpi.worker.island import host_groups

T = TypeVar("T")
Assemble = Callable[[Transport, RunOptions, "Takeover | None", Sequence[RunHook]], Rank]
"""Builds this rank in a group, with the given hooks in addition to its own."""


class ElasticityDriver:
    """Connects an elasticity machine to the transport among all ranks of the job.

    A rank that does not join within ``patience`` seconds is excluded, unless that is 0.
    """

    def __init__(self, base: Transport, machine: ElasticityMachine, patience: float = 0.0) -> None:
        self._base = base
        self._machine = machine
        self._patience = patience or None
        self._listens = False

    def lost(self) -> RanksLost:
        """Return the ranks that the transport knows to have failed."""
        return RanksLost(self._base.failed)

    def decide(self, event: Event) -> Decision | None:
        """Handle an event and those that follow from it; return a decision left to the caller.

        Raises:
            LostError: no group can be formed.
            RefusedError: no group can be formed, and another rank reports it.
            ExcludedError: the run continues without this rank's island.
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
            case AnnounceMembers(dests, members, facts):
                announcement = {"members": asdict(members), "facts": dict(facts)}
                for dest in dests:
                    send_object(self._base, announcement, dest, Tag.MEMBERS)

    def _wait(self, decision: Decision) -> Event | None:
        """Return the event that a decision waits for; None if it is not part of a rendezvous."""
        if isinstance(decision, JoinRendezvous | AwaitJoin):
            self._listen()
        try:
            match decision:
                case JoinRendezvous(leader, before, facts):
                    join = [asdict(before), dict(facts)]
                    wait_ended(self._base, send_object(self._base, join, leader, Tag.JOIN))
                    announced = receive_object(self._base, leader, Tag.MEMBERS)
                    return MembersArrived(_membership(announced["members"]), announced["facts"])
                case AwaitJoin(rank):
                    return self._await_join(rank)
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

    def _listen(self) -> None:
        """Listen for COMING: a receive that is posted from the start would slow down each poll."""
        if not self._listens:
            self._listens = True
            self._base.on_message(Tag.COMING, 1, lambda rank, _: self._machine.coming.add(rank))

    def _await_join(self, rank: int) -> Event:
        is_coming = partial(self._machine.coming.__contains__, rank)
        try:
            join = receive_object(self._base, rank, Tag.JOIN, self._patience, is_coming)
        except TimeoutError:
            return JoinTimedOut(rank)
        return JoinArrived(rank, _membership(join[0]), join[1])


def _membership(plain: dict[str, Any]) -> Membership:
    tuples = {name: tuple(value) for name, value in plain.items() if isinstance(value, list)}
    return Membership(**{**plain, **tuples})


SPARE_WAIT_SECONDS = 60.0
"""The longest single wait of a spare rank, which then waits again."""


class ElasticRunner(RunHook):
    """A run in one group of ranks after another; a hook of this rank in each of them.

    Args:
        base: the transport among all ranks of the job.
        seal: adds checksums to a group's messages, if they are requested.
        assemble: see :data:`Assemble`.
        on_change: called with this rank's part in every new group.
        may_raise: whether an error would reach this runner now; see :class:`.Group`.
        progress: of the user's loop at this rank.
        is_sharded: whether FSDP has divided the model, by groups that cannot change.
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
        is_sharded: bool = False,
    ) -> None:
        self._base = base
        self._options = options
        self._seal = seal
        self._assemble = assemble
        self._on_change = on_change
        self._may_raise = may_raise
        self._progress = progress
        servers = options.servers if algorithm.has_servers else 0
        # Libraries need every rank that they were started with; shards are assigned once.
        sums = getattr(getattr(options, algorithm.group, None), "allreduce", "auto")
        is_fixed = (
            sums not in FAULT_TOLERANT_ALLREDUCES or is_sharded or options.dataset == "shards"
        )
        first = begin(base.size, servers, options.spares)
        hosts = [base.hosts[rank] for rank in first.ranks]
        islands = host_groups(hosts, servers, options.island_size) if options.island_flag else ()
        self._machine = ElasticityMachine(
            base.rank,
            base.size,
            first,
            base.host_names.__getitem__,
            can_regroup=not is_fixed,
            needs_all=bool(algorithm.needs_all(options)),
            islands=islands,
        )
        patience = 0.0 if base.models_time else options.worker_timeout
        self._driver = ElasticityDriver(base, self._machine, patience)
        self._group: Group | None = None
        self.rank: Rank | None = None
        self._snapshot: RankSnapshot | None = None
        """This rank's snapshot of the former group, until training starts."""
        self._has_ended = False

    @property
    def members(self) -> Membership:
        """The present group."""
        return self._machine.members

    def _new_transport(self) -> Transport:
        """Return the members' transport, or that of all ranks if a failure ends the job."""
        members = self.members
        if not self._base.survives and not members.spares:
            return self._seal(self._base)
        self._group = Group(
            self._base,
            members.ranks,
            members.number,
            self._machine.needs,
            self._may_raise,
            self._report_coming,
            self.end,
        )
        return self._seal(self._group)

    def begin(self) -> bool:
        """Take a place in the run; return False if it ended before a spare rank got one.

        Raises:
            PeerFailedError: a rank has failed before there was a state to continue from.
        """
        if self._machine.is_spare:
            return self._take_place(self._driver.lost(), None)
        try:
            self._set_up(None)
        except RankLostError as error:
            group = self._group
            assert group is not None
            number = group.original_ranks[error.rank]
            raise PeerFailedError(number, group.host_names[error.rank]) from None
        return True

    def _set_up(self, takeover: Takeover | None) -> None:
        """Take this rank's place in the present group; ``takeover`` is None in the first group."""
        options = self._options
        if takeover is not None:
            options = options.model_copy(update={"servers": max(1, self.members.servers)})
        self.rank = self._assemble(self._new_transport(), options, takeover, [self])
        self._machine.complete_setup()
        self._on_change(self.rank)

    def _report_coming(self) -> None:
        """Report to the next leader that this rank will join, even if its step takes long."""
        self._machine.note_lost(self._base.failed)
        leader = next(iter(self._machine.surviving), self._base.rank)
        if leader != self._base.rank:
            self._base.isend(torch.zeros(1, dtype=torch.uint8), leader, Tag.COMING)

    def _send_to_spares(self, message: Tensor, tag: Tag) -> None:
        for rank in self.members.spares:
            if rank not in self._base.failed:
                self._base.isend(message, rank, tag)

    def end(self) -> None:
        """Release the spare ranks at rank 0: the run is over, or refused."""
        group = self._group
        if group is None or group.rank or self._has_ended:
            return
        self._has_ended = True
        self._send_to_spares(torch.zeros(1, dtype=torch.uint8), Tag.SPARES_GO)

    # -- training ---------------------------------------------------------------------
    def run(self) -> None:
        """Train until the run is over or suspended."""
        self._in_groups(lambda rank: rank.session.run())

    def complete(self) -> dict[str, Any]:
        """Complete the run; return the summary at its rank 0 after it has written all results."""

        def complete(rank: Rank) -> dict[str, Any]:
            rank.session.run()  # a failure may have reopened the run
            return rank.complete()

        return self._in_groups(complete)

    def _in_groups(self, act: Callable[[Rank], T]) -> T:
        """Call ``act`` with this rank's part in the present group, and in each that follows."""
        while True:
            assert self.rank is not None
            try:
                return act(self.rank)
            except PeerFailedError as error:
                if self._group is None or not self._group.explains(error):
                    raise
            except RankLostError:
                pass
            assert self._group is not None
            mine = snapshot(self.rank, self.members, self._progress, self._snapshot)
            self.rank.give_up()
            self._group.leave()
            # Excluded ranks may still run, so spare ranks do not detect them as failed.
            excluded = torch.tensor(sorted(self._base.excluded), dtype=torch.int64)
            self._send_to_spares(excluded, Tag.SPARES_CALLED)
            self._take_place(GroupRevoked(mine.facts), mine)

    def _take_place(self, event: Event, mine: RankSnapshot | None) -> bool:
        """Take a place in a group, however often it is revoked; False if the run ends first."""
        waiter = None if mine is not None else _SpareWaiter(self._base)
        while True:
            match self._driver.decide(event):
                case WaitForPlace():
                    assert waiter is not None
                    waiter.wait()
                    if waiter.is_over:
                        return False
                    event = self._driver.lost()
                case FormGroup(plan):
                    self._snapshot = mine = None if mine is None else mine.of(plan.number)
                    try:
                        self._set_up(Takeover(self._base, plan, mine))
                        return True
                    except (RankLostError, PeerFailedError):
                        assert self._group is not None
                        self._group.leave()
                        event = GroupRevoked(None)
                case _:
                    return False

    def on_start(self) -> None:
        """Drop the snapshot of the former group: training starts."""
        if self.members.number > 1:
            self._machine.start_training()
            self._snapshot = None


class _SpareWaiter:
    """Wakes a spare rank when a rank fails or the run is over."""

    def __init__(self, base: Transport) -> None:
        self._base = base
        self._wake_request = self._new_request()
        self.is_over = False
        base.on_message(Tag.SPARES_GO, 1, self._end)
        base.on_message(Tag.SPARES_CALLED, 8 * base.size, self._exclude)
        base.on_failure(lambda rank: self._base.abandon(self._wake_request))

    def _new_request(self) -> Request:
        # No such message is sent: abandoning the receive wakes the waiting rank.
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._base.irecv(nothing, self._base.rank, Tag.SPARES_GO)

    def _end(self, source: int, message: Tensor) -> None:
        self.is_over = True
        self._base.abandon(self._wake_request)

    def _exclude(self, source: int, message: Tensor) -> None:
        for rank in message.view(torch.int64).tolist():
            if rank not in self._base.failed:
                self._base.exclude(rank)

    def wait(self) -> None:
        """Wait for a failure or the end of the run, unless it has happened already."""
        seconds = None if self._base.models_time else SPARE_WAIT_SECONDS
        while not self._wake_request.done:
            self._base.wait_any([self._wake_request], seconds)
        self._wake_request = self._new_request()
