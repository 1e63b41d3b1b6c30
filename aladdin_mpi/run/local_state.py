"""What a rank has to keep besides its role: random numbers and its module's buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aladdin_mpi.accelerator import is_accelerator, random_state, set_random_state
from aladdin_mpi.control.budget import Ticket
from aladdin_mpi.errors import UserError
from aladdin_mpi.model.replica import PhantomReplica, Replica
from aladdin_mpi.roles.step import Loss

Compute = Callable[[Ticket], Loss]


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


class _Position(NamedTuple):
    """How far random numbers are: the host's and, where one computes, the device's."""

    host: Tensor
    device: Tensor | None


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
        self._random = self._position()

    def _position(self) -> _Position:
        return _Position(torch.get_rng_state(), random_state(self._device))

    def _go_to(self, position: _Position) -> None:
        torch.set_rng_state(position.host)
        set_random_state(self._device, position.device)

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
        self._random = self._position()

    def computing(self, compute: Compute) -> Compute:
        """``compute``, with this rank's random state."""
        if not self._shared:
            return compute

        def compute_so(ticket: Ticket) -> Loss:
            kept = self._position()
            self._go_to(self._random)
            loss = compute(ticket)
            self._random = self._position()
            self._go_to(kept)
            return loss

        return compute_so

    def state_dict(self) -> dict[str, Any]:
        """The state between two segments."""
        random = self._random if self._shared else self._position()
        check_plain(self._user, "run.state")
        return {
            "random": random.host,
            "device_random": random.device,
            "buffers": self._replica.buffers(),
            "user": self._user,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._user.clear()
        self._user.update(state.get("user", {}))
        self._random = _Position(state["random"], state.get("device_random"))
        if not self._shared:
            self._go_to(self._random)
        self.share_buffers(state)
