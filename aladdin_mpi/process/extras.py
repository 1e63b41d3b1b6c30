"""Libraries that only some runs need: whether they are there, and how to install them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from aladdin_mpi.errors import UserError

EXTRAS = {"matplotlib": "plots", "tensorboard": "tensorboard", "torchvision": "vision"}
"""The extra of this package that installs each (``pyproject.toml``)."""


def missing(*libraries: str) -> list[str]:
    """Those of ``libraries`` that are not installed."""
    return [name for name in libraries if find_spec(name) is None]


def command(libraries: Sequence[str]) -> str:
    """The command that installs ``libraries``, which :data:`EXTRAS` has."""
    return f'pip install "aladdin_mpi[{",".join(EXTRAS[name] for name in libraries)}]"'


def need(library: str, wanted_by: str) -> None:
    """Refuse to go on without ``library``.

    Args:
        library: one of :data:`EXTRAS`.
        wanted_by: the argument that asks for it, as the user gave it.

    Raises:
        UserError: it is not installed.
    """
    if missing(library):
        raise UserError(
            f"{wanted_by}: expected {library}, which is not installed; {command([library])}"
        )
