"""Optional libraries: checks whether they are installed, and how to install them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from aladdin_mpi.errors import UserError

EXTRAS = {
    "accelerate": "transformers",
    "lightning": "lightning",
    "matplotlib": "plots",
    "pytorch_lightning": "lightning",
    "tensorboard": "tensorboard",
    "torchvision": "vision",
    "transformers": "transformers",
}
"""The extra of this package that installs each library (``pyproject.toml``)."""


def missing(*libraries: str) -> list[str]:
    """Return those of ``libraries`` that are not installed."""
    return [name for name in libraries if find_spec(name) is None]


def command(libraries: Sequence[str]) -> str:
    """Return the command that installs ``libraries`` of :data:`EXTRAS`."""
    return f'pip install "aladdin_mpi[{",".join(EXTRAS[name] for name in libraries)}]"'


def need(library: str, wanted_by: str) -> None:
    """Raise UserError if ``library`` of :data:`EXTRAS`, for argument ``wanted_by``, is missing."""
    if missing(library):
        raise UserError(
            f"{wanted_by} requires {library}, which is not installed. Run {command([library])}"
        )
