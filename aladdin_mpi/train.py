"""``mpirun -np N python -m aladdin_mpi.train``: train over MPI."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.guard import launched_rank, quiet_unless_first, run_guarded

DESCRIPTION = "Train a model with data parallelism over MPI."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    from aladdin_mpi.options import TrainOptions, parse

    # Options are read before MPI starts, so that --help works where MPI does not.
    with quiet_unless_first(launched_rank()):
        options = parse(TrainOptions, argv, "aladdin_mpi.train", DESCRIPTION)

    from aladdin_mpi.transport.mpi import MpiTransport

    # isort: split
    from aladdin_mpi.training.trainer import train

    transport = MpiTransport(timeout=options.timeout)
    train(options, transport)
    transport.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
