"""The option --quick: a reduced run of a benchmark, to check that it works."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], reduced: Mapping[str, Any]
) -> argparse.Namespace:
    """Parse ``argv``; with ``--quick`` the defaults are those of ``reduced``.

    Args:
        parser: the benchmark's parser, to which the option is added.
        argv: the arguments; they override the reduced defaults.
        reduced: the defaults of a reduced run, by name.
    """
    parser.add_argument("--quick", action="store_true", help="a reduced run, within a minute")
    if "--quick" in argv:
        parser.set_defaults(**reduced)
    return parser.parse_args(argv)
