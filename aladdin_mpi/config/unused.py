"""Options that were typed and change nothing: those of another algorithm than the run's."""

from __future__ import annotations

from aladdin_mpi.algorithms.registry import ALGORITHMS
from aladdin_mpi.config.fields import submodel
from aladdin_mpi.config.options import RunOptions
from aladdin_mpi.config.settings import Settings

DGC = "dgc"
GROUPS = {name for name, info in RunOptions.model_fields.items() if submodel(info)}
"""The fields of RunOptions that are options of one algorithm, or of a compression."""


def unused(options: RunOptions, given: Settings) -> dict[str, str]:
    """The options on the command line that have no effect on this run, and what to do with each.

    No errors, because runs of several algorithms may share a command line, as in a job array.
    What stands in a file is left alone: that of a run holds all options.

    Args:
        options: of the run.
        given: the user's settings.
    """
    # One that does not exist is refused later, on all ranks at once.
    used = {each.group for name, each in ALGORITHMS.items() if name == options.algorithm}
    if options.compression == DGC:
        used.add(DGC)
    return {
        setting.origin: _remedy(path[0], options)
        for path, setting in given.items()
        if path[0] in GROUPS - used and setting.origin.startswith("--")
    }


def warnings(options: RunOptions, given: Settings) -> list[str]:
    """A line on each of them."""
    return [f"{flag}: has no effect {remedy}" for flag, remedy in unused(options, given).items()]


def _remedy(group: str, options: RunOptions) -> str:
    if group == DGC:
        return f"without --compression {DGC}; add that, or leave it out"
    return f"with --algorithm {options.algorithm}; leave it out"
