"""Run the commands as a user does, and access the files and processes that they leave."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi.comparison import command
from aladdin_mpi.comparison.options import read_request
from tests import warm
from tests.launch import ROOT, Completed, Job, run_ranks, start_ranks

TRAIN = ("-m", "aladdin_mpi.train")
SIMULATE = ("-m", "aladdin_mpi.simulate")
EPOCH = 1437
"""Number of training samples of digits."""


def words(run_dir: Path | None, options: Sequence[object]) -> list[str]:
    """Return the command line for ``options``, an alternating list of names and values.

    Evaluations of a new run, which usually take longer than its training, use few batches.
    """
    where = [] if run_dir is None else ["--run-dir", str(run_dir)]
    is_new = run_dir is not None and not {"--bn-batches", "--"}.intersection(options)
    return [*where, *map(str, options), *(["--bn-batches", "8"] if is_new else [])]


def train(
    ranks: int, run_dir: Path | None, *options: object, modules: Path | None = None, **how: Any
) -> Completed:
    """Run ``mpirun -n RANKS python -m aladdin_mpi.train ...``; ``how`` as for ``run_ranks``."""
    how["env"] = {**how.get("env", {}), **_python_path(modules)}
    return run_ranks(ranks, [*TRAIN, *words(run_dir, options)], **how)


def training(
    ranks: int, run_dir: Path, *options: object, modules: Path | None = None, **how: Any
) -> AbstractContextManager[Job]:
    """Start the same command as a job that can be interrupted."""
    how["env"] = {**how.get("env", {}), **_python_path(modules)}
    return start_ranks(ranks, [*TRAIN, *words(run_dir, options)], **how)


def simulate(
    run_dir: Path | None,
    *options: object,
    modules: Path | None = None,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    timeout: float = 120,
    is_warm: bool = True,
) -> Completed:
    """Run ``python -m aladdin_mpi.simulate ...``, in a warm process by default."""
    start = time.monotonic()
    args = [*SIMULATE, *words(run_dir, options)]
    surroundings = {**os.environ, **_python_path(modules), **(env or {})}
    process = subprocess.run(
        [warm.python() if is_warm else sys.executable, *args],
        env=surroundings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
    )
    completed = Completed(
        process.returncode, process.stdout, process.stderr, time.monotonic() - start
    )
    assert not check or process.returncode == 0, completed
    return completed


def compare(words: Sequence[str]) -> int:
    """Run ``python -m aladdin_mpi.compare ...`` in this process; errors are raised."""
    return command.compare(read_request(words))


def _python_path(modules: Path | None) -> dict[str, str]:
    return {} if modules is None else {"PYTHONPATH": str(modules)}


# -- files of a run -------------------------------------------------------------------
def summary(run_dir: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return result


def metrics(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics, each of which must parse."""
    text = (run_dir / "metrics.jsonl").read_text()
    assert not text or text.endswith("\n")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def rises(lines: Sequence[Mapping[str, Any]], key: str = "samples") -> bool:
    values = [line[key] for line in lines]
    return all(a < b for a, b in itertools.pairwise(values))


def checkpoint(run_dir: Path) -> Path:
    """Return the folder of the last checkpoint."""
    (folder,) = (run_dir / "checkpoint").glob("samples-*")
    return folder


def checkpoint_part(run_dir: Path, rank: int) -> dict[str, Any]:
    """Return a rank's part of the last checkpoint."""
    part: dict[str, Any] = torch.load(checkpoint(run_dir) / f"rank-{rank}.pt", weights_only=True)
    return part


def leftovers(run_dir: Path) -> list[str]:
    """Return files with names that are used only during writing."""
    return sorted(str(p) for p in run_dir.rglob("*") if re.search(r"\.?tmp\b", p.name))


# -- output and processes of a job -------------------------------------------------------
def refusal(completed: Completed) -> str:
    """Return the one error line, and check that nothing else was printed."""
    lines = [line for line in completed.stderr.splitlines() if "aladdin_mpi: error" in line]
    assert completed.returncode != 0, repr(completed)
    assert len(lines) == 1, repr(completed)
    assert "Traceback" not in completed.stdout + completed.stderr, repr(completed)
    return lines[0]


def running(mark: str) -> list[int]:
    """Return processes with ``mark`` in their command line or environment, except zombies."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if mark.encode() in seen and int(process.name) != os.getpid():
            pids.append(int(process.name))
    return pids


def end_of(mark: str, seconds: float) -> bool:
    """Return whether all processes with ``mark`` end within ``seconds``."""
    end = time.monotonic() + seconds
    while left := running(mark):
        if time.monotonic() > end:
            print(f"still running: {left}")
            return False
        time.sleep(0.1)
    return True
