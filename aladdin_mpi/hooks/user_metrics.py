"""Figures that a training loop adds to the metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import UserError
from aladdin_mpi.session.coordinator import RunHook
from aladdin_mpi.transport.base import Transport

TAKEN = frozenset(
    {"kind", "samples", "epoch", "seconds", "samples_per_second", "loss", "lr", "staleness"}
    | {"wait_fraction", "bytes_sent_per_step", "gradients", "gradients_refused"}
)
"""Names that lines of the metrics have already."""
MOST_BYTES = 1 << 14
"""Of the figures sent at once."""


class Means:
    """Means of figures by name, over all that were added since they were taken last."""

    def __init__(self) -> None:
        self._told: dict[str, list[float]] = defaultdict(list)
        self.last: dict[str, float] = {}
        """Of each, the mean taken last."""

    def add(self, figures: Mapping[str, float]) -> None:
        """Add one of each."""
        for name, value in figures.items():
            self._told[name].append(value)

    def so_far(self) -> dict[str, float]:
        """The means if they were taken now; of a name without new figures, the one before."""
        return self.last | _means(self._told.copy())  # another thread may add to it

    def take(self) -> dict[str, float]:
        """The means; nothing for a name without figures."""
        told, self._told = self._told, defaultdict(list)
        means = _means(told)
        self.last |= means
        return means

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {"told": dict(self._told), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._told = defaultdict(list, state["told"])
        self.last = dict(state["last"])


def _means(told: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in told.items()}


class UserMetrics(RunHook):
    """Sends the user's figures to rank 0, which logs their means."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.means = Means()
        """At rank 0; unused elsewhere."""
        self.late: list[dict[str, float]] = []
        """Logged after training, as at the end of the last epoch; to be gathered."""
        transport.exclude_from_traffic(Tag.FIGURES)
        if transport.rank == 0:
            transport.on_message(Tag.FIGURES, MOST_BYTES, self._add)

    def _add(self, source: int, message: Tensor) -> None:
        self.means.add(json.loads(message.numpy().tobytes()))

    def figures(self) -> Mapping[str, float]:
        """Return the means so far."""
        return self.means.so_far()

    def take_figures(self) -> Mapping[str, float]:
        """Return the means since the last line of metrics."""
        return self.means.take()

    def state_dict(self) -> dict[str, Any]:
        """Return the figures that are not logged yet."""
        return {"own": self.means.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the figures that were not logged yet."""
        if "own" in state:  # not in those of older runs
            self.means.load_state_dict(state["own"])

    def send(self, figures: Mapping[str, float], is_late: bool) -> None:
        """Send them; or keep them to be gathered, if training is over and no message is received.

        Raises:
            UserError: they are no numbers, too many, or have names that are taken.
        """
        plain = {}
        for name, value in figures.items():
            if name in TAKEN:
                raise UserError(
                    f"run.log: {name}: expected another name, as the run logs that itself; "
                    "rename it"
                )
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if isinstance(number, bool) or not isinstance(number, (int, float)):
                raise UserError(
                    f"run.log: {name}: expected a number, got {type(value).__name__}; give one"
                )
            plain[name] = float(number)
        if self._transport.rank == 0:
            self.means.add(plain)
            return
        if is_late:
            self.late.append(plain)
            return
        packed = json.dumps(plain).encode()
        if len(packed) > MOST_BYTES:
            raise UserError(
                f"run.log: expected at most {MOST_BYTES} bytes at once, got {len(packed)}; log "
                "fewer figures"
            )
        message = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self._transport.isend(message, 0, Tag.FIGURES)
