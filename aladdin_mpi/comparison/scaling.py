"""``python -m aladdin_mpi.comparison.scaling FOLDER ...``: print a table of scaling."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from aladdin_mpi.comparison.figures import RunFigures, plain, read_figures
from aladdin_mpi.errors import UserError

DESCRIPTION = "Print a table of the throughput of finished runs by number of workers."
HEADINGS = ["run", "workers", "servers", "samples/s", "speedup", "efficiency (%)", "waiting (%)"]
KEYS = ("workers", "servers", "samples_per_second", "wait_fraction")


def table(runs: Sequence[RunFigures]) -> list[list[str]]:
    """Return headings and a line for each run, with the speedup relative to the first run.

    Efficiency is the throughput per worker, relative to that of the first run.
    """
    lines = [HEADINGS]
    first_workers, _, first_rate, _ = (_value(runs[0], key) for key in KEYS)
    for run in runs:
        workers, servers, rate, waiting = (_value(run, key) for key in KEYS)
        speed_up = rate / first_rate
        efficiency = speed_up / (workers / first_workers)
        figures = f"{workers:.0f} {servers:.0f} {rate:,.1f} {speed_up:.2f} {100 * efficiency:.1f}"
        lines.append([run.label, *figures.split(), f"{100 * waiting:.1f}"])
    return lines


def _value(run: RunFigures, key: str) -> float:
    value = run.value(key)
    if value is None:
        raise UserError(f"{run.folder}: expected {key} in its summary, found none; run it again")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table of the runs in the given folders and return the exit status."""
    parser = argparse.ArgumentParser("aladdin_mpi.comparison.scaling", description=DESCRIPTION)
    parser.add_argument(
        "folders", nargs="*", type=Path, metavar="FOLDER", help="folders of runs, smallest first"
    )
    folders = parser.parse_args(argv).folders
    try:
        if not folders:
            raise UserError(
                "scaling: expected the folders of finished runs, got none; name at least one"
            )
        print(plain(table([read_figures(folder, folder.name) for folder in folders]), left=(0,)))
    except UserError as error:
        print(f"aladdin_mpi: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
