"""What algorithms ask of an optimizer: steps of parts of a flat vector."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aladdin_mpi.model.unused import Unused


class Optimizer(ABC):
    """Turns gradients into steps, part by part, each part with a state of its own.

    A step is ``x <- x - lr d``. What ``d``, the direction, is of is the optimizer's: with
    momentum SGD ``lr`` is the learning rate; an optimizer with rates of its own has them in
    ``d``, and ``lr`` is the factor that the schedule puts before them.

    Whoever uses an optimizer always cuts the vector in the same way: a part's state is its own.
    The ``unused`` parts of a part, relative to its start, have no gradient. As in torch, where
    ``.grad`` is None, they are not stepped: their values and their state stay as they are.

    Attributes:
        momentum: share of a step's direction that goes on in the next one's, in [0, 1).
        takes_parts: a part may be cut anywhere; otherwise it has to be the whole vector.
        name: as a user knows it.
    """

    name: str = "sgd"
    momentum: float = 0.0
    takes_parts: bool = True

    @abstractmethod
    def correct(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        raw: Tensor | None = None,
        unused: Unused = (),
    ) -> None:
        """Turn ``gradient`` into the direction of a step, in place; ``x`` stays as it is.

        Args:
            part: of the flat vector.
            gradient: of that part.
            x: the parameters of that part.
            raw: takes the direction less its momentum, of that part.
            unused: see :class:`Optimizer`; there the direction is zero.
        """

    @abstractmethod
    def descend(
        self,
        part: slice,
        gradient: Tensor,
        x: Tensor,
        lr: float,
        factor: float = 1.0,
        unused: Unused = (),
    ) -> None:
        """One step of ``x`` for ``factor * gradient``, which may be overwritten.

        As :meth:`correct` and an addition, in fewer passes over memory.
        """

    @abstractmethod
    def correct_and_descend(
        self, part: slice, gradient: Tensor, x: Tensor, lr: float, unused: Unused = ()
    ) -> None:
        """The same, and ``gradient`` becomes the direction of the step."""

    @abstractmethod
    def step(self, x: Tensor, gradient: Tensor, lr: float, unused: Unused = ()) -> None:
        """One step of the whole vector; ``gradient`` is left as it is."""

    def settings(self) -> tuple[float, ...]:
        """Numbers that may change during the run and have to travel to whoever makes the steps."""
        return ()

    def adopt(self, settings: tuple[float, ...]) -> None:
        """Take those of :meth:`settings`, of another rank; nothing if there are none."""
        return

    @property
    def rate(self) -> float:
        """The learning rate that is in a direction already; that of the first group."""
        return 1.0

    def advance(self, steps: int) -> None:
        """All workers together have come to so many steps: the schedule follows."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All state, for a checkpoint."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state from :meth:`state_dict`."""

    def inherit(self, state: dict[str, Any], parts: Sequence[slice] = ()) -> None:
        """Take up a state of the whole vector, which was cut otherwise.

        Args:
            state: see :meth:`state_dict`.
            parts: of which steps will be made; none: of all.

        Raises:
            UserError: it cannot be cut anew.
        """
        self.load_state_dict(state)

    def close(self) -> None:
        """The run has ended."""
        return
