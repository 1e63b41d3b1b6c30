"""``python -m aladdin_mpi.simulate``: simulate training on a cluster, in one process."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.process import console, guard

PROG = "aladdin_mpi.simulate"
DESCRIPTION = (
    "Simulate data-parallel training of a model on a modelled cluster, or only its timing. All "
    "reported times are virtual; the same seed gives identical results. To simulate your script's "
    "DataParallel, run python -m aladdin_mpi.simulate SCRIPT.py [options] [-- arguments of the "
    "script]. Options on the command line override those in the script."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    from aladdin_mpi.options.reader import divided
    from aladdin_mpi.options.run import SimulateOptions, read_request, warnings

    line = divided(argv)
    follows = line.script is None
    request = read_request(SimulateOptions, line.options, PROG, DESCRIPTION, follows)
    guard.refuse_launcher("a simulation is one process; --workers sets the number of workers.")
    if not request.setting("quiet"):
        console.say("aladdin_mpi: starting the simulation")
    if line.script is not None:
        from aladdin_mpi.run.script import simulate_script

        simulate_script(line.script, line.arguments, request.given)
        return 0
    _ = request.options  # report invalid ones before the slow imports

    from aladdin_mpi.run.resumption import decide, follow
    from aladdin_mpi.run.trainer import simulate

    decided = follow(decide(request), request)
    if decided is not None:
        guard.warn(warnings(decided, request.given))
        simulate(decided)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
