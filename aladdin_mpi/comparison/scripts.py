"""The options of the compared runs, most of which a user's script may determine."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

from aladdin_mpi.comparison.options import CompareOptions
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.fields import kebab
from aladdin_mpi.options.run import RunOptions, SimulateOptions, TrainOptions
from aladdin_mpi.options.settings import Setting, Settings, build
from aladdin_mpi.run.script import script_options


def resolved_options(options: CompareOptions, given: Settings) -> RunOptions:
    """Return the options of a run with the user's settings.

    A script runs up to its DataParallel, in another process, so that neither its data nor its
    changes to a process remain. Its output is dropped.

    Raises:
        UserError: an option is invalid, or the script fails or makes no DataParallel.
    """
    script, is_for_mpi = options.script, options.engine == "mpi"
    if script is None:
        return build(options.run_options, given)
    # Over MPI, the number of workers is no option, but others are checked against it.
    workers: Settings = {("workers",): Setting(options.workers, "--workers")}
    arguments = (script, options.script_arguments, workers | given, is_for_mpi)
    remedy = "Run it by itself to see where."
    try:
        # Forked, the process has the modules that the script needs.
        with ProcessPoolExecutor(1, get_context("fork"), _drop_output) as pool:
            resolved = pool.submit(script_options, *arguments).result()
    except BrokenProcessPool:
        raise UserError(f"{script} ended its process before its DataParallel. {remedy}") from None
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"{script} failed before its DataParallel: {what}. {remedy}") from error
    return _over_mpi(resolved) if is_for_mpi else resolved


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _over_mpi(options: SimulateOptions) -> TrainOptions:
    names = set(TrainOptions.model_fields)
    values = options.model_dump(include=names, exclude_unset=True)
    return build(TrainOptions, {(n,): Setting(v, f"--{kebab(n)}") for n, v in values.items()})
