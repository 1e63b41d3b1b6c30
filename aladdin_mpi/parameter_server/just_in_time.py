"""When a worker wants its models: as late as they still come before they are read.

A model that is sent as soon as a gradient has come waits in the worker's inbox for most of a
step, and ages. So the worker asks for it at a moment of its next step, told as the share f of
the gradient that has reached the server by then: a server needs no clock and no timer. f
falls when models come too late, and creeps up while they come in time.
"""

from __future__ import annotations

from math import ceil

from aladdin_mpi.model.layout import BYTES_PER_MB, BYTES_PER_VALUE, Layout, cut
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.options.general import GeneralOptions

MOMENTS = 8
"""Buckets that each server has at least, where they are not tiny then."""
LEAST_BUCKET_MB = 0.064
"""Below this a message costs more for itself than for its bytes."""
FIRST_SHARE = 0.5
"""f of a worker that has no experience yet."""
LATER = 0.01
"""Added to f after a step for which all models came in time."""
FIRST_LATER = 0.05
"""The same as long as none has ever come late: a run's first rounds are not to be lost."""
EARLIER = 0.2
"""Taken from f after a step for which none did."""


class Timing:
    """One worker's wishes, for each server apart: they may be near or far.

    Args:
        buckets: of each server.
        share: f where it is fixed; None: it adapts.
    """

    def __init__(self, buckets: list[int], share: float | None = None) -> None:
        self._buckets = buckets
        self._fixed = share
        self.shares = [FIRST_SHARE if share is None else share] * len(buckets)
        self._rises = [FIRST_LATER] * len(buckets)
        self._newest: list[dict[int, int]] = [{} for _ in buckets]
        self.steps = 0
        self.late = 0.0
        """Share of the buckets that came late, over the run."""

    def open(self) -> None:
        """Begin a segment: its gradients are counted anew."""
        for newest in self._newest:
            newest.clear()

    def note(self, server: int, bucket: int, during: int) -> None:
        """A bucket's model is there, which was sent while gradient ``during`` came in."""
        self._newest[server][bucket] = during

    def end_step(self, number: int) -> float:
        """Gradient ``number``, during which models were asked for, is complete and they are read.

        Returns the share of the buckets of which none sent during this gradient is among them.
        """
        missing = 0.0
        for server, buckets in enumerate(self._buckets):
            timely = sum(during >= number for during in self._newest[server].values())
            late = 1 - timely / buckets
            missing += late * buckets
            self._adapt(server, late)
        share = missing / sum(self._buckets)
        self.steps += 1
        self.late += (share - self.late) / self.steps
        return share

    def _adapt(self, server: int, late: float) -> None:
        if self._fixed is None:
            if late:
                self._rises[server] = LATER
            f = self.shares[server] + self._rises[server] * (1 - late) - EARLIER * late
            self.shares[server] = min(max(f, 0.0), 1.0)

    @property
    def mean_share(self) -> float:
        """The mean f of all buckets."""
        weighted = zip(self.shares, self._buckets, strict=True)
        return sum(share * buckets for share, buckets in weighted) / sum(self._buckets)

    def state_dict(self) -> dict[str, object]:
        """Everything that the next segment depends on."""
        return {
            "shares": self.shares,
            "rises": self._rises,
            "steps": self.steps,
            "late": self.late,
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Take up a state from :meth:`state_dict`."""
        shares, rises = state["shares"], state.get("rises", [LATER] * len(self.shares))
        assert isinstance(shares, list) and isinstance(rises, list)
        self.shares, self._rises = list(shares), list(rises)
        self.steps, self.late = int(str(state["steps"])), float(str(state["late"]))


def fine_layout(replica: Replica | PhantomReplica, workers: int, options: GeneralOptions) -> Layout:
    """Buckets so small, and dealt so, that a server can tell how far a worker's backward pass is.

    They are dealt to the servers in turn, one by one: in a shard of several a server would have
    gradients from a short part of the backward pass only, and send its models right behind it.
    """
    megabytes = replica.numel * BYTES_PER_VALUE / BYTES_PER_MB / options.servers
    bucket_mb = min(options.bucket_mb, max(megabytes / MOMENTS, LEAST_BUCKET_MB))
    return cut(
        replica.numel,
        options.servers,
        bucket_mb,
        min(options.shard_mb, bucket_mb),
        options.sharding,
        replica.layers,
    )


def due_bucket(share: float, buckets: int) -> int:
    """After which of a server's ``buckets`` of a gradient, from 0, its models are to leave."""
    return max(1, ceil(share * buckets)) - 1
