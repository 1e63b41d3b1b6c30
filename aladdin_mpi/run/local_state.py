"""A rank's own part of a checkpoint: random state, buffers, and the user's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import PhantomReplica, Replica
from aladdin_mpi.worker.step import Compute
from aladdin_mpi.worker.worker import RandomState


def check_plain(value: object, place: str) -> None:
    """Check that a checkpoint, which holds no code, can hold ``value``.

    Raises:
        UserError: it cannot.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            check_plain(each, f"{place}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            check_plain(each, f"{place}[{number}]")
    elif not (value is None or isinstance(value, (Tensor, bool, int, float, str))):
        raise UserError(
            f"{place}: expected tensors, numbers, strings, and lists and dicts of these, got "
            f"{type(value).__name__}; put what it is made of there, such as a state_dict()"
        )


class LocalState:
    """One rank's random state and buffers, for checkpoints.

    Args:
        replica: whose module's buffers are kept.
        shared: several ranks share this process, as in virtual time: each computes
            with a random state of its own.
        user: what the training loop wants to have kept.
    """

    def __init__(
        self,
        replica: Replica | PhantomReplica,
        shared: bool,
        user: dict[str, Any] | None = None,
    ) -> None:
        self._user = {} if user is None else user
        self._replica = replica
        self._shared = shared
        self._device = replica.parameters.device
        self._random = RandomState(self._device)

    def share_buffers(self, state: dict[str, Any]) -> None:
        """Take the buffers alone of a state from :meth:`state_dict`."""
        for buffer, saved in zip(self._replica.buffers(), state["buffers"], strict=True):
            buffer.copy_(saved)

    def seed(self, number: int) -> None:
        """Begin with this seed."""
        if is_accelerator(self._device):
            torch.manual_seed(number)
        else:  # which would look for accelerators, and keep the stack for each
            torch.default_generator.manual_seed(number)
        self._random.keep()

    def computing(self, compute: Compute) -> Compute:
        """``compute``, with this rank's random state."""
        return self._random.during(compute) if self._shared else compute

    def state_dict(self) -> dict[str, Any]:
        """The state between two segments."""
        if not self._shared:
            self._random.keep()
        check_plain(self._user, "run.state")
        return {
            "random": self._random.host,
            "device_random": self._random.device,
            "buffers": self._replica.buffers(),
            "user": self._user,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._user.clear()
        self._user.update(state.get("user", {}))
        self._random.set(state["random"], state.get("device_random"))
        if not self._shared:
            self._random.restore()
        self.share_buffers(state)
