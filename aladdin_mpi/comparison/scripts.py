"""The options of the compared runs, of which a user's script may determine the most."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from aladdin_mpi.comparison.options import CompareOptions
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import RunOptions, SimulateOptions, TrainOptions
from aladdin_mpi.options.settings import Setting, Settings, build

Resolve = Callable[[Settings], RunOptions]


@contextmanager
def resolving(options: CompareOptions) -> Iterator[Resolve]:
    """Yield a function that returns the options of a run from the user's settings.

    A script runs once for each call, up to its DataParallel, in another process, so that neither
    its data nor its changes to a process remain. Its output is dropped.
    """
    script, is_for_mpi = options.script, options.engine == "mpi"
    if script is None:
        yield lambda given: build(options.run_options, given)
        return

    def resolve(given: Settings) -> RunOptions:
        # Over MPI, the number of workers is no option, but others are checked against it.
        workers: Settings = {("workers",): Setting(options.workers, "--workers")}
        arguments = (script, options.script_arguments, workers | given, is_for_mpi)
        try:
            found = pool.submit(_options_of, *arguments).result()
        except BrokenProcessPool:
            raise UserError(
                f"{script}: expected a script that makes a DataParallel, and it ended its process "
                "before; run it by itself to see why"
            ) from None
        return _over_mpi(found) if is_for_mpi else found

    with ProcessPoolExecutor(1, get_context("fork"), _drop_output) as pool:
        yield resolve


def _options_of(
    script: Path, arguments: tuple[str, ...], given: Settings, is_for_mpi: bool
) -> SimulateOptions:
    from aladdin_mpi.run.script import script_options  # slow

    return script_options(script, arguments, given, is_for_mpi)


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _over_mpi(options: SimulateOptions) -> TrainOptions:
    names = set(TrainOptions.model_fields)
    return TrainOptions.model_validate(options.model_dump(include=names, exclude_unset=True))
