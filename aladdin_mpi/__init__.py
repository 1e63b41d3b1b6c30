"""Data-parallel training over MPI and in virtual time.

>>> from aladdin_mpi import DataParallel
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aladdin_mpi.errors import UserError
    from aladdin_mpi.training.data_parallel import DataParallel

__all__ = ["DataParallel", "UserError", "__version__"]

try:
    __version__ = version("aladdin_mpi")
except PackageNotFoundError:
    __version__ = "not installed"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the commands must be able to report an error in an import.
    if name == "DataParallel":
        from aladdin_mpi.training.data_parallel import DataParallel

        return DataParallel
    if name == "UserError":
        from aladdin_mpi.errors import UserError

        return UserError
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
