"""Signs of life: who hangs, or is cut off by the network, is excluded from the run.

MPI tells of ranks that have died, if at all, but not of one that stands still (stopped, swapped
out, its file system gone) or whose link is cut. So every rank sends rank 0 a sign of life now
and then, which it answers. Rank 0 leaves out who has been silent for too long, and tells
everybody; also the silent one, which reads it when it comes back, and leaves.

Rank 0 itself is watched by a deputy, the first of the others, to whom the others send their
signs of life as well: so the deputy can tell a rank 0 that hangs from a link of its own that
is cut. Where the others can go on without rank 0 the deputy excludes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import ExcludedError, LostError
from aladdin_mpi.transport.base import Transport, surviving_ranks

SIGNS = 6
"""Signs of life that a rank sends within the time after which it would be excluded."""
DEPUTY_PATIENCE = 1.5
"""Of the deputy with rank 0, as a multiple of that time."""
PATIENCE = 3.0
"""The same of the others, who cannot know more."""
GOODBYE = 1
"""In a sign of life: it is the last one."""


class Heartbeats:
    """The signs of life of one rank. To be made, and closed, on every rank.

    They come from the transport's own thread, so that a rank that computes for long gives
    them too. A rank that has stood still itself gives the others time to be heard again.

    Args:
        timeout: seconds of silence after which a rank is excluded; 0: never.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        self._heard: dict[int, float] = {}
        self._last_look = transport.now()
        # Without a progress thread a rank that computes would seem to hang.
        self._hooks = transport.poll_hooks if timeout > 0 and transport.progresses else None
        if self._hooks is not None:
            others = set(range(transport.size)) - {transport.rank}
            self._heard = dict.fromkeys(others, transport.now())
            transport.exclude_from_traffic(Tag.ALIVE, Tag.EXCLUDED)
            transport.on_message(Tag.ALIVE, 8, self._hear)
            transport.on_message(Tag.EXCLUDED, 8, self._exclude)
            self._hooks.watch(self._look)

    def close(self) -> None:
        """The run is over for this rank: it goes silent, and nobody is watched any more."""
        if self._hooks is not None:
            self._hooks.unwatch(self._look)
            for dest in self._watchers():
                self._send(dest, GOODBYE)
            self._hooks = None

    def give_up(self) -> None:
        """The group has come apart: nobody is watched any more, and nobody told."""
        if self._hooks is not None:
            self._hooks.unwatch(self._look)
            self._hooks = None

    # -- signs of life ----------------------------------------------------------
    @property
    def _deputy(self) -> int:
        return (
            surviving_ranks(self._transport)[1:2][0]
            if len(surviving_ranks(self._transport)) > 1
            else 0
        )

    def _watchers(self) -> set[int]:
        """The ranks that have to hear of this one."""
        if self._transport.rank == 0:
            return set()
        return {0, self._deputy} - {self._transport.rank}

    def _send(self, dest: int, number: int = 0, tag: Tag = Tag.ALIVE) -> None:
        self._transport.isend(torch.tensor([number]), dest, tag)

    def _hear(self, source: int, message: Tensor) -> None:
        if int(message.view(torch.int64)) == GOODBYE:
            self._heard.pop(source, None)
            return
        if source in self._heard:
            self._heard[source] = self._transport.now()
        if self._transport.rank == 0:
            self._send(source)

    def _look(self) -> None:
        now = self._transport.now()
        if now - self._last_look < self._timeout / SIGNS:
            return
        with self._transport.atomic():
            stood_still = now - self._last_look > self._timeout / 2
            self._last_look = now
            if stood_still:
                self._heard = dict.fromkeys(self._heard, now)
            for dest in self._watchers():
                self._send(dest)
            self._judge(now)

    # -- silence ------------------------------------------------------------------
    def _judge(self, now: float) -> None:
        rank, standby = self._transport.rank, self._deputy
        if rank == 0:
            for other in self._silent(now, self._timeout):
                self._cut_off(other)
            return
        patience = DEPUTY_PATIENCE if rank == standby else PATIENCE
        if 0 in self._silent(now, patience * self._timeout):
            self._without_rank_0(now, rank == standby)

    def _silent(self, now: float, limit: float) -> list[int]:
        failed = self._transport.failed
        return [r for r, heard in self._heard.items() if now - heard > limit and r not in failed]

    def _cut_off(self, silent: int) -> None:
        """Leave a rank out, and tell everybody: at rank 0, or of rank 0."""
        if self._transport.survives:  # otherwise the job ends here
            for dest in surviving_ranks(self._transport):
                if dest != self._transport.rank:
                    self._send(dest, silent, Tag.EXCLUDED)
        self._transport.exclude(silent)

    def _exclude(self, source: int, message: Tensor) -> None:
        silent = int(message.view(torch.int64))
        if silent == self._transport.rank:
            raise ExcludedError(
                f"{self._name(silent)} was excluded from the run, as {self._name(source)} had no "
                f"heartbeat of it for {self._timeout:g} s: it leaves"
            )
        self._transport.exclude(silent)

    def _without_rank_0(self, now: float, is_deputy: bool) -> None:
        """Rank 0 is silent: go on without it, or end the job, or this rank alone.

        The latter where only its own link is cut.
        """
        silence = f"{self._name(0)} has sent no heartbeat for {now - self._heard[0]:.0f} s"
        if is_deputy and self._transport.is_revoked(without=0) and self._hears_most(now):
            self._cut_off(0)
            return
        if self._transport.survives and not (is_deputy and self._hears_others(now)):
            me = self._name(self._transport.rank)
            raise ExcludedError(f"{silence}: {me} takes itself for cut off, and leaves")
        raise LostError(f"{silence}; it keeps the run's books")

    def _hears_others(self, now: float) -> bool:
        """Whether what is wrong with rank 0 cannot be this rank's own link."""
        hosts, mine = self._transport.hosts, self._transport.host
        others = [
            r for r in surviving_ranks(self._transport)[1:] if hosts[r] != mine and r in self._heard
        ]
        if hosts[0] == mine or not others:
            return True
        return any(now - self._heard[r] <= self._timeout for r in others)

    def _hears_most(self, now: float) -> bool:
        """Whether this side of a network that is cut has more than half of the ranks.

        On the host of rank 0 it is rank 0 itself that hangs.
        """
        if self._transport.hosts[0] == self._transport.host:
            return True
        heard = sum(now - moment <= self._timeout for moment in self._heard.values())
        return 2 * (heard + 1) > len(surviving_ranks(self._transport))

    def _name(self, rank: int) -> str:
        return (
            f"rank {self._transport.original_ranks[rank]} (host {self._transport.host_names[rank]})"
        )
