"""How often something happens during a run."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

_INTERVAL = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)(samples?|epochs?|min|s)?")

NEVER = "never"


@dataclass(frozen=True)
class CheckpointInterval:
    """How much passes between two checkpoints, in one of the units; in none: there are none."""

    samples: int | None = None
    epochs: float | None = None
    seconds: float | None = None

    @classmethod
    def parse(cls, given: object) -> CheckpointInterval:
        """Read ``50000``, ``50000samples``, ``0.5epochs``, ``10min``, ``90s`` or ``never``.

        Raises:
            ValueError: the text has another form, or the amount is not above 0.
        """
        if isinstance(given, cls):
            return given
        if given == NEVER:
            return cls()
        found = _INTERVAL.fullmatch(str(given).replace(" ", ""))
        amount, unit = (float(found[1]), found[2] or "samples") if found else (0.0, "")
        if 0 < amount < math.inf:
            if unit.startswith("epoch"):
                return cls(epochs=amount)
            if unit in ("min", "s"):
                return cls(seconds=amount * (60 if unit == "min" else 1))
            if amount.is_integer():
                return cls(samples=int(amount))
        raise ValueError(
            f"expected N, Nsamples, Nepochs, Nmin or Ns with N above 0 and samples whole, or "
            f"never, "
            f"got {str(given)!r}; write for example 50000, 0.5epochs or 10min"
        )

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        if self.samples is not None:
            return f"{self.samples}samples"
        if self.epochs is not None:
            return f"{self.epochs!r}epochs"
        return NEVER if self.seconds is None else f"{self.seconds!r}s"


def _parse_interval(given: object) -> CheckpointInterval | None:
    return None if given is None else CheckpointInterval.parse(given)


Interval = Annotated[
    CheckpointInterval | None,
    BeforeValidator(_parse_interval),
    PlainSerializer(lambda interval: None if interval is None else str(interval)),
]
"""An optional interval as a field: read from text, written as text."""
