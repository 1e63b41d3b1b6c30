"""Figures that a training loop wants to see among the metrics."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.control.tags import Tag
from aladdin_mpi.errors import UserError
from aladdin_mpi.transport.base import Transport

TAKEN = frozenset(
    {"kind", "samples", "epoch", "seconds", "samples_per_second", "loss", "lr", "staleness"}
    | {"wait_fraction", "bytes_sent_per_step", "gradients", "gradients_refused"}
)
"""Names that lines of the metrics have already."""
MOST_BYTES = 1 << 14
"""Of the figures told at once."""


class Means:
    """Means of figures by name, over all that were told since they were taken last."""

    def __init__(self) -> None:
        self._told: dict[str, list[float]] = defaultdict(list)
        self.last: dict[str, float] = {}
        """Of each, the mean taken last."""

    def add(self, figures: Mapping[str, float]) -> None:
        """Add one of each."""
        for name, value in figures.items():
            self._told[name].append(value)

    def so_far(self) -> dict[str, float]:
        """The means if they were taken now, and where nothing was told since, those before."""
        told = self._told.copy()  # another thread may add to it
        return self.last | {name: sum(values) / len(values) for name, values in told.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {"told": dict(self._told), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._told = defaultdict(list, state["told"])
        self.last = dict(state["last"])

    def take(self) -> dict[str, float]:
        """The means; nothing for a name that was not told."""
        told, self._told = self._told, defaultdict(list)
        means = {name: sum(values) / len(values) for name, values in told.items()}
        self.last |= means
        return means


class UserMetrics:
    """Brings them to rank 0.

    Args:
        means: at rank 0, where they are kept.
        is_over: whether the training has ended, so that no message would be waited for.
    """

    def __init__(
        self, transport: Transport, means: Means | None, is_over: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._means = means
        self._is_over = is_over
        self.late: list[dict[str, float]] = []
        """Told behind the training, as at the end of the last epoch; to be gathered."""
        transport.exclude_from_traffic(Tag.FIGURES)
        if means is not None:
            add = means.add
            transport.on_message(
                Tag.FIGURES,
                MOST_BYTES,
                lambda _, message: add(json.loads(message.numpy().tobytes())),
            )

    def tell(self, figures: Mapping[str, float]) -> None:
        """Send them.

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
        if self._means is not None:
            self._means.add(plain)
            return
        if self._is_over():
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
