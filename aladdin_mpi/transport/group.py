"""Ranks that train together until one of them is lost without which they cannot go on.

Those who are left then form a new group. Its messages have tags of their own, so that what is
still on its way from the former one is never taken for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import Handler, Transport
from aladdin_mpi.transport.collectives import Steps
from aladdin_mpi.transport.group_collectives import FIRST_TAG, NUMBERS, Channel, Stepper
from aladdin_mpi.transport.layer import Layer
from aladdin_mpi.transport.part import PartOfRanks
from aladdin_mpi.transport.request import Event, Request

TAGS = 1 << 16
"""Tags of a group, the seals of messages among them."""
LOSS = TAGS - 1
"""The tag of a message that never comes: its receive ends when a rank is lost."""

APART = TAGS - 2
"""The tag with which a rank says that it has left the group, which has come apart then."""


class RankLostError(Exception):
    """A rank has been lost without which this group cannot go on.

    Attributes:
        rank: its number in the group.
    """

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the group is lost")
        self.rank = rank


def may_raise() -> bool:
    """Where nobody says otherwise, a wait may end by an error."""
    return True


def _nothing() -> None:
    """Nobody has to be told."""


class Group(Layer):
    """The transport among ``ranks``, until one of them is lost that they need.

    Every wait then ends with :class:`RankLostError`, and so does every later one.

    Args:
        base: the transport among all ranks of the job.
        ranks: of the group, this one among them; a rank's place in it is its number there.
        number: counts the groups of a job, from 0.
        needs: whether the group cannot go on without a rank of it.
    """

    def __init__(
        self,
        base: Transport,
        ranks: Sequence[int],
        number: int,
        needs: Callable[[int], bool],
    ) -> None:
        is_whole = [*ranks] == [*range(base.size)]
        super().__init__(inner := base if is_whole else PartOfRanks(base, ranks))
        self._base = base
        self.number = number
        # The engine's, which need all ranks of the job.
        self.has_collectives = self.size == base.size and base.has_collectives
        self._collectives = 0
        self.may_raise: Callable[[], bool] = may_raise
        """Whether a caller may be told of a loss by an error; a wait just ends otherwise."""
        self.on_loss: Callable[[], None] = _nothing
        """Called as a handler, also while this rank computes, when the group comes apart."""
        self.before_close: Callable[[], None] = _nothing
        """What this rank has to do before it closes."""
        self.lost: int | None = None
        """The first rank lost that it needs."""
        self._needs = needs
        self._has_left = False
        self._first_tag = number * TAGS
        nothing = torch.empty(0, dtype=torch.uint8)
        self._loss = inner.irecv(nothing, inner.rank, self._first_tag + LOSS)
        if number > 1:  # of a first group that comes apart in its set-up nothing is left
            self.exclude_from_traffic(APART)
            self.on_message(APART, 1, lambda source, message: self._come_apart(source))
        inner.on_failure(self._note)
        with inner.atomic():
            for rank in sorted(inner.failed):
                self._note(rank)

    def _note(self, rank: int) -> None:
        if not self._has_left and self._needs(rank):
            self._come_apart(rank)

    def _come_apart(self, rank: int) -> None:
        if self.lost is None:
            self.lost = rank
            self.inner.abandon(self._loss)
            self.on_loss()

    @property
    def has_come_apart(self) -> bool:
        return self.lost is not None

    def comes_apart_without(self, rank: int) -> bool:
        return self._needs(rank)

    def explains(self, error: PeerFailedError) -> bool:
        """Whether the group cannot go on without the rank of which the error tells."""
        return self.lost is not None or self._needs(error.rank)

    def leave(self) -> None:
        """End all that is under way in it, and tell the others; nothing is heard that still comes.

        They may not have needed whom this rank has just waited for.
        """
        for rank in self.living:
            if rank != self.rank and self.number > 1:
                self.isend(torch.zeros(1, dtype=torch.uint8), rank, APART)
        self._has_left = True
        self.inner.abandon_tags(range(self._first_tag, self._first_tag + TAGS))

    def close(self, status: int = 0) -> None:
        self.before_close()
        self.inner.close(status)

    # -- messages -----------------------------------------------------------------
    def isend(self, buffer: Tensor, dest: int, tag: int, after: Event | None = None) -> Request:
        return super().isend(buffer, dest, self._first_tag + tag, after)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return super().irecv(buffer, source, self._first_tag + tag)

    def exclude_from_traffic(self, *tags: int) -> None:
        self.inner.exclude_from_traffic(*(self._first_tag + tag for tag in tags))

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        if self.lost is None:
            try:
                first = self.inner.wait_any([*requests, self._loss], timeout)
            except PeerFailedError as error:
                self._raise_unless_held_back(error)
                return 0
            if first < len(requests):
                return first
        if self.may_raise():
            assert self.lost is not None
            raise RankLostError(self.lost)
        return 0

    def test(self, request: Request) -> bool:
        try:
            return self.inner.test(request)
        except PeerFailedError as error:
            self._raise_unless_held_back(error)
            return True

    def _raise_unless_held_back(self, error: PeerFailedError) -> None:
        """In the user's code, as in a hook of backward, nobody could do with this error."""
        if self.may_raise() or not self.explains(error):
            raise error

    # -- collectives ------------------------------------------------------------------
    def _collective(self, algorithm: Callable[..., Steps], *arguments: object) -> Request:
        """Start one; every rank of the group calls them in the same order."""
        tag = FIRST_TAG + self._collectives % NUMBERS
        self._collectives += 1
        channel = Channel(
            self.rank,
            self.size,
            lambda buffer, dest: self.isend(buffer, dest, tag),
            lambda buffer, source: self.irecv(buffer, source, tag),
        )
        # A message that never comes: its receive is taken back when the collective has ended.
        nothing = torch.empty(0, dtype=torch.uint8)
        end = self.inner.irecv(nothing, self.inner.rank, self._first_tag + tag)
        steps = algorithm(channel, *arguments)
        Stepper(steps, self, lambda: self.inner.cancel(end)).advance()
        return end

    def ibarrier(self) -> Request:
        if self.has_collectives:
            return self._base.ibarrier()
        return self._collective(collectives.barrier)

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        if self.has_collectives:
            return self._base.ibroadcast(buffer, root)
        return self._collective(collectives.broadcast, buffer, root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        if self.has_collectives:
            return self._base.iallreduce(buffer, total)
        if total is not None and not total.is_meta:
            total.copy_(buffer)
        return self._collective(collectives.allreduce, buffer if total is None else total)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        if self.has_collectives:
            return self._base.iallgather(buffer, gathered)
        return self._collective(collectives.allgather, buffer, gathered)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        if self.has_collectives:
            return self._base.ialltoall(buffer, received)
        return self._collective(collectives.alltoall, buffer, received)

    # -- handlers -------------------------------------------------------------------
    def on_message(self, tag: int, nbytes: int, handler: Handler) -> None:
        def handle(source: int, message: Tensor) -> None:
            if not self._has_left:
                handler(source, message)

        super().on_message(self._first_tag + tag, nbytes, handle)

    def on_failure(self, action: Callable[[int], None]) -> None:
        def act(rank: int) -> None:
            if not self._has_left:
                action(rank)

        super().on_failure(act)

    def when_done(self, request: Request, action: Callable[[], None]) -> None:
        self.inner.when_done(request, self._unless_left(action))

    def when_happened(self, event: Event, action: Callable[[], None]) -> None:
        self.inner.when_happened(event, self._unless_left(action))

    def _unless_left(self, action: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            if not self._has_left:
                action()

        return act
