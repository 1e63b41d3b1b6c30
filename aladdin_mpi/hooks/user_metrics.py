"""Figures that a training loop adds to the metrics."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
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
"""Names that lines of metrics use already."""
EVALUATED = frozenset(
    {"kind", "samples", "epoch", "seconds", "samples_per_second", "wait_fraction", "workers"}
    | {"bytes_sent_per_step", "gradients_refused", "servers", "model", "dataset", "seed", "steps"}
    | {"algorithm", "engine", "parameters"}
    | {"epochs", "messages_refused", "failures", "samples_lost", "version", "own", "images_skipped"}
    | {"skipped", "gradients_computed", "gradients_applied", "gradients_coalesced"}
    | {"gradients_dropped", "gradients_lost", "gradients_meanwhile", "model_variance"}
)
"""Names that summaries and lines on evaluations use already."""
MOST_BYTES = 1 << 14
"""Most bytes of figures in one message."""


def numbers_of(figures: object, where: str, taken: Collection[str]) -> dict[str, float]:
    """Return a script's figures as Python's numbers.

    Args:
        figures: the figures by name; tensors and NumPy's numbers are converted.
        where: the argument or function in error messages.
        taken: names that cannot be used.

    Raises:
        UserError: a figure is not a number, or a name is in use.
    """
    if not isinstance(figures, Mapping):
        raise UserError(
            f"{where}: expected a dict of figures by name, got {type(figures).__name__}; return "
            'for example {"accuracy": 0.5}'
        )
    plain = {}
    for name, value in figures.items():
        if name in taken:
            raise UserError(f"{where}: {name} is logged by the run itself. Use another name.")
        number = number_in(value)
        if number is None:
            raise UserError(
                f"{where}: {name}: expected a number, got {type(value).__name__}; convert it with "
                "float()"
            )
        plain[str(name)] = number
    return plain


def number_in(value: object) -> float | None:
    """Return a number, or that of NumPy or of a tensor of one, for Python; None for others."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        value = value.item()
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None  # type: ignore[arg-type]


class Means:
    """Means of figures by name, over all values added since they were last taken."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        """Sum and number of each figure's values. Lists of them would not fit into a copy for the
        standby coordinator."""
        self.last: dict[str, float] = {}
        """The mean of each figure that was last taken."""

    def add(self, figures: Mapping[str, float]) -> None:
        """Add a value of each figure."""
        for name, value in figures.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    def so_far(self) -> dict[str, float]:
        """Return the present means; for a name without new values, the last one."""
        return self.last | _means(self._sums.copy())  # another thread may add to it

    def take(self) -> dict[str, float]:
        """Return the means of names with new values, and start again."""
        sums, self._sums = self._sums, {}
        means = _means(sums)
        self.last |= means
        return means

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"sums": dict(self._sums), "last": self.last}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from :meth:`state_dict`."""
        self._sums = {name: (total, count) for name, (total, count) in state["sums"].items()}
        self.last = dict(state["last"])


def _means(sums: Mapping[str, tuple[float, int]]) -> dict[str, float]:
    return {name: total / count for name, (total, count) in sums.items()}


class UserMetrics(RunHook):
    """A hook that sends the user's figures to rank 0, which logs their means."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.means = Means()
        """Used at rank 0 only."""
        self.late: list[dict[str, float]] = []
        """Figures logged after training, as at the end of the last epoch; gathered at the end."""
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
        if "sums" in state.get("own", {}):  # not in those of older runs
            self.means.load_state_dict(state["own"])

    def send(self, figures: Mapping[str, float], is_late: bool) -> None:
        """Send figures to rank 0; keep them for the end if training is over.

        Raises:
            UserError: a figure is not a number, there are too many, or a name is in use.
        """
        plain = numbers_of(figures, "run.log", TAKEN)
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
