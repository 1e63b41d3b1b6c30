"""A user's training script that a command runs, with options that override those in the script.

In a simulation every simulated rank runs it, and it runs once more before them: alone and only up
to its DataParallel, which determines its algorithm, and so the number of ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from aladdin_mpi.errors import ServedError, SuspendedError, UserError
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.run import SimulateOptions, check_cluster, check_failures
from aladdin_mpi.options.settings import Settings
from aladdin_mpi.process.guard import exit_called, warn
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster


@dataclass(frozen=True)
class SimulatedRank:
    """Inputs of a DataParallel on a simulated rank.

    Attributes:
        typed: settings on the command line, which override those of the script.
        transport: None if the script only runs to determine its options.
        unended: runs that the script must complete, which register themselves here.
        is_for_mpi: whether these will be the options of a run over MPI, so that the script need not
            be one that can be simulated.
    """

    typed: Settings
    transport: Transport | None
    unended: list[Any] = field(default_factory=list, compare=False)
    is_for_mpi: bool = False


class OptionsResolved(BaseException):
    """Ends a script at its DataParallel. It is no Exception, which the script might catch."""

    def __init__(self, options: SimulateOptions) -> None:
        super().__init__("the options of the script")
        self.options = options


_rank: ContextVar[SimulatedRank | None] = ContextVar("rank", default=None)
_typed: Settings | None = None
"""The options of the command that runs a script on this rank over MPI."""


def simulated_rank() -> SimulatedRank | None:
    """Return the simulated rank that the caller runs on; None outside a simulation."""
    return _rank.get()


def typed_options() -> Settings | None:
    """Return the options of the command that runs this script; None if it runs by itself."""
    simulated = simulated_rank()
    return _typed if simulated is None else simulated.typed


def check_script(script: Path) -> None:
    """Check that a script can be read.

    Raises:
        UserError: it cannot, or does not exist.
    """
    if not (script.is_file() and os.access(script, os.R_OK)):
        raise UserError(f"{script}: expected a Python file that can be read; check the path")


def run_script(script: Path, arguments: Sequence[str], typed: Settings) -> None:
    """Run ``script`` on this rank over MPI, as ``python SCRIPT ARGUMENTS`` would.

    Args:
        script: a Python file that makes a DataParallel.
        arguments: its command line.
        typed: options, which override those in the script.
    """
    global _typed
    _typed = typed
    _take_place(script, arguments)
    runpy.run_path(str(script), run_name="__main__")


def simulate_script(script: Path, arguments: Sequence[str], typed: Settings) -> None:
    """Run ``script`` on all ranks of a modelled cluster.

    Args:
        script: a Python file that makes one DataParallel.
        arguments: its command line.
        typed: options, which override those in the script.

    Raises:
        UserError: the script cannot be read, makes no DataParallel, or cannot be simulated.
    """
    main = _program(script, arguments)
    options = _options_of(script, main, SimulatedRank(typed, None))
    algorithm = find_algorithm(options.algorithm)
    servers = options.servers if algorithm.has_servers else 0
    size = options.workers + servers
    check_cluster(options, size)
    silence = options.worker_timeout or None
    cluster = VirtualCluster(size, options.cluster.placed(servers), options.seed, silence=silence)

    def rank(transport: Transport) -> bool:
        simulated = SimulatedRank(typed, transport)
        _rank.set(simulated)
        try:
            with suppress(ServedError):
                main()
            for run in tuple(simulated.unended):
                run.finish_with_script()
        except SuspendedError:
            raise
        except SystemExit as error:
            if simulated.unended:
                raise exit_called(error) from error
            if error.code:
                raise
        return True

    warn(check_failures(options, cluster.run(rank)))


def script_options(
    script: Path, arguments: Sequence[str], typed: Settings, is_for_mpi: bool
) -> SimulateOptions:
    """Return the options that a script's DataParallel would have.

    Args:
        script: a Python file that makes a DataParallel, before which it runs alone.
        arguments: its command line.
        typed: options, which override those in the script.
        is_for_mpi: whether they are for a run over MPI.

    Raises:
        UserError: the script cannot be read, makes no DataParallel, or an option is invalid.
    """
    main = _program(script, arguments)
    return _options_of(script, main, SimulatedRank(typed, None, is_for_mpi=is_for_mpi))


def _options_of(
    script: Path, main: Callable[[], None], simulated: SimulatedRank
) -> SimulateOptions:
    token, options = _rank.set(simulated), None
    try:
        main()
    except OptionsResolved as resolved:
        options = resolved.options
    except SystemExit as error:
        if error.code:
            raise
    finally:
        _rank.reset(token)
    if options is None:
        raise UserError(
            f"{script} makes no DataParallel. Train through DataParallel, or leave the script out."
        )
    if not simulated.is_for_mpi and (options.compute == "timed" or options.resume is not None):
        raise UserError(
            "simulate requires a script whose run starts from the beginning with real gradients. "
            "Leave out --compute timed and --resume."
        )
    return options


def _program(script: Path, arguments: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs the script once, in a separate namespace."""
    check_script(script)
    code: CodeType = compile(script.read_bytes(), str(script), "exec")
    _take_place(script, arguments)

    def main() -> None:
        names: dict[str, Any] = {"__name__": "__main__", "__file__": str(script)}
        exec(code, names)

    return main


def _take_place(script: Path, arguments: Sequence[str]) -> None:
    """Let the process look as if it had been started with ``script``."""
    sys.path.insert(0, str(script.resolve().parent))
    sys.argv = [str(script), *arguments]
