"""Run `aladdin_mpi.train` on the delayed-copy test device."""

from __future__ import annotations

import sys

from mpi4py import MPI  # noqa: F401  # before torch

# isort: split
import tests.late.device  # noqa: F401
from aladdin_mpi import train

if __name__ == "__main__":
    sys.exit(train.main())
