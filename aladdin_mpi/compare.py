"""``python -m aladdin_mpi.compare``: compare algorithms under equal conditions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.guard import TerminatedError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 1 if a run failed."""
    try:
        from aladdin_mpi.comparison.options import read_request

        request = read_request(argv)  # --help ends here, before the slow imports

        from aladdin_mpi.comparison.command import compare

        return compare(request)
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    except TerminatedError as error:
        print(f"aladdin_mpi: stopped by {error}; rerun the same command to resume", file=sys.stderr)
        return 128 + error.signum


if __name__ == "__main__":
    raise SystemExit(main())
