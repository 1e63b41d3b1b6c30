"""``python -m aladdin_mpi.servers``: print a run's number of servers, for batch scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm

ABOUT = "Print the number of server ranks that aladdin_mpi.train uses with these options."


def main(argv: Sequence[str] | None = None) -> int:
    """Print the number of servers and return the exit status."""
    try:
        from aladdin_mpi.options.reader import divided
        from aladdin_mpi.options.run import TrainOptions, parse

        options = parse(TrainOptions, divided(argv).options, "aladdin_mpi.servers", ABOUT)
        print(options.servers if find_algorithm(options.algorithm).has_servers else 0)
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
