"""``python -m aladdin_mpi.comparison.scaling FOLDER ...``: throughput against size, as a table."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.comparison.figures import RunFigures
from aladdin_mpi.errors import UserError

DESCRIPTION = "Print the throughput of finished runs against their size, as a table."
HEADINGS = ["run", "workers", "servers", "samples/s", "speed-up", "efficiency, %", "waiting, %"]


def table(runs: Sequence[RunFigures]) -> list[list[str]]:
    """Headings and a line for each run; speed-up and efficiency are related to the first.

    Efficiency is the throughput of one worker, related to that of one worker of the first run.
    """
    first = runs[0]
    lines = [HEADINGS]
    for run in runs:
        speed_up = _value(run, "samples_per_second") / _value(first, "samples_per_second")
        larger = _value(run, "workers") / _value(first, "workers")
        lines.append(
            [
                run.label,
                f"{_value(run, 'workers'):.0f}",
                f"{_value(run, 'servers'):.0f}",
                f"{_value(run, 'samples_per_second'):,.1f}",
                f"{speed_up:.2f}",
                f"{100 * speed_up / larger:.1f}",
                f"{100 * _value(run, 'wait_fraction'):.1f}",
            ]
        )
    return lines


def _value(run: RunFigures, key: str) -> float:
    found = run.value(key)
    if found is None:
        raise UserError(f"{run.folder}: expected {key} in its summary, found none; run it again")
    return found


def plain(lines: Sequence[Sequence[str]]) -> str:
    """The lines for a terminal: names to the left, figures to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the finished runs in the folders given; returns the exit status."""
    parser = argparse.ArgumentParser("aladdin_mpi.comparison.scaling", description=DESCRIPTION)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="of a finished run, smallest first"
    )
    folders = parser.parse_args(argv).folders

    from aladdin_mpi.comparison.figures import read_figures  # slow, and --help does without

    try:
        if not folders:
            raise UserError("scaling: expected the folders of finished runs, got none")
        print(plain(table([read_figures(folder, folder.name) for folder in folders])))
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
