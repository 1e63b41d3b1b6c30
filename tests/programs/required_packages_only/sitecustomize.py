"""Make imports of the modules in ``BLOCKED_MODULES`` fail, and imports of torch before MPI.

Python imports this file at startup if its folder is on ``PYTHONPATH``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# Importing a module that is None fails.
sys.modules.update(dict.fromkeys(os.environ["BLOCKED_MODULES"].split()))  # type: ignore[arg-type]


class ImportOrder:
    """An import finder that allows torch only after MPI."""

    def find_spec(self, name: str, *rest: object) -> None:
        if name == "torch._C" and "mpi4py.MPI" not in sys.modules:  # it is really loaded
            raise ImportError("torch is imported before MPI")


finder: Any = ImportOrder()
sys.meta_path.insert(0, finder)
