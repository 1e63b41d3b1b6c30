"""Advice on the terminal and in a folder."""

from __future__ import annotations

import sys

from aladdin_mpi.advice.options import AdviseOptions
from aladdin_mpi.advice.picture import draw
from aladdin_mpi.advice.report import Advice, as_data, in_words
from aladdin_mpi.comparison.table import markdown, plain
from aladdin_mpi.errors import UserError
from aladdin_mpi.process import console, extras, plain_json
from aladdin_mpi.process.files import write_whole

TEXT, DATA, PICTURE = "advice.md", "advice.json", "advice.png"
SHOWN = 12
"""Rows of the table on a terminal."""


def check_free(options: AdviseOptions) -> None:
    """Raise UserError if there is advice in the folder already."""
    if options.out is None or options.overwrite:
        return
    there = [name for name in (TEXT, DATA, PICTURE) if (options.out / name).exists()]
    if there:
        raise UserError(
            f"--out {options.out}: expected a folder without advice, got one with {there[0]}; name "
            "another, or add --overwrite"
        )


def give(advice: Advice) -> None:
    """Print it, and write it where that is asked for."""
    print(in_words(advice, plain, SHOWN))
    out = advice.request.options.out
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / TEXT, f"# Advice\n\n{in_words(advice, markdown, len(advice.entries))}\n")
    write_whole(out / DATA, plain_json.written(as_data(advice), indent=2) + "\n")
    if extras.missing("matplotlib"):
        console.say(f"no picture: {extras.command(['matplotlib'])} for it", sys.stderr)
    else:
        draw(advice, out / PICTURE)
    print(f"\nwritten to {out}")
