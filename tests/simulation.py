"""Run simulations in this process, with options of the command line."""

from __future__ import annotations

from typing import Any

from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate


def start(*words: object) -> dict[str, Any]:
    """Simulate as ``python -m aladdin_mpi.simulate WORDS`` does, and return the summary."""
    return simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))
