"""What of a checkpoint goes on where its run is resumed with other numbers of ranks.

All workers begin from the global model. Of what each had of its own (momentum, what compression
or rounding has held back) every new one gets the mean: as gradients meet divided by the number
of workers, all of it together moves the global model as far as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket, Layout

COUNTS = ("samples", "computed", "refused", "coalesced", "waiting", "bytes_sent")
"""What is counted for each worker."""


@dataclass
class MergedState:
    """The ranks that wrote a checkpoint, put together.

    Attributes:
        model: the global model, flat.
        worker: the mean of the workers' states, less their models.
        server: the servers' states put together, see :func:`join_servers`.
        counts: of each worker, by the names in ``COUNTS``; None: it had failed.
        number: of the workers, where that of the counts is another.
        granted: samples granted to each worker with this number of workers; none: unknown.
    """

    model: Tensor
    worker: dict[str, Any]
    server: dict[str, Any] = field(default_factory=dict)
    counts: list[dict[str, float] | None] = field(default_factory=list)
    number: int | None = None
    granted: Sequence[int] = ()

    @property
    def taken(self) -> tuple[int | None, ...]:
        """Samples that each worker has taken; None: it has failed, and nothing is known of it.

        A failed worker has taken all that were granted to it. Some may be lost with it, but the
        budget does not grant them again.
        """
        granted: Sequence[int | None] = self.granted or [None] * len(self.counts)
        return tuple(
            own if each is None else int(each["samples"])
            for each, own in zip(self.counts, granted, strict=True)
        )

    @property
    def workers(self) -> int:
        """Their number."""
        return len(self.counts) if self.number is None else self.number

    def carried(self, name: str, worker: int, workers: int) -> float:
        """What a new worker goes on counting from, so that the sum over all stays what it was."""
        return sum(each[name] for each in self.counts[worker::workers] if each is not None)


# -- workers ----------------------------------------------------------------------------
def mean_state(mean: Any, new: Any, count: int, name: str = "") -> Any:
    """The mean of ``count`` alike states, from that of all but the last one, in place.

    Numbers and the like are the first one's. A worker that has made no step yet has fewer
    parts in a list, and is passed over there.

    Raises:
        UserError: a tensor differs of which there is no mean.
    """
    if isinstance(mean, dict) and isinstance(new, dict):
        keys = [*mean, *(key for key in new if key not in mean)]
        return {k: mean_state(mean.get(k), new.get(k), count, str(k)) for k in keys}
    if isinstance(mean, list) and isinstance(new, list) and len(mean) == len(new):
        return [mean_state(m, n, count, name) for m, n in zip(mean, new, strict=True)]
    if isinstance(mean, list) and isinstance(new, list):
        return max(mean, new, key=len)
    if isinstance(mean, torch.Tensor) or isinstance(new, torch.Tensor):
        return _mean_tensor(mean, new, count, name)
    return new if mean is None else mean


def _mean_tensor(mean: Tensor | None, new: Tensor | None, count: int, name: str) -> Tensor:
    """None stands for zeros."""
    known = mean if mean is not None else new
    assert known is not None
    if name == "step":  # of a torch optimizer: a mean of them may be no whole number
        return known if mean is None or new is None else torch.maximum(mean, new)
    if not known.is_floating_point():
        if mean is None or new is None or not torch.equal(mean, new):
            raise UserError(
                f"--allow-resize: the workers' states differ in {name!r}, of {known.dtype}, of "
                "which there is no mean; resume with the number of workers of the checkpoint"
            )
        return mean
    if mean is None:
        return known.div_(count)
    if new is None:
        return mean.mul_(1 - 1 / count)
    # Exact where all are the same.
    return mean.add_(new.sub_(mean), alpha=1 / count)


def scale_held_back(state: Any, factor: float) -> None:
    """Scale what compression has held back, wherever it is in a worker's state."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if name == "left" and isinstance(value, torch.Tensor):
            value.mul_(factor)
        else:
            scale_held_back(value, factor)


# -- servers ----------------------------------------------------------------------------
def join_servers(states: Sequence[Mapping[str, Any] | None], layout: Layout) -> dict[str, Any]:
    """The servers' states as one; nothing if there are none.

    Args:
        states: of the servers' roles, in order; None: it is lost.
        layout: theirs.

    Returns:
        Counters; ``optimizer`` or None, its vectors flat; ``pending``, for each bucket with
        gradients that are not applied yet its start, stop, numbers and sum; ``head``, what the
        first server knows besides.
    """
    living = [state for state in states if state is not None]
    if not living:
        return {}
    servers = [state["server"] for state in living]
    from_failed = min(server["from_failed"] for server in servers)
    from_living = min(map(_from_living, living))
    return {
        "samples": max(server["samples"] for server in servers),
        "received": max(server["received"] for server in servers),
        "staleness": servers[0]["staleness"],
        "from_failed": from_failed,
        "applied": from_living + from_failed,
        "optimizer": _join_optimizers(
            [None if state is None else state["optimizer"] for state in states], layout
        )
        if "optimizer" in living[0]
        else None,
        "pending": [each for state in living for each in _pending(state, layout)],
        "head": living[0].get("head"),
    }


def put_mirrored(
    whole: dict[str, Any] | None, mirrored: dict[str, Any], bucket: Bucket, like: Tensor
) -> dict[str, Any] | None:
    """The servers' optimizers as one, with that of a bucket whose server is lost.

    Args:
        whole: see :func:`join_servers`; None: every server is lost.
        mirrored: its state, less what belongs to other buckets.
        bucket: whose it is.
        like: the flat model.
    """
    if "parts" in mirrored:
        parts = [] if whole is None else whole["parts"]
        return {**(whole or mirrored), "parts": [*parts, *mirrored["parts"]]}
    velocity = mirrored["velocity"]
    if velocity is None:
        return whole
    if whole is None or whole["velocity"] is None:
        whole = {"velocity": torch.zeros_like(like)}
    whole["velocity"][bucket.part] = velocity
    return whole


def without_servers(counts: Sequence[dict[str, float] | None]) -> dict[str, Any]:
    """What stands for :func:`join_servers` where every server is lost.

    Args:
        counts: see :class:`MergedState`.
    """
    samples = sum(int(each["samples"]) for each in counts if each is not None)
    computed = sum(int(each["computed"]) for each in counts if each is not None)
    return {
        "samples": samples,
        "received": computed,
        "staleness": 0.0,
        "from_failed": 0,
        "applied": computed,
        "optimizer": None,
        "pending": [],
        "head": None,
    }


def _from_living(state: Mapping[str, Any]) -> int:
    """Gradients that a server has taken from workers that had not failed."""
    server = state["server"]
    if "shards" in state:
        totals = {index: shard["total"] for index, shard in state["shards"].items()}
    else:
        totals = state["applied"]
    whole = min(total - server["partial"][index] for index, total in totals.items())
    return int(whole - server["from_failed"])


def _pending(state: Mapping[str, Any], layout: Layout) -> list[dict[str, Any]]:
    found = []
    for index, shard in state.get("shards", {}).items():
        bucket = layout.buckets[index]
        numbers = {name: shard[name] for name in ("count", "counted", "dropped")}
        found.append({"start": bucket.start, "stop": bucket.stop, "sum": shard["sum"], **numbers})
    return found


def _join_optimizers(states: Sequence[Any], layout: Layout) -> dict[str, Any] | None:
    """Each server's is of its own buckets."""
    known = [state for state in states if state is not None]
    if not known:
        return None
    first = known[0]
    if "parts" in first:
        names = ("parts", "inherited")
        return {**first, **{n: [each for s in known for each in s.get(n, ())] for n in names}}
    whole = first["velocity"]
    if whole is not None:
        for server, state in enumerate(states):
            for bucket in layout.owned_by(server):
                if state is None:  # it begins again
                    whole[bucket.part] = 0.0
                else:
                    whole[bucket.part] = state["velocity"][bucket.part]
    return {"velocity": whole}
