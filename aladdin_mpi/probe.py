"""``python -m aladdin_mpi.probe``: a cluster, described or measured, as a file for simulations."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.process import guard
from aladdin_mpi.process.deferred import defer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    defer("torch")  # which the options' files import too

    rank, _ = guard.launched_place()
    with guard.quiet_unless_first(rank):
        from aladdin_mpi.probing.options import read

        options, describes = read(argv)
    from aladdin_mpi.probing.command import describe

    if describes:
        if rank == 0:
            describe(options)
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
