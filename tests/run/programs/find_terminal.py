"""Append to the file ``found`` how many columns the terminal of rank 0 has."""

from __future__ import annotations

import os
import sys

from aladdin_mpi.process.console import find_terminal

if "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    terminal = find_terminal(sys.stderr)
    with open("found", "a") as file:
        print(terminal and terminal.columns, file=file)
