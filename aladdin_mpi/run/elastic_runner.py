"""A rank's part in a run, group after group: when one comes apart, those who are left go on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import LostError, PeerFailedError
from aladdin_mpi.options.algorithms import OUTLAST_DEATHS, Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.membership import begin, next_membership, rendezvous
from aladdin_mpi.run.rank import Rank
from aladdin_mpi.run.takeover import LoopProgress, RankSnapshot, Takeover, former_ranks, snapshot
from aladdin_mpi.transport.base import Request, Transport, surviving_ranks
from aladdin_mpi.transport.group import Group, RankLostError

T = TypeVar("T")
Assemble = Callable[[Transport, RunOptions, "Takeover | None"], Rank]
"""Puts this rank together in a group."""


def can_follow(options: RunOptions, algorithm: Algorithm) -> bool:
    """Whether those who are left when a rank is lost can form a new group."""
    sums = getattr(getattr(options, algorithm.group, None), "allreduce", "auto")
    # Libraries need every rank that they were started with; shards are dealt once.
    return sums in OUTLAST_DEATHS and not options.node_sums and options.dataset != "shards"


LOOK_SECONDS = 60.0
"""Of a spare rank between two looks at whether it waits still: no wait lasts longer."""


class ElasticRunner:
    """Forms groups, and trains in one after another.

    Args:
        base: the transport among all ranks of the job.
        options: of the run.
        algorithm: of the run.
        seal: puts checksums on a group's messages, where they are asked for.
    """

    def __init__(
        self,
        base: Transport,
        options: RunOptions,
        algorithm: Algorithm,
        seal: Callable[[Transport], Transport],
    ) -> None:
        self._base = base
        self.options = options
        self._algorithm = algorithm
        self._seal = seal
        servers = options.servers if algorithm.has_servers else 0
        self.members = begin(base.size, servers, options.spares)
        self._group: Group | None = None
        self.may_raise: Callable[[], bool] = lambda: True
        """Whether this rank is where an error brings it here; see :class:`Group`."""
        self.assemble: Assemble = _not_yet
        """Puts this rank together in a group."""
        self.on_change: Callable[[Rank], None] = lambda rank: None
        """Called with this rank's part in every new group."""
        self.progress = LoopProgress()
        """Of the user's loop at this rank."""
        self.rank: Rank | None = None
        self._has_ended = False
        self._coming: set[int] | None = None
        """Who has said so; None: nobody has been heard yet, as no group has come apart."""

    @property
    def is_spare(self) -> bool:
        """Whether this rank has no place yet."""
        return self._base.rank in self.members.spares

    def _new_transport(self) -> Transport:
        """Among the members; all ranks' own where nobody survives a death."""
        if not self._base.survives and not self.members.spares:
            return self._seal(self._base)
        members = self.members
        self._group = Group(self._base, members.ranks, members.number, self._needs)
        self._group.may_raise = self.may_raise_now
        self._group.on_loss = self._say_coming
        self._group.before_close = self.end
        return self._seal(self._group)

    def may_raise_now(self) -> bool:
        """See :attr:`may_raise`."""
        return self.may_raise()

    def _needs(self, place: int) -> bool:
        """Whether the present group comes apart without a rank of it."""
        if not can_follow(self.options, self._algorithm):
            return False
        all_are_needed = self._algorithm.needs_all(self.options) or self.members.spares
        return bool(all_are_needed) or place < max(1, self.members.servers)

    def begin(self) -> bool:
        """Take a place in the run; False: it has ended before a spare rank got one.

        Raises:
            PeerFailedError: a rank has died of which there is nothing yet to go on from.
        """
        if self.is_spare:
            return self._wait_for_place()
        transport = self._new_transport()
        try:
            self.rank = self.assemble(transport, self.options, None)
        except RankLostError as error:
            number = transport.original_ranks[error.rank]
            raise PeerFailedError(number, transport.host_names[error.rank]) from None
        self.on_change(self.rank)
        return True

    def _wait_for_place(self) -> bool:
        """Until a rank is lost, or the run ends."""
        bell = _SpareWaiter(self._base)
        while self.is_spare:
            if not self._base.failed.intersection(self.members.ranks):
                bell.wait()
            if bell.is_over:
                return False
            if self._base.failed.intersection(self.members.ranks):
                while not self._enter(None):
                    pass
        return True

    def _those_who_come(self) -> set[int]:
        """Hear them from now on: a receive that is always posted would cost in every look."""
        if self._coming is None:
            coming = self._coming = set[int]()
            self._base.on_message(Tag.COMING, 1, lambda source, message: coming.add(source))
        return self._coming

    def _say_coming(self) -> None:
        """To whom gathers the next group: this rank lives, though its step may take long."""
        with suppress(LostError):  # which is told of by whoever gathers
            leader = next_membership(self.members, surviving_ranks(self._base)).ranks[0]
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
        self._go_on(lambda rank: rank.segments.run())

    def complete(self) -> dict[str, Any]:
        """Complete the run; the summary at its rank 0, when that has written everything."""

        def complete(rank: Rank) -> dict[str, Any]:
            rank.segments.run()  # to its end, where a loss has brought the run back
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
            self._follow(snapshot(self.rank, self.members, self.progress))

    def _follow(self, left: RankSnapshot) -> None:
        """Take a place in the group that follows, however often it comes apart meanwhile."""
        assert self.rank is not None and self._group is not None
        self.rank.give_up()
        self._group.leave()
        self._call_spares()
        while not self._enter(left):
            pass

    def _enter(self, left: RankSnapshot | None) -> bool:
        """Form the next group, and take a place in it; whether that could be done."""
        brought = {} if left is None else left.brought
        patience = 0.0 if self._base.models_time else self.options.worker_timeout
        coming = self._those_who_come()
        gathered = rendezvous(self._base, self.members, brought, patience, coming.__contains__)
        coming.clear()
        self.members = gathered.members
        if self.is_spare:
            return True
        options = self.options.model_copy(update={"servers": max(1, self.members.servers)})
        takeover = Takeover(
            self._base, self.members, former_ranks(gathered), gathered.brought, left
        )
        takeover.check()
        transport = self._new_transport()
        assert self._group is not None
        try:
            self.rank = self.assemble(transport, options, takeover)
        except (RankLostError, PeerFailedError):
            self._group.leave()
            return False
        self.on_change(self.rank)
        return True


class _SpareWaiter:
    """Rings for a spare rank when a rank is lost, and when the run is over."""

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


def _not_yet(transport: Transport, options: RunOptions, takeover: Takeover | None) -> Rank:
    raise AssertionError("nobody has said how a rank is put together")
