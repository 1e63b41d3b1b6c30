"""``python -m aladdin_mpi.simulate``: the same training in virtual time, in one process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.options.run import RunRequest, SimulateOptions, read_request, warnings
from aladdin_mpi.process import console, guard

DESCRIPTION = (
    "Train, or only time, a model with data parallelism on a modelled cluster in virtual time. "
    "All figures of time are virtual; the same seed gives the same bytes. With a script of your "
    "own first, python -m aladdin_mpi.simulate SCRIPT.py [options] [-- its arguments], its "
    "DataParallel is simulated, and options go over those in the script."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0].endswith(".py"):
        _simulate_script(*words)
        return 0
    request = _read(words)
    _ = request.options  # wrong ones are refused before the slow imports

    from aladdin_mpi.run.resumption import decide, follow
    from aladdin_mpi.run.trainer import simulate

    decided = follow(decide(request), request)
    if decided is not None:
        guard.warn(warnings(decided, request.given))
        simulate(decided)
    return 0


def _simulate_script(script: str, *words: str) -> None:
    cut = words.index("--") if "--" in words else len(words)
    typed = _read(words[:cut], follows=False)

    from aladdin_mpi.run.script import simulate_script

    simulate_script(Path(script), words[cut + 1 :], typed.given)


def _read(words: Sequence[str], follows: bool = True) -> RunRequest[SimulateOptions]:
    request = read_request(SimulateOptions, words, "aladdin_mpi.simulate", DESCRIPTION, follows)
    if not request.setting("quiet"):
        console.say("aladdin_mpi: starting, in virtual time")
    return request


if __name__ == "__main__":
    raise SystemExit(main())
