"""Heartbeats, by which hanging or disconnected ranks are detected and excluded from the run.

MPI may report failed ranks, but not one that hangs (stopped, swapped out, on a failed file system)
or whose link is down. So every rank sends heartbeats to rank 0, which answers them. Rank 0 excludes
ranks whose heartbeats time out, and notifies all; also the excluded one, which reads the message
if it comes back, and waits for another place or exits.

A standby, the first of the other ranks, watches rank 0. The others send heartbeats to it as
well, so that it can distinguish a hanging rank 0 from a failure of its link. If the others
can continue without rank 0, the standby excludes it.

If a cut link separates rank 0 from its standby, only one side may continue, as both would write
to the same files. The side with more ranks is the first to claim the run, if its ranks do not hang.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import CutOffError, ExcludedError, LostError
from aladdin_mpi.process import console
from aladdin_mpi.transport.base import Transport, surviving_ranks

SIGNS = 6
"""Number of heartbeats that a rank sends within the timeout."""
STANDBY_PATIENCE, PATIENCE = 1.5, 3.0
"""Multiples of the timeout after which the standby and the other ranks give up rank 0."""
MINORITY_PATIENCE = 2.5
"""Multiple of the timeout after which rank 0 continues without its standby and most ranks, unless
they continue without it."""
GOODBYE = 1
"""Marks a rank's last heartbeat."""


class Heartbeats:
    """The heartbeats of one rank; to be created and closed on every rank.

    The transport's thread sends them, so that a rank that computes for a long time sends them too.
    After a pause, a rank gives the others time to send heartbeats again.

    Args:
        timeout: number of seconds without a heartbeat after which a rank is excluded; 0: never.
        claim: claims the run for the side of a cut link on which this rank is; returns whether it
            is the first, on any rank, to do so.
    """

    def __init__(
        self, transport: Transport, timeout: float, claim: Callable[[], bool] = lambda: True
    ) -> None:
        self._transport = transport
        self._timeout = timeout
        self._claim = claim
        self._has_claimed = False
        self._heard: dict[int, float] = {}
        self._last_check = transport.now()
        # Without a progress thread a computing rank would seem to hang.
        self._hooks = transport.poll_hooks if timeout > 0 and transport.progresses else None
        if self._hooks is not None:
            others = set(range(transport.size)) - {transport.rank}
            self._heard = dict.fromkeys(others, transport.now())
            transport.exclude_from_traffic(Tag.HEARTBEAT, Tag.EXCLUDED)
            transport.on_message(Tag.HEARTBEAT, 8, self._record_heartbeat)
            transport.on_message(Tag.EXCLUDED, 8, self._exclude)
            self._hooks.watch(self._check)

    def close(self) -> None:
        """Stop heartbeats and watching at the end of the run on this rank."""
        if self._hooks is not None:
            self.give_up()
            for dest in self._watchers():
                self._send(dest, GOODBYE)

    def give_up(self) -> None:
        """Stop watching without notifying other ranks, as the group is revoked."""
        if self._hooks is not None:
            self._hooks.unwatch(self._check)
            self._hooks = None

    @property
    def _standby(self) -> int:
        return next(iter(surviving_ranks(self._transport)[1:]), 0)

    def _watchers(self) -> set[int]:
        """Return the ranks to which this one sends heartbeats."""
        if self._transport.rank == 0:
            return set()
        return {0, self._standby} - {self._transport.rank}

    def _send(self, dest: int, number: int = 0, tag: Tag = Tag.HEARTBEAT) -> None:
        self._transport.isend(torch.tensor([number]), dest, tag)

    def _record_heartbeat(self, source: int, message: Tensor) -> None:
        if int(message.view(torch.int64)) == GOODBYE:
            self._heard.pop(source, None)
            return
        if source in self._heard:
            self._heard[source] = self._transport.now()
        if self._transport.rank == 0:
            self._send(source)

    def _check(self) -> None:
        now = self._transport.now()
        if now - self._last_check < self._timeout / SIGNS:
            return
        with self._transport.atomic():
            has_paused = now - self._last_check > self._timeout / 2
            self._last_check = now
            if has_paused:
                self._heard = dict.fromkeys(self._heard, now)
            for dest in self._watchers():
                self._send(dest)
            self._judge(now)

    def _judge(self, now: float) -> None:
        if self._transport.rank == 0:
            silent = self._silent(now, self._timeout)
            if silent and self._may_continue(now):
                for other in silent:
                    self._cut_off(other)
            return
        is_standby = self._transport.rank == self._standby
        patience = STANDBY_PATIENCE if is_standby else PATIENCE
        if 0 in self._silent(now, patience * self._timeout):
            self._continue_without_rank_0(now, is_standby)

    def _silent(self, now: float, limit: float) -> list[int]:
        failed = self._transport.failed
        return [r for r, heard in self._heard.items() if now - heard > limit and r not in failed]

    def _may_continue(self, now: float) -> bool:
        """Return whether rank 0 may exclude silent ranks now.

        Raises:
            CutOffError: their standby continues without this rank.
        """
        standby = self._standby
        # A cut link silences all ranks on its other side within the time between two heartbeats.
        silent = self._silent(now, self._timeout * (1 - 2 / SIGNS))
        majority = 2 * len(silent) - len(surviving_ranks(self._transport))
        if standby not in silent or majority < 0 or not self._may_be_cut_from(standby):
            return True
        if majority > 0 and now - self._heard[standby] < MINORITY_PATIENCE * self._timeout:
            return False
        if self._claims():
            return True
        raise self._cut_off_error(self._silence_of(standby))

    def _may_be_cut_from(self, other: int) -> bool:
        """Return whether rank 0 and the standby could both continue, as a link is cut."""
        hosts = self._transport.hosts
        rest_continues = self._transport.survives and self._transport.is_revoked(without=0)
        return rest_continues and hosts[other] != hosts[self._transport.rank]

    def _claims(self) -> bool:
        """Claim the run. If the file system hangs, this side waits: it could not write either."""
        self._has_claimed = self._has_claimed or self._claim()
        return self._has_claimed

    def _cut_off(self, silent: int) -> None:
        """Exclude a rank and notify all; called on rank 0, or for rank 0 on the standby."""
        if self._transport.survives:  # otherwise the job ends here
            for dest in surviving_ranks(self._transport):
                if dest != self._transport.rank:
                    self._send(dest, silent, Tag.EXCLUDED)
        self._transport.exclude(silent)

    def _exclude(self, source: int, message: Tensor) -> None:
        silent = int(message.view(torch.int64))
        if silent == self._transport.rank:
            reason = (
                f"{self._name(silent)} was excluded from the run, because {self._name(source)} "
                f"had received no heartbeat from it for {self._timeout:g} s"
            )
            if self._transport.side_channel is None:
                raise ExcludedError(f"{reason}; it exits")
            console.say(f"aladdin_mpi: {reason}; it waits for another place")
        self._transport.exclude(silent)

    def _continue_without_rank_0(self, now: float, is_standby: bool) -> None:
        """Continue without rank 0, or end the job, or only this rank if its own link is down."""
        silence = self._silence_of(0)
        if is_standby and self._transport.is_revoked(without=0) and self._hears_most(now):
            if not self._may_be_cut_from(0) or self._claims():
                self._cut_off(0)
                return
            raise self._cut_off_error(silence)
        if self._may_be_cut_off(now, is_standby):
            raise self._cut_off_error(silence)
        raise LostError(f"{silence}; it is the coordinator")

    def _silence_of(self, rank: int) -> str:
        seconds = self._transport.now() - self._heard[rank]
        return f"{self._name(rank)} has sent no heartbeat for {seconds:.0f} s"

    def _cut_off_error(self, silence: str) -> CutOffError:
        me = self._name(self._transport.rank)
        return CutOffError(f"{silence}; {me} assumes that its own link is cut, and exits")

    def _may_be_cut_off(self, now: float, is_standby: bool) -> bool:
        """Return whether others may continue on the other side of a cut link."""
        hosts = {self._transport.hosts[rank] for rank in surviving_ranks(self._transport)}
        if not self._transport.survives or len(hosts) == 1:
            return False
        return not (is_standby and self._hears_others(now))

    def _hears_others(self, now: float) -> bool:
        """Return whether the silence of rank 0 is not due to this rank's own link."""
        hosts, mine = self._transport.hosts, self._transport.host
        others = [
            r for r in surviving_ranks(self._transport)[1:] if hosts[r] != mine and r in self._heard
        ]
        if hosts[0] == mine or not others:
            return True
        return any(now - self._heard[r] <= self._timeout for r in others)

    def _hears_most(self, now: float) -> bool:
        """Return whether this side of a partitioned network has more than half of the ranks.

        On the host of rank 0, rank 0 itself must be hanging.
        """
        if self._transport.hosts[0] == self._transport.host:
            return True
        heard = sum(now - moment <= self._timeout for moment in self._heard.values())
        return 2 * (heard + 1) > len(surviving_ranks(self._transport))

    def _name(self, rank: int) -> str:
        return (
            f"rank {self._transport.original_ranks[rank]} (host {self._transport.host_names[rank]})"
        )
