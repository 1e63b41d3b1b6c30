"""If a rank fails or stops before MPI has started, the others end soon, and one reports why."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.process import startup
from tests.commands import refusal
from tests.launch import ROOT, Completed, needs, run_ranks
from tests.run_program import ENVIRONMENT, run_program

ULFM = ["--with-ft", "ulfm"]
PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.parametrize("launched", [[], ULFM], ids=["plain", "ulfm"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_rank_that_never_starts_mpi_ends_job_within_timeout(name: str, launched: list[str]) -> None:
    program = PROGRAMS / "stopped_rank.py"
    how: dict[str, Any] = {"mpirun": launched, "timeout": 30, "check": False, "is_warm": False}
    completed = run_program(program, 3, "before", name, **how)
    if name == "SIGKILL" and not launched:
        assert "exited on" in completed.stderr  # the launcher ends the job at once
    else:
        rank_0 = re.escape(f"rank 0 (host {os.uname().nodename})")
        assert re.search(rf"{rank_0} .*\b2 s\b.*\bMPI\b", refusal(completed))


@pytest.mark.long
@needs("openmpi")
def test_rank_stopped_after_mpi_start_ends_job_within_timeout() -> None:
    program = PROGRAMS / "stopped_rank.py"
    how: dict[str, Any] = {"timeout": 40, "check": False, "is_warm": False}
    completed = run_program(program, 3, "after", "SIGSTOP", **how)
    assert startup.RANKS_MEET in refusal(completed)


@pytest.mark.long
@needs("openmpi")
def test_startup_watcher_ends_after_rendezvous() -> None:
    completed = run_program(PROGRAMS / "startup_children.py", 2, is_warm=False)
    assert completed.stdout.count("children 1 0") == 2, completed


# -- the startup watcher without MPI -----------------------------------------------------------
def rank(number: int, behaviour: str) -> subprocess.Popen[str]:
    """Start ``programs/watched_rank.py`` as one of two ranks."""
    places = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2"}
    places["PMIX_NAMESPACE"] = f"test-{os.getpid()}-{behaviour}"
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / "watched_rank.py"), behaviour],
        env={**os.environ, **ENVIRONMENT, **places},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_startup_watchers_of_one_host_report_once() -> None:
    ranks = [rank(number, "wait") for number in (0, 1)]
    ends = [each.communicate(timeout=30) for each in ranks]
    assert [each.returncode for each in ranks] == [startup.ENDS] * 2
    printed = "".join(err for _, err in ends)
    assert printed.count("\n") == 1
    assert re.search(r"\b0\.5 s for another\b", printed)


def test_startup_watcher_spares_computing_rank_and_ends_idle_one() -> None:
    """Loading libraries takes long on busy cores; a rank that makes no progress is detected."""
    process = rank(0, "compute_then_wait")
    out, err = process.communicate(timeout=30)
    assert "computed" in out and process.returncode == startup.ENDS
    assert f"1 s {startup.LIBRARIES_LOAD}" in err


@pytest.mark.parametrize("behaviour", ["exit_at_once", "end_twice"])
def test_startup_watcher_ends_with_its_rank(behaviour: str) -> None:
    process = rank(0, behaviour)
    out, err = process.communicate(timeout=4)
    assert (process.returncode, err) == (0, "")
    end = time.monotonic() + 2
    while Path(f"/proc/{out.strip()}").exists() and not is_zombie(out.strip()):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_zombie(pid: str) -> bool:
    """Return whether an orphan process has ended but was not reaped."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_single_process_starts_no_startup_watcher() -> None:
    code = "from aladdin_mpi.process import startup; startup.begin(); print(startup._watch)"
    env = {name: text for name, text in os.environ.items() if not name.startswith("OMPI_")}
    out = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT, text=True)
    assert out.strip() == "None"


# -- errors before slow imports ------------------------------------------------------------------
def imported(completed: Completed) -> set[str]:
    return {
        line.rpartition("|")[2].strip() for line in completed.stderr.splitlines() if "|" in line
    }


@pytest.mark.sample(1)
@needs("openmpi")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--servers", "3", "--optimizer", "adamw"], "--servers: .*workers"),
        (["--algorithm", "sgd"], "--algorithm: "),
        (["--slowdown", "7=2"], r"--slowdown: .*\b0 to 2\b.*\bworker 7\b"),
        (["--wire", "int9"], "--wire: "),
    ],
)
def test_invalid_options_are_rejected_before_slow_imports(options: list[str], cause: str) -> None:
    args = ["-X", "importtime", "-m", "aladdin_mpi.train", *options]
    completed = run_ranks(4, args, is_warm=False, check=False)
    assert re.search(cause, refusal(completed))
    assert "aladdin_mpi.run.early" in imported(completed)
    assert "torch._C" not in imported(completed)


def test_timeout_is_read_from_arguments_before_options_are_parsed() -> None:
    assert startup.typed_limit(["--epochs", "2", "--timeout", "9"]) == 9
    assert startup.typed_limit(["--timeout=7.5", "--quiet"]) == 7.5
    for words in ["--timeout"], ["--timeout", "soon"], ["--worker-timeout", "3"], []:
        assert startup.typed_limit(words) is None
