"""``python -m aladdin_mpi.probe``: describe or measure a cluster for simulations."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.process import guard, startup

PATIENCE = 60.0
"""Seconds that a rank waits for another one, in addition to the time for measurements."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    startup.begin()
    rank, size = guard.launched_place()

    from aladdin_mpi.probing.options import read

    try:
        with guard.quiet_unless_first(rank):
            options, describes = read(argv)
    except UserError as error:
        if size == 1:
            raise
        return _measure(error)
    if not describes:
        return _measure(options)
    if rank == 0:
        from aladdin_mpi.probing.cluster_file import describe

        describe(options)
    return 0


def _measure(given: ProbeOptions | UserError) -> int:
    """Measure over MPI, or report invalid options together with the other ranks."""
    seconds = 0.0 if isinstance(given, UserError) else given.seconds
    startup.expect(startup.MPI_STARTS, PATIENCE + seconds)
    from aladdin_mpi.run.early import agree_early  # starts MPI, before torch is loaded

    options = agree_early(given, lambda options: options)

    from aladdin_mpi.probing.measured_cluster import measure_cluster
    from aladdin_mpi.transport.mpi.engine import MpiTransport
    from aladdin_mpi.transport.mpi.progress import cores_of_host

    transport = MpiTransport(timeout=PATIENCE + seconds)
    measure_cluster(options, transport, cores_of_host())
    transport.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
