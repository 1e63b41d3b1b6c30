"""``python -m aladdin_mpi.servers``: how many ranks of a run are servers; for batch scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import find_algorithm

ABOUT = "Say how many ranks of a run with these options of aladdin_mpi.train are servers."


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many servers a run with these options has; returns the exit status."""
    try:
        from aladdin_mpi.options.run import TrainOptions, parse

        options = parse(TrainOptions, argv, "aladdin_mpi.servers", ABOUT)
        print(options.servers if find_algorithm(options.algorithm).has_servers else 0)
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
