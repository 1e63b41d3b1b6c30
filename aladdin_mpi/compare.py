"""``python -m aladdin_mpi.compare``: compare algorithms under equal conditions."""

from __future__ import annotations

from collections.abc import Sequence

from aladdin_mpi.process import guard


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a run failed."""
    return guard.run_guarded(lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    guard.remedy = lambda: "rerun the same command to resume"

    from aladdin_mpi.comparison.options import read_request

    request = read_request(argv)  # --help ends here, before the slow imports

    from aladdin_mpi.comparison.command import compare

    return compare(request)


if __name__ == "__main__":
    raise SystemExit(main())
