"""A run in one group of ranks after another.

The rules are in :mod:`.elasticity`, which :mod:`.elasticity_driver` connects to the transport; this
module has this rank's part in each group.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.control.budget import WorkerReport
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import ExcludedError, PeerFailedError
from aladdin_mpi.options.algorithms import FAULT_TOLERANT_ALLREDUCES, Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.elasticity import (
    ElasticityMachine,
    Event,
    Excluded,
    FormGroup,
    GroupRevoked,
    Membership,
    WaitForPlace,
    begin,
)
from aladdin_mpi.run.elasticity_driver import ElasticityDriver, SpareWaiter
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.run_folder import OpenFolder
from aladdin_mpi.run.takeover import LoopProgress, RankSnapshot, Takeover, snapshot
from aladdin_mpi.session.coordinator import Coordinator, RunHook
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.group import Group, RankLostError
from aladdin_mpi.worker.island import host_groups

T = TypeVar("T")
Assemble = Callable[[Transport, RunOptions, "Takeover | None", Sequence[RunHook]], Rank]
"""Builds this rank in a group, with the given hooks in addition to its own."""


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
            may_return=base.side_channel is not None,
        )
        patience = 0.0 if base.models_time else options.worker_timeout
        self._driver = ElasticityDriver(base, self._machine, patience)
        self._group: Group | None = None
        self.rank: Rank | None = None
        self._snapshot: RankSnapshot | None = None
        """This rank's snapshot of the former group, until training starts."""
        self._waiter: SpareWaiter | None = None
        self._left_folder: OpenFolder | None = None
        """The run's folder before this rank's exclusion: its lock is kept."""
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
            self._machine.may_return,
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
        if takeover is not None and not self._base.models_time:
            gc.collect()  # the former group's parts refer to each other, and have large vectors

    def _report_coming(self) -> None:
        """Report to the next leader that this rank will join, even if its step takes long."""
        self._machine.note_lost(self._base.failed)
        leader = self._machine.next_leader
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
        self._driver.release_excluded()

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
            if self._group.is_excluded:
                self._return()
                continue
            mine = snapshot(self.rank, self.members, self._progress, self._snapshot)
            self.rank.give_up()
            self._group.leave()
            # Excluded ranks may still run, so spare ranks do not detect them as failed.
            called = [self.members.number, *sorted(self._base.excluded)]
            self._send_to_spares(torch.tensor(called, dtype=torch.int64), Tag.SPARES_CALLED)
            self._take_place(GroupRevoked(mine.facts), mine)

    def _return(self) -> None:
        """Take a place in the run again from which this rank was excluded.

        Raises:
            ExcludedError: the run has ended before.
        """
        assert self.rank is not None and self._group is not None
        self._left_folder = self.rank.folder
        self.rank.give_up()
        self._group.leave()
        if not self._take_place(Excluded(), None):
            me = self._base.rank
            raise ExcludedError(
                f"the run has ended without rank {me} (host {self._base.host_names[me]}), which "
                "was excluded and waited for a place"
            )

    def _take_place(self, event: Event, mine: RankSnapshot | None) -> bool:
        """Take a place in a group, however often it is revoked; False if the run ends first."""
        if mine is None and self._waiter is None:
            self._waiter = SpareWaiter(self._base, self._machine)
        while True:
            match self._driver.decide(event):
                case WaitForPlace():
                    assert self._waiter is not None
                    event = self._waiter.wait()
                    if self._waiter.is_over:
                        return False
                case FormGroup(plan):
                    is_new = plan.members.returned_at(self._base.rank) > plan.number
                    mine = None if mine is None or is_new else mine.of(plan.number)
                    self._snapshot = mine
                    try:
                        self._set_up(Takeover(self._base, plan, mine))
                        return True
                    except (RankLostError, PeerFailedError):
                        assert self._group is not None
                        self._group.leave()
                        event = Excluded() if self._group.is_excluded else GroupRevoked(None)
                case _:
                    return False

    def on_report(self, run: Coordinator, report: WorkerReport) -> None:
        """Let a rank that was excluded return at once: the next group has a place for it."""
        if run.budget.used_up or run.suspended or not self._driver.has_returned():
            return
        if self._group is not None and self._group.lost is None:
            self._group.revoke()

    def on_start(self) -> None:
        """Drop the snapshot of the former group: training starts."""
        if self.members.number > 1:
            self._machine.start_training()
            self._snapshot = None
