"""Run the programs in the ``programs/`` folders of the tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.launch import ROOT, Completed, run_ranks

ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
"""Environment with which programs import this project and ``tests`` from any working directory."""


def run_program(program: Path, ranks: int, *args: object, **how: Any) -> Completed:
    """Run ``python PROGRAM ARGS`` on ``ranks`` ranks; ``how`` as for ``run_ranks``."""
    env = {**ENVIRONMENT, **how.pop("env", {})}
    return run_ranks(ranks, [str(program), *map(str, args)], env=env, **how)
