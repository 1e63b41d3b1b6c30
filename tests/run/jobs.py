"""Watch jobs over MPI while they run, and kill their ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.commands import metrics
from tests.launch import Job

ULFM = ["--with-ft", "ulfm"]
"""Options of mpirun that let the other ranks survive a failure."""


def wait_until(
    job: Job, holds: Callable[[], object], seconds: float = 60, or_end: bool = False
) -> None:
    """Wait until ``holds()`` is true.

    Args:
        job: must not end before that, unless ``or_end``.
        holds: condition, called repeatedly.
        seconds: time limit.
        or_end: also stop waiting when the job ends.
    """
    end = time.monotonic() + seconds
    while not holds():
        has_ended = job.process.poll() is not None
        if has_ended and or_end:
            return
        assert not has_ended and time.monotonic() < end, job.so_far()
        time.sleep(0.02)


def checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of complete checkpoints."""
    return list((run_dir / "checkpoint").glob("samples-*"))


def metrics_so_far(run_dir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the lines of metrics so far, none if there is no file yet."""
    return metrics(run_dir, kind) if (run_dir / "metrics.jsonl").exists() else []


def samples_so_far(run_dir: Path) -> int:
    """Return the number of samples in the last line of metrics."""
    lines = metrics_so_far(run_dir)
    return int(lines[-1]["samples"]) if lines else 0


def kill_ranks(job: Job, ranks: Sequence[int]) -> None:
    """Kill ranks at the same time."""
    for pid in [job.pid(rank) for rank in ranks]:
        os.kill(pid, signal.SIGKILL)
