"""Append the width of rank 0's terminal to the file ``found``."""

from __future__ import annotations

import os
import sys

from aladdin_mpi.process.console import find_terminal

if "0" in (os.environ.get("OMPI_COMM_WORLD_RANK"), os.environ.get("PMI_RANK")):
    terminal = find_terminal(sys.stderr)
    with open("found", "a") as file:
        print(terminal and terminal.columns, file=file)
