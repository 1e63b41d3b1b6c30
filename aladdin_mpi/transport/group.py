"""Groups of ranks: a transport among some of the ranks of another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport import collectives
from aladdin_mpi.transport.base import Event, Handler, Request, Sendable, Transport, surviving_ranks
from aladdin_mpi.transport.collectives import Steps, channel_of
from aladdin_mpi.transport.wrapper import TransportWrapper

FIRST_TAG = 40_000
NUMBERS = 20_000
"""Number of tags for collectives, and so the largest number in progress."""


class Stepper:
    """Runner of a collective, in the thread in which the messages of a step end.

    It stops if a rank fails. ``finish`` is called at the end.
    """

    def __init__(
        self, steps: Steps, transport: Transport, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._steps = steps
        self._transport = transport
        self._finish = finish
        self.awaited: Sequence[Request] = ()
        """The messages of the current step."""
        self.has_ended = False
        self._is_abandoned = False

    def abandon(self) -> None:
        """Stop, and end all waits for its messages."""
        self._is_abandoned = True
        for request in self.awaited:
            self._transport.abandon(request)

    def advance(self) -> None:
        """Continue until a step has to wait for messages."""
        with self._transport.atomic():
            while not (self.has_ended or self._is_abandoned) and all(
                each.done and each.failed is None for each in self.awaited
            ):
                step = next(self._steps, None)
                if step is None:
                    self.has_ended = True
                    self._finish()
                    return
                self.awaited = step
                for request in step:
                    if not request.done:
                        self._transport.when_done(request, self.advance)


TAGS = 1 << 16
"""Number of tags of a group, including those of seals."""
LOSS = TAGS - 1
"""Tag of a message that is never sent: its receive ends when a rank fails."""
LEAVE = TAGS - 2
"""Tag with which a rank reports that it has left the group, which is then revoked."""


class RankLostError(Exception):
    """A rank that this group needs has failed; ``rank`` is its number in the group."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the group is lost")
        self.rank = rank


class Group(TransportWrapper):
    """A transport among ``ranks``, until a rank fails that they need.

    The group is then revoked: every wait ends with :class:`RankLostError`, as do later ones.

    Args:
        base: the transport among all ranks of the job.
        ranks: ranks of the group, including this one; their indices are their new numbers.
        number: counts the groups of the job from 1.
        needs: whether the group cannot continue without a given rank.
        may_raise: whether a wait may raise an error; otherwise it just ends.
        on_loss: called as a handler, also while this rank computes, when the group is revoked.
        before_close: called before the transport is closed.
        may_return: whether excluded ranks may return, in a later group.
    """

    def __init__(
        self,
        base: Transport,
        ranks: Sequence[int],
        number: int,
        needs: Callable[[int], bool],
        may_raise: Callable[[], bool] = lambda: True,
        on_loss: Callable[[], None] = lambda: None,
        before_close: Callable[[], None] = lambda: None,
        may_return: bool = False,
    ) -> None:
        is_whole = [*ranks] == [*range(base.size)]
        super().__init__(inner := base if is_whole else PartOfRanks(base, ranks))
        self._base = base
        self.number = number
        # The engine's collectives need all ranks of the job, also those called before this group.
        self.has_collectives = self.size == base.size and base.has_collectives and number == 1
        if not may_return:
            self.side_channel = None
        self._collectives = 0
        self._may_raise = may_raise
        self._on_loss = on_loss
        self._before_close = before_close
        self.lost: int | None = None
        """The first failed rank that the group needs."""
        self.is_excluded = False
        """Whether this rank was excluded, and may return."""
        self._needs = needs
        self._failure_actions: list[Callable[[int], None]] = []
        self._has_left = self._hears_leaves = False
        self._first_tag = number * TAGS
        empty = torch.empty(0, dtype=torch.uint8)
        self._loss = inner.irecv(empty, inner.rank, self._first_tag + LOSS)
        if number > 1:  # after a revocation during set-up, nothing remains of the first group
            self._hear_leaves()
        inner.on_failure(self._note)
        with inner.atomic():
            for rank in sorted(inner.failed):
                self._note(rank)

    def _hear_leaves(self) -> None:
        self._hears_leaves = True
        self.exclude_from_traffic(LEAVE)
        self.on_message(LEAVE, 1, lambda source, message: self._revoke(source))

    def _note(self, rank: int) -> None:
        if self._has_left:
            return
        if self._needs(rank):
            self._revoke(rank)
        elif self.side_channel is not None and not self._hears_leaves:
            self._hear_leaves()  # if this rank returns, a new group is formed
        for action in self._failure_actions:
            action(rank)

    def revoke(self) -> None:
        """Revoke the group on all ranks, so that a rank that has returned gets a place."""
        self._send_leaves()
        self._revoke(self.rank)

    def exclude(self, rank: int) -> None:
        if rank == self.rank and self.side_channel is not None:
            self.is_excluded = True
            self._revoke(rank)
        else:
            self.inner.exclude(rank)

    def _revoke(self, rank: int) -> None:
        if self.lost is None:
            self.lost = rank
            self.inner.abandon(self._loss)
            self._on_loss()

    def is_revoked(self, without: int | None = None) -> bool:
        return self.lost is not None if without is None else self._needs(without)

    def explains(self, error: PeerFailedError) -> bool:
        """Return whether the group needs the rank that has failed."""
        return self.lost is not None or self._needs(error.rank)

    def leave(self) -> None:
        """End all operations in the group, and notify the others; later messages are ignored.

        The others may not need the rank whose failure this rank has detected. An excluded rank
        does not notify them, as they continue without it.
        """
        if not self.is_excluded:
            self._send_leaves()
        self._has_left = True
        self._failure_actions = []  # which have references to all of this rank's part
        self.inner.abandon(range(self._first_tag, self._first_tag + TAGS))

    def _send_leaves(self) -> None:
        if self._hears_leaves:
            for rank in surviving_ranks(self):
                if rank != self.rank:
                    self.isend(torch.zeros(1, dtype=torch.uint8), rank, LEAVE)

    def close(self, status: int = 0) -> None:
        self._before_close()
        self.inner.close(status)

    # -- messages -----------------------------------------------------------------
    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        return self.inner.isend(buffer, dest, self._first_tag + tag, after)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return self.inner.irecv(buffer, source, self._first_tag + tag)

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
        if self._may_raise():
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
        """Raise, unless a wait may not raise, as in a backward hook, which could not handle it."""
        if self._may_raise() or not self.explains(error):
            raise error

    # -- collectives ------------------------------------------------------------------
    def _collective(self, name: str, *arguments: object) -> Request:
        """Start a collective; every rank of the group calls them in the same order."""
        if self.has_collectives:
            started: Request = getattr(self._base, f"i{name}")(*arguments)
            return started
        tag = FIRST_TAG + self._collectives % NUMBERS
        self._collectives += 1
        # A message that is never sent: its receive is cancelled when the collective has ended.
        empty = torch.empty(0, dtype=torch.uint8)
        end = self.inner.irecv(empty, self.inner.rank, self._first_tag + tag)
        steps = getattr(collectives, name)(channel_of(self, tag), *arguments)
        Stepper(steps, self, lambda: self.inner.cancel(end)).advance()
        return end

    def ibarrier(self) -> Request:
        return self._collective("barrier")

    def ibroadcast(self, buffer: Tensor, root: int) -> Request:
        return self._collective("broadcast", buffer, root)

    def iallreduce(self, buffer: Tensor, total: Tensor | None = None) -> Request:
        if self.has_collectives:
            return self._base.iallreduce(buffer, total)
        if total is not None and not total.is_meta:
            total.copy_(buffer)
        return self._collective("allreduce", buffer if total is None else total)

    def iallgather(self, buffer: Tensor, gathered: Tensor) -> Request:
        return self._collective("allgather", buffer, gathered)

    def ialltoall(self, buffer: Tensor, received: Tensor) -> Request:
        return self._collective("alltoall", buffer, received)

    # -- handlers, which stop when this rank leaves --------------------------------------
    def _until_left(self, action: Callable[..., None]) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            if not self._has_left:
                action(*arguments)

        return act

    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        handle = self._until_left(handler)
        self.inner.on_message(self._first_tag + tag, nbytes, handle, as_numbers=as_numbers)

    def on_failure(self, action: Callable[[int], None]) -> None:
        self._failure_actions = [*self._failure_actions, action]

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        self.inner.when_done(operation, self._until_left(action))


class PartOfRanks(TransportWrapper):
    """Messages among ``ranks``, including this one; their indices are their new numbers.

    The engine's collectives need all ranks, so they are not available.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self.has_collectives = self.meets = False  # both need all ranks of the job
        self._ranks = tuple(ranks)
        self._places = {rank: place for place, rank in enumerate(ranks)}
        self.rank, self.size = self._places[inner.rank], len(ranks)
        self.hosts = [inner.hosts[rank] for rank in ranks]
        self.host_names = [inner.host_names[rank] for rank in ranks]
        self.original_ranks = [inner.original_ranks[rank] for rank in ranks]

    def isend(self, buffer: Sendable, dest: int, tag: int, after: Event | None = None) -> Request:
        return self.inner.isend(buffer, self._ranks[dest], tag, after)

    def irecv(self, buffer: Tensor, source: int, tag: int) -> Request:
        return self.inner.irecv(buffer, self._ranks[source], tag)

    def test(self, request: Request) -> bool:
        try:
            return self.inner.test(request)
        except PeerFailedError as error:
            raise self._with_place(error) from None

    def wait_any(self, requests: Sequence[Request], timeout: float | None = None) -> int:
        try:
            return self.inner.wait_any(requests, timeout)
        except PeerFailedError as error:
            raise self._with_place(error) from None

    def _with_place(self, error: PeerFailedError) -> PeerFailedError:
        place = self._places.get(error.rank, error.rank)
        return PeerFailedError(place, self.inner.host_names[error.rank])

    def on_message(
        self, tag: int, nbytes: int, handler: Handler, *, as_numbers: bool = False
    ) -> None:
        def handle(source: int, message: Any) -> None:
            handler(self._places[source], message)

        self.inner.on_message(tag, nbytes, handle, as_numbers=as_numbers)

    @property
    def failed(self) -> frozenset[int]:
        return self._in_part(self.inner.failed)

    @property
    def excluded(self) -> frozenset[int]:
        return self._in_part(self.inner.excluded)

    def _in_part(self, ranks: frozenset[int]) -> frozenset[int]:
        return frozenset(self._places[rank] for rank in ranks if rank in self._places)

    def exclude(self, rank: int) -> None:
        self.inner.exclude(self._ranks[rank])

    def on_failure(self, action: Callable[[int], None]) -> None:
        def act(rank: int) -> None:
            if rank in self._places:
                action(self._places[rank])

        self.inner.on_failure(act)
