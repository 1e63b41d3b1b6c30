"""``python -m aladdin_mpi.servers``: how many ranks of a run are servers; for batch scripts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aladdin_mpi.errors import UserError
from aladdin_mpi.process.deferred import defer


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many servers a run with these options has; returns the exit status."""
    try:
        print(_servers(argv))
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    return 0


def _servers(argv: Sequence[str] | None) -> int:
    defer("torch")  # which the options' files import too
    from aladdin_mpi.config.options import TrainOptions, parse

    about = "Say how many ranks of a run with these options of aladdin_mpi.train are servers."
    options = parse(TrainOptions, argv, "aladdin_mpi.servers", about)

    from aladdin_mpi.algorithms import registry

    return options.servers if registry.find(options.algorithm).server else 0


if __name__ == "__main__":
    raise SystemExit(main())
