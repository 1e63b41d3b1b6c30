"""Return of excluded ranks: the messages between them and the others.

An excluded rank that still runs sends a request to all others. Rank 0 then revokes the group. The
leader of the rendezvous that follows invites those that have sent one, and those that answer are in
its announcement, which it sends to them too. Nothing waits for an excluded rank for long: it may
stop again at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from aladdin_mpi.control.exchange import packed, unpacked
from aladdin_mpi.errors import ExcludedError
from aladdin_mpi.transport.base import SideChannel, Transport

ANSWER_SECONDS = 3.0
"""Longest wait of a leader for the answers to its invitation."""
POLL = 0.02
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two requests: each pause is twice as long as the one before."""


class Returns:
    """One rank's messages with excluded ranks, or as an excluded rank.

    Args:
        base: the transport among all ranks of the job.
        channel: its side channel.
        incarnation: returns how often a rank has returned before: older requests do not count.
    """

    def __init__(
        self, base: Transport, channel: SideChannel, incarnation: Callable[[int], int]
    ) -> None:
        self._base = base
        self._channel = channel
        self._incarnation_of = incarnation
        self._requests: dict[int, dict[str, Any]] = {}
        """The newest request of each rank."""
        self._own_incarnation = 0
        self._excluded_after = -1
        """The newest group after which a message has excluded this rank."""
        self._invitations: list[tuple[int, int]] = []
        """Invitations that have not been answered: the leader, and the number of the next group."""
        self._announced: dict[str, Any] | None = None
        self._is_over = False

    # -- messages -------------------------------------------------------------------------
    def _post(self, message: Mapping[str, Any], dest: int) -> None:
        self._channel.post(packed(dict(message)).numpy().tobytes(), dest)

    def look(self, ranks: Collection[int]) -> bool:
        """Read what ``ranks`` have sent; return whether one requests a place."""
        has_requested = False
        for rank in ranks:
            while (message := self._channel.read(rank)) is not None:
                read = unpacked(torch.frombuffer(bytearray(message), dtype=torch.uint8))
                has_requested |= self._take(rank, read)
        return has_requested

    def _take(self, rank: int, message: dict[str, Any]) -> bool:
        match message:
            case {"request": incarnation}:
                if incarnation > self._incarnation_of(rank):
                    self._requests[rank] = message
                    return True
            case {"invite": number}:
                self._invitations.append((rank, number))
                self._excluded_after = max(self._excluded_after, number - 1)
            case {"excluded": number}:
                self._excluded_after = max(self._excluded_after, number)
            case {"over": _}:
                self._is_over = True
            case {"members": members}:
                if any(
                    each[::2] == (self._base.rank, self._own_incarnation)
                    for each in members["returns"]
                ):
                    self._announced = message
        return False

    @property
    def _others(self) -> list[int]:
        base = self._base
        gone = (base.failed - base.excluded) | self._channel.failed() | {base.rank}
        return [rank for rank in range(base.size) if rank not in gone]

    # -- a rank that takes part in the run --------------------------------------------------
    def has_requested(self, rank: int) -> bool:
        """Return whether a rank is excluded, and runs; it may be news that it is excluded."""
        self.look([rank])
        return rank in self._requests

    def invite(self, number: int) -> dict[int, int]:
        """Invite excluded ranks that request a place; return how often those that answer returned.

        ``number`` is that of the next group.
        """
        self.look(self._base.excluded)
        invited = self._base.excluded.intersection(self._requests)
        for rank in invited:
            self._post({"invite": number}, rank)
        end = self._base.now() + ANSWER_SECONDS
        while True:
            answered = {rank for rank in invited if self._requests[rank]["answers"] == number}
            if answered == invited or self._base.now() > end:
                break
            self._base.sleep(POLL)
            self.look(invited)
        requests = {rank: self._requests.pop(rank) for rank in invited}
        for rank in invited - answered:
            self.tell_excluded(rank, number - 1)
        return {rank: int(requests[rank]["request"]) for rank in answered}

    def readmit(self, rank: int) -> bool:
        """Exclude a rank no more; return whether it has not failed."""
        self._requests.pop(rank, None)
        self._channel.readmit(rank)
        return rank not in self._base.failed

    def announce(self, announcement: Mapping[str, Any], dest: int) -> None:
        """Send the announcement of the next group to a rank that has answered the invitation."""
        self._post(announcement, dest)

    def tell_excluded(self, rank: int, number: int) -> None:
        """Tell a rank that it is excluded from the groups after ``number``."""
        self._post({"excluded": number}, rank)

    def release(self) -> None:
        """Let the excluded ranks leave: the run is over."""
        for rank in self._base.excluded:
            self._post({"over": True}, rank)

    # -- a rank that is, or may be, excluded --------------------------------------------------
    def is_excluded(self, number: int) -> bool:
        """Return whether a message has excluded this rank from the groups after ``number``."""
        self.look(self._others)
        return self._excluded_after >= number

    def wait(self, name: str) -> dict[str, Any]:
        """Wait until a leader announces a group with this rank; return the announcement.

        Raises:
            ExcludedError: the run has ended. ``name`` describes this rank in the message.
        """
        self._own_incarnation += 1
        self._announced = None
        request_at, pause = self._base.now(), FIRST_PAUSE
        while True:
            if self._base.now() >= request_at:
                for rank in self._others:
                    self._request(rank)
                request_at, pause = self._base.now() + pause, min(2 * pause, LONGEST_PAUSE)
            self.look(self._others)
            if self._announced is not None:
                return self._announced
            if self._is_over or not self._others:
                raise ExcludedError(f"the run has ended without {name}, which was excluded")
            while self._invitations:
                self._request(*self._invitations.pop(0))
            self._base.sleep(POLL)

    def _request(self, rank: int, answers: int = 0) -> None:
        self._post({"request": self._own_incarnation, "answers": answers}, rank)
