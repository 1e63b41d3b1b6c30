"""What a rank has to keep besides its role: random numbers and its module's buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aladdin_mpi.budget import Ticket
from aladdin_mpi.replica import PhantomReplica, Replica

Compute = Callable[[Ticket], float | None]


class LocalState:
    """One rank's random state and buffers, for checkpoints.

    Args:
        replica: whose module's buffers are kept.
        shared: several ranks share this process, as in virtual time: each computes
            with a random state of its own.
    """

    def __init__(self, replica: Replica | PhantomReplica, shared: bool) -> None:
        self._replica = replica
        self._shared = shared
        self._random = torch.get_rng_state()

    def seed(self, number: int) -> None:
        """Begin with this seed."""
        torch.manual_seed(number)
        self._random = torch.get_rng_state()

    def computing(self, compute: Compute) -> Compute:
        """``compute``, with this rank's random state."""
        if not self._shared:
            return compute

        def compute_so(ticket: Ticket) -> float | None:
            kept = torch.get_rng_state()
            torch.set_rng_state(self._random)
            loss = compute(ticket)
            self._random = torch.get_rng_state()
            torch.set_rng_state(kept)
            return loss

        return compute_so

    def state_dict(self) -> dict[str, Any]:
        """The state between two segments."""
        random = self._random if self._shared else torch.get_rng_state()
        return {"random": random, "buffers": self._replica.buffers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""
        self._random = state["random"]
        if not self._shared:
            torch.set_rng_state(self._random)
        for buffer, saved in zip(self._replica.buffers(), state["buffers"], strict=True):
            buffer.copy_(saved)
