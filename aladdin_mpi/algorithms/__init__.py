"""The algorithms, a file each: importing this folder registers all of them.

So are those of other packages, by their entry points of the group ``aladdin_mpi.algorithms``, and
those of the modules that ``ALADDIN_MPI_ALGORITHMS`` names, apart by commas.
"""

import os
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules

from aladdin_mpi.errors import UserError

GROUP = "aladdin_mpi.algorithms"
VARIABLE = "ALADDIN_MPI_ALGORITHMS"


def _register_all() -> None:
    for module in iter_modules(__path__, f"{__name__}."):
        import_module(module.name)
    for entry in entry_points(group=GROUP):
        entry.load()
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        try:
            import_module(name)
        except ImportError as error:
            raise UserError(
                f"{VARIABLE}: expected modules that register algorithms, got {name!r} ({error}); "
                "add its folder to PYTHONPATH, or unset the variable"
            ) from None


_register_all()
