"""Run the programs of a part with a time limit and collect their rows."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from benchmarks import harness
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import FOLDER, VARIABLE
from benchmarks.gpu_check.parts import Job, Part
from benchmarks.gpu_check.program import LIMIT
from benchmarks.gpu_check.rows import FAIL, SKIP, Row

STOP_SECONDS = 10.0
"""Time for mpirun to end its ranks."""
LAST_LINES = 3
"""Number of lines of a failed program's output that its row quotes."""


class Runner:
    """Runs parts on one device and forwards each row when it is printed.

    Args:
        device: "gpu" or "test".
        scratch: folder for the runs.
        report: folder of the report.
        log: file for all output of the programs.
        on_row: called with each row.
    """

    def __init__(
        self,
        device: str,
        scratch: Path,
        report: Path,
        log: IO[str],
        on_row: Callable[[Row], None],
    ) -> None:
        self._device = device
        self._report = report
        self._scratch = scratch
        self._log = log
        self._on_row = on_row

    def run(self, part: Part, seconds: float) -> None:
        """Run the programs of a part within ``seconds``; a failure becomes a row."""
        end = time.monotonic() + seconds
        for job in part.jobs:
            self._run_job(part, job, end - time.monotonic())

    def _run_job(self, part: Part, job: Job, seconds: float) -> None:
        title = " ".join([job.module, *job.arguments]) + f", {job.ranks} ranks"
        if seconds <= 0:
            self._on_row(Row(part.name, title, SKIP, note="no time left"))
            return
        folder = self._scratch / f"{job.module}-{job.ranks}"
        program = ["-m", "benchmarks.gpu_check.program", f"benchmarks.gpu_check.{job.module}"]
        command = harness.mpirun_here(
            job.ranks, [*program, str(folder), *job.arguments], job.options
        )
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(seconds),
            start_new_session=True,
        )
        lines: list[str] = []
        reader = threading.Thread(target=self._read, args=(process, lines), daemon=True)
        reader.start()
        try:
            problem = self._wait(process, job.status, seconds)
        except BaseException:  # Ctrl-C or SIGTERM, which do not reach the separate session
            self._end(process)
            raise
        reader.join(STOP_SECONDS)
        if problem:
            quoted = " / ".join(line.strip() for line in lines[-LAST_LINES:])
            self._on_row(Row(part.name, title, FAIL, note=f"{problem}: {quoted}"))

    def _environment(self, seconds: float) -> dict[str, str]:
        own = {VARIABLE: self._device, FOLDER: str(self._report), LIMIT: str(seconds)}
        return harness.environment() | own | {"PYTHONUNBUFFERED": "1"}

    def _wait(self, process: subprocess.Popen[str], expected: int, seconds: float) -> str:
        """Wait for the end of a program and return a description of the problem, if any."""
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._end(process)
            return f"not finished after {seconds:.3g} s"
        return "" if status == expected else f"exit status {status}"

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        process.terminate()  # mpirun then ends the ranks
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()

    def _read(self, process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            row = rows.parse(line)
            if row is not None:
                self._on_row(row)
                continue
            self._log.write(line)
            self._log.flush()
            if line.strip():
                lines.append(line)
