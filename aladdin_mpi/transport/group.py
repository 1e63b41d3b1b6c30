"""The ranks that train: a transport among some of the ranks of another."""

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
"""Tags of collectives: so many can be under way at once."""


class Stepper:
    """Takes the steps of a collective as the messages of each have ended, in whichever thread.

    If a rank is lost it stands still. ``finish`` is called at the end.
    """

    def __init__(
        self, steps: Steps, transport: Transport, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._steps = steps
        self._transport = transport
        self._finish = finish
        self.awaited: Sequence[Request] = ()
        """The messages of the present step."""
        self.has_ended = False
        self._is_abandoned = False

    def abandon(self) -> None:
        """Go no further, and wait for nothing more."""
        self._is_abandoned = True
        for request in self.awaited:
            self._transport.abandon(request)

    def advance(self) -> None:
        """Go on as far as nothing is awaited."""
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
"""Tags of a group, the seals of messages among them."""
LOSS = TAGS - 1
"""The tag of a message that never comes: its receive ends when a rank is lost."""
APART = TAGS - 2
"""The tag with which a rank reports that it has left the group, which is revoked then."""


class RankLostError(Exception):
    """A rank has been lost that this group needs; ``rank`` is its number in the group."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"rank {rank} of the group is lost")
        self.rank = rank


class Group(TransportWrapper):
    """The transport among ``ranks``, until one of them is lost that they need.

    Every wait then ends with :class:`RankLostError`, and so does every later one.

    Args:
        base: the transport among all ranks of the job.
        ranks: of the group, including this one; a rank's place in it is its number there.
        number: counts the groups of a job, from 0.
        needs: whether the group cannot go on without a rank of it.
        may_raise: whether a wait may end by an error; otherwise it just ends.
        on_loss: called as a handler, also while this rank computes, when the group comes apart.
        before_close: called before the transport is closed.
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
    ) -> None:
        is_whole = [*ranks] == [*range(base.size)]
        super().__init__(inner := base if is_whole else PartOfRanks(base, ranks))
        self._base = base
        self.number = number
        # The engine's, which need all ranks of the job.
        self.has_collectives = self.size == base.size and base.has_collectives
        self._collectives = 0
        self._may_raise = may_raise
        self._on_loss = on_loss
        self._before_close = before_close
        self.lost: int | None = None
        """The first rank lost that it needs."""
        self._needs = needs
        self._has_left = False
        self._first_tag = number * TAGS
        nothing = torch.empty(0, dtype=torch.uint8)
        self._loss = inner.irecv(nothing, inner.rank, self._first_tag + LOSS)
        if number > 1:  # of a first group that is revoked in its set-up nothing is left
            self.exclude_from_traffic(APART)
            self.on_message(APART, 1, lambda source, message: self._revoke(source))
        inner.on_failure(self._note)
        with inner.atomic():
            for rank in sorted(inner.failed):
                self._note(rank)

    def _note(self, rank: int) -> None:
        if not self._has_left and self._needs(rank):
            self._revoke(rank)

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
        """End all that is under way in it, and notify the others; later messages are ignored.

        They may not have needed the rank that this one has just waited for.
        """
        for rank in surviving_ranks(self):
            if rank != self.rank and self.number > 1:
                self.isend(torch.zeros(1, dtype=torch.uint8), rank, APART)
        self._has_left = True
        self.inner.abandon(range(self._first_tag, self._first_tag + TAGS))

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
        """In the user's code, as in a hook of backward, nobody could do with this error."""
        if self._may_raise() or not self.explains(error):
            raise error

    # -- collectives ------------------------------------------------------------------
    def _collective(self, name: str, *arguments: object) -> Request:
        """Start one; every rank of the group calls them in the same order."""
        if self.has_collectives:
            started: Request = getattr(self._base, f"i{name}")(*arguments)
            return started
        tag = FIRST_TAG + self._collectives % NUMBERS
        self._collectives += 1
        # A message that never comes: its receive is taken back when the collective has ended.
        nothing = torch.empty(0, dtype=torch.uint8)
        end = self.inner.irecv(nothing, self.inner.rank, self._first_tag + tag)
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

    # -- handlers, which end when this rank leaves --------------------------------------
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
        self.inner.on_failure(self._until_left(action))

    def when_done(self, operation: Request | Event, action: Callable[[], None]) -> None:
        self.inner.when_done(operation, self._until_left(action))


class PartOfRanks(TransportWrapper):
    """Messages among ``ranks``, this one included; their numbers are their places in it.

    Collectives of the engine need all ranks, so there are none.
    """

    def __init__(self, inner: Transport, ranks: Sequence[int]) -> None:
        super().__init__(inner)
        self.has_collectives = self.meets = False  # not all of the job's ranks are here
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
        return self._here(self.inner.failed)

    @property
    def excluded(self) -> frozenset[int]:
        return self._here(self.inner.excluded)

    def _here(self, ranks: frozenset[int]) -> frozenset[int]:
        return frozenset(self._places[rank] for rank in ranks if rank in self._places)

    def exclude(self, rank: int) -> None:
        self.inner.exclude(self._ranks[rank])

    def on_failure(self, action: Callable[[int], None]) -> None:
        def act(rank: int) -> None:
            if rank in self._places:
                action(self._places[rank])

        self.inner.on_failure(act)
