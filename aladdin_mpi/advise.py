"""``python -m aladdin_mpi.advise``: recommend an algorithm and its options for a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.process import guard


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    from aladdin_mpi.advice.options import read

    request = read(argv)
    guard.refuse_launcher("the adviser is one process; --jobs sets how many it starts.")

    from aladdin_mpi.advice.advising import advise

    advise(request)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
