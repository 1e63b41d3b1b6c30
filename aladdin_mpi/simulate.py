"""``python -m aladdin_mpi.simulate``: the same training in virtual time, in one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.process import guard
from aladdin_mpi.run.greeting import Greeting

DESCRIPTION = (
    "Train, or only time, a model with data parallelism on a modelled cluster in virtual time. "
    "All figures of time are virtual; the same seed gives the same bytes. With a script of your "
    "own first, python -m aladdin_mpi.simulate SCRIPT.py [options] [-- its arguments], its "
    "DataParallel is simulated, and options go over those in the script."
)

STARTING = "starting, in virtual time"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].endswith(".py"):
        return _simulate_script(words)
    greeting = Greeting(STARTING, words)

    from aladdin_mpi.options.command_line import read
    from aladdin_mpi.options.run import SimulateOptions, completed
    from aladdin_mpi.options.settings import build

    given = read(SimulateOptions, argv, "aladdin_mpi.simulate", DESCRIPTION)
    settings = completed(SimulateOptions, given)
    greeting.settings_read(settings)
    options = build(SimulateOptions, settings)

    from aladdin_mpi.options.run import warnings
    from aladdin_mpi.run.resumption import decide, follow
    from aladdin_mpi.run.trainer import simulate

    decided = follow(decide(SimulateOptions, given, options), SimulateOptions, given, options)
    if decided is not None:
        guard.warn(warnings(decided, given))
        simulate(decided)
    return 0


def _simulate_script(words: Sequence[str]) -> int:
    script, *rest = words
    cut = rest.index("--") if "--" in rest else len(rest)
    greeting = Greeting(STARTING, rest[:cut])

    from aladdin_mpi.options.command_line import read
    from aladdin_mpi.options.run import SimulateOptions

    typed = read(SimulateOptions, rest[:cut], "aladdin_mpi.simulate", DESCRIPTION)
    greeting.settings_read(typed)

    from aladdin_mpi.run.script import simulate_script

    simulate_script(Path(script), rest[cut + 1 :], typed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
