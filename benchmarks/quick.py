"""The option --quick: a reduced pass of a benchmark, to see that it works."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], reduced: Mapping[str, Any]
) -> argparse.Namespace:
    """Read ``argv``; with ``--quick`` the defaults are those of ``reduced``.

    Args:
        parser: of the benchmark; gets the option.
        argv: what stands in it goes before the reduced defaults too.
        reduced: the defaults of a reduced pass, by name.
    """
    parser.add_argument("--quick", action="store_true", help="a reduced pass, within a minute")
    if "--quick" in argv:
        parser.set_defaults(**reduced)
    return parser.parse_args(argv)
