"""Print the program's environment, and exit with the status or error from standard input."""

from __future__ import annotations

import os
import pickle
import sys

from sibling import VALUE  # type: ignore[import-not-found]

print(__name__, __file__, sys.argv[1:], os.environ.get("GIVEN"), VALUE, os.getcwd())
print(*(name in sys.modules for name in ("torch", "mpi4py", "aladdin_mpi.train")))
assert "aladdin_mpi.transport.mpi.library" not in sys.modules  # reads the environment


class Here:
    """A class of ``__main__``."""


assert isinstance(pickle.loads(pickle.dumps(Here())), Here)
sys.exit(sys.stdin.read().strip() or 0)
