"""Data-parallel training over MPI, and its simulation in virtual time.

Training scripts import everything that they need from here:

>>> from aladdin_mpi import DataParallel
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aladdin_mpi.data.datasets import load_dataset
    from aladdin_mpi.errors import (
        LaunchError,
        LostError,
        PeerFailedError,
        SuspendedError,
        TransportError,
        UserError,
        WaitTimeoutError,
    )
    from aladdin_mpi.integrations.accelerate import Accelerator
    from aladdin_mpi.launching import launch
    from aladdin_mpi.run.data_parallel import DataParallel
    from aladdin_mpi.run.island_mesh import island_mesh

__all__ = [
    "Accelerator",
    "DataParallel",
    "LaunchError",
    "LostError",
    "PeerFailedError",
    "SuspendedError",
    "TransportError",
    "UserError",
    "WaitTimeoutError",
    "__version__",
    "island_mesh",
    "launch",
    "load_dataset",
]

_MODULES = {
    "Accelerator": "integrations.accelerate",
    "DataParallel": "run.data_parallel",
    "LaunchError": "errors",
    "LostError": "errors",
    "PeerFailedError": "errors",
    "SuspendedError": "errors",
    "TransportError": "errors",
    "UserError": "errors",
    "WaitTimeoutError": "errors",
    "island_mesh": "run.island_mesh",
    "launch": "launching",
    "load_dataset": "data.datasets",
}
"""Module that defines each public name."""

try:
    __version__ = version("aladdin_mpi")
except PackageNotFoundError:
    __version__ = "not installed"


def __getattr__(name: str) -> Any:
    # Import on first use: --help does not need torch, and the commands must be able to report
    # an error in an import.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
