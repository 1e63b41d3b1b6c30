"""Helper that starts MPI jobs: time limits, output and termination of every process."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from tests.launch import JobError, needs, run_ranks, start_ranks

pytestmark = needs("openmpi")

SLEEP = """
import os, time
rank = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
os.write(1, f"pid {os.getpid()} rank {rank}\\n".encode())
time.sleep(100)
"""


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_run_ranks_returns_output_of_every_rank() -> None:
    completed = run_ranks(2, ["-c", "import sys; print('out'); print('err', file=sys.stderr)"])
    assert completed.returncode == 0
    assert completed.stdout.count("out\n") == 2
    assert completed.stderr.count("err\n") == 2


def test_run_ranks_returns_exit_code() -> None:
    assert run_ranks(2, ["-c", "raise SystemExit(3)"], check=False).returncode == 3


def test_run_ranks_raises_failure_with_output() -> None:
    with pytest.raises(JobError, match="some words"):
        run_ranks(2, ["-c", "import sys; sys.exit('some words')"])


@pytest.mark.parametrize(
    "mpi", ["openmpi", pytest.param("mpich", marks=[needs("mpich"), pytest.mark.long])]
)
def test_job_time_limit_kills_every_rank(mpi: str) -> None:
    with start_ranks(2, ["-c", SLEEP], mpi=mpi) as job:
        job.wait_for("rank 0")
        job.wait_for("rank 1")
        with pytest.raises(JobError, match=r"\b0\.5 s\b") as caught:
            job.wait(0.5)
    words = str(caught.value).split()
    pids = [int(after) for word, after in itertools.pairwise(words) if word == "pid"]
    assert len(pids) == 2
    assert not any(is_running(pid) for pid in pids)


def test_job_finds_process_of_rank_to_kill() -> None:
    with start_ranks(2, ["-c", SLEEP]) as job:
        job.wait_for("rank 1")
        os.kill(job.pid(1), signal.SIGKILL)
        assert job.wait(60).returncode != 0
