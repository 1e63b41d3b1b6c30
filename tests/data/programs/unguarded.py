"""The program ``loader_processes.py`` without the guard of its main file."""

from __future__ import annotations

import sys

from tests.data.programs.loader_processes import main

main(*sys.argv[1:])
