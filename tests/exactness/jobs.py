"""Run a column of the table: one job for all rows, restarted after a row that ends it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import launch, warm
from tests.exactness.row import COLUMNS, Round

STALLED = 90.0
"""Seconds without a finished row after which a job is ended."""
ATTEMPTS = 8
"""The most jobs for a column."""
PROGRAM = "tests.exactness.program"


@dataclass
class Outcome:
    """Result of a row.

    Attributes:
        error: why there is no result; None if there is one.
        reports: each rank's report, by ``program.py``.
    """

    error: str | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)

    @property
    def workers(self) -> list[dict[str, Any]]:
        return [report for report in self.reports if not report["is_server"]]

    @property
    def rounds(self) -> list[Round]:
        """Return the workers' batches by round; a worker may have none in the last."""
        seen = [report["seen"] for report in self.workers]
        return [
            [each[number][1] for each in seen if number < len(each)]
            for number in range(max(map(len, seen)))
        ]

    @property
    def epochs(self) -> list[int]:
        """Return the epoch of each round."""
        longest = max((report["seen"] for report in self.workers), key=len)
        return [epoch for epoch, _ in longest]


def run_column(name: str, rows: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run ``rows`` in one job; if it fails, run the rows after the failed one in a new job."""
    outcomes: dict[str, Outcome] = {}
    left, attempts = list(rows), 0
    while left:
        if attempts == ATTEMPTS:
            return outcomes | dict.fromkeys(left, Outcome(f"not run: {attempts} jobs failed"))
        attempts += 1
        place = folder / str(len(outcomes))
        place.mkdir(parents=True)
        (place / "job.json").write_text(json.dumps({"column": name, "rows": left}))
        printed = _run(name, place)
        ranks = max(1, COLUMNS[name].ranks)
        reports = [_reports(place / f"rank-{rank}.jsonl") for rank in range(ranks)]
        finished = min(map(_finished, reports))
        for number, row in enumerate(left[:finished]):
            outcomes[row] = Outcome(reports=[each[number] for each in reports])
        if finished < len(left):
            outcomes[left[finished]] = Outcome(error=_error(reports, finished, printed))
        left = left[finished + 1 :]
    return outcomes


def _run(name: str, place: Path) -> str:
    """Run the job until it ends or stalls; return its output."""
    with _started(COLUMNS[name].ranks, place) as job:
        size, since = -1, time.monotonic()
        while job.so_far().returncode == -1:
            now = sum(file.stat().st_size for file in place.glob("rank-*.jsonl"))
            if now != size:
                size, since = now, time.monotonic()
            if time.monotonic() - since > STALLED:
                break
            time.sleep(0.05)
        return repr(job.so_far())


@contextmanager
def _started(ranks: int, place: Path) -> Iterator[launch.Job]:
    program = ["-m", PROGRAM, str(place)]
    if ranks:
        with launch.start_ranks(ranks, program) as job:
            yield job
        return
    with launch.turn():
        job = launch.Job([warm.python(), *program], launch.environment("openmpi", {}), launch.ROOT)
        try:
            yield job
        finally:
            job.close()


def _reports(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _finished(reports: list[dict[str, Any]]) -> int:
    return len(reports) - any("error" in report for report in reports)


def _error(reports: list[list[dict[str, Any]]], number: int, printed: str) -> str:
    for each in reports:
        if number < len(each) and "error" in each[number]:
            return str(each[number]["error"])
    return f"the job ended, or no row ended for {STALLED:g} s\n{printed[-4000:]}"
