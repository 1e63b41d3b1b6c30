"""Ranks that die or stop before MPI has started: the others end soon, and one of them says why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from aladdin_mpi.process import startup
from tests.commands import refusal
from tests.launch import ROOT, Completed, needs, run_ranks

ULFM = ["--with-ft", "ulfm"]
PREPARE = """
import os, signal, sys, time
from aladdin_mpi.process import startup, watcher
startup.LEAST = startup.MEETING_LEAST = 2.0
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
"""
TRAIN = """
from aladdin_mpi import train
if rank == 2:
    startup.begin(2)
    os.kill(os.getpid(), signal.SIGNAL)
sys.exit(train.main(["--timeout", "2", "--quiet"]))
"""
WORDS = "has waited 2 s for all ranks to start MPI: a rank has died, hangs, or is slower"


@needs("openmpi")
@pytest.mark.parametrize("launched", [[], ULFM], ids=["plain", "ulfm"])
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_never_starts_mpi(name: str, launched: list[str]) -> None:
    code = PREPARE + TRAIN.replace("SIGNAL", name)
    done = run_ranks(3, ["-c", code], mpirun=launched, timeout=30, check=False)
    if name == "SIGKILL" and not launched:
        assert "exited on" in done.stderr  # the launcher ends the job at once
    else:
        assert f"rank 0 (host {os.uname().nodename}) {WORDS}" in refusal(done)


LATER = """
startup.begin()
startup.expect(startup.MPI_STARTS, 20)
from aladdin_mpi.transport.mpi.engine import MpiTransport
if rank == 2:
    os.kill(os.getpid(), signal.SIGSTOP)
MpiTransport(timeout=2)
"""


@needs("openmpi")
def test_a_rank_that_stops_when_mpi_has_started() -> None:
    done = run_ranks(3, ["-c", PREPARE + LATER], timeout=40, check=False)
    assert "s for all ranks to make their communicators: a rank" in refusal(done)


GONE = """
import os
from pathlib import Path
from aladdin_mpi.process import startup

startup.begin()
before = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
from aladdin_mpi.transport.mpi.engine import MpiTransport
transport = MpiTransport(timeout=30)
after = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
print(f"children {len(before)} {len(after)}", flush=True)
transport.close()
"""


@needs("openmpi")
def test_nothing_is_left_when_the_ranks_have_met() -> None:
    done = run_ranks(2, ["-c", GONE])
    assert done.stdout.count("children 1 0") == 2, done


# -- the process that watches, without MPI --------------------------------------------------
ALONE = """
import os, sys, time
from aladdin_mpi.process import startup, watcher
startup.LEAST, watcher.SLICE, watcher.TURN_SECONDS = 0.1, 0.1, 0.3
startup.begin()
print(startup._watched.pid, flush=True)
"""


def rank(number: int, code: str) -> subprocess.Popen[str]:
    places = {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", ALONE + code],
        env={**os.environ, **places, "PMIX_NAMESPACE": f"test-{os.getpid()}-{hash(code)}"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_rank_of_a_host_speaks_for_all() -> None:
    code = "startup.expect('for a test', 0.5); startup.expect('for another'); time.sleep(60)"
    ranks = [rank(number, code) for number in (0, 1)]
    ends = [each.communicate(timeout=30) for each in ranks]
    assert [each.returncode for each in ranks] == [startup.ENDS] * 2
    said = "".join(err for _, err in ends)
    assert said.count("\n") == 1
    assert "has waited 0.5 s for another: a rank has died" in said


COMPUTES = """
startup.expect(startup.LIBRARIES_LOAD, 1.0)  # on busy cores it may get none of them for so long
end = time.monotonic() + 3.0
while time.monotonic() < end:
    pass
print("computed", flush=True)
time.sleep(60)
"""


def test_a_rank_that_computes_is_not_held_up() -> None:
    """Loading libraries takes its time where the cores are busy; standing still is noticed."""
    process = rank(0, COMPUTES)
    out, err = process.communicate(timeout=30)
    assert "computed" in out and process.returncode == startup.ENDS
    assert "has waited 1 s for its own libraries" in err


@pytest.mark.parametrize("code", ["os._exit(0)", "startup.end(); startup.end()"])
def test_it_is_gone_with_its_rank(code: str) -> None:
    process = rank(0, f"startup.expect('for a test', 5); {code}")
    out, err = process.communicate(timeout=4)
    assert (process.returncode, err) == (0, "")
    end = time.monotonic() + 2
    while Path(f"/proc/{out.strip()}").exists() and not is_zombie(out.strip()):
        assert time.monotonic() < end
        time.sleep(0.02)


def is_zombie(pid: str) -> bool:
    """Of an orphan, where nobody buries it."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "Z"


def test_a_rank_that_is_alone_is_not_watched() -> None:
    code = "from aladdin_mpi.process import startup; startup.begin(); print(startup._watched)"
    env = {name: text for name, text in os.environ.items() if not name.startswith("OMPI_")}
    out = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT, text=True)
    assert out.strip() == "None"


# -- refused before anything slow -----------------------------------------------------------
def imported(done: Completed) -> set[str]:
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}


@needs("openmpi")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--servers", "3", "--optimizer", "adamw"],
            "--servers: expected at most as many servers as workers",
        ),
        (["--algorithm", "sgd"], "--algorithm: expected one of"),
        (["--slowdown", "7=2"], "--slowdown: expected workers from 0 to 2, got worker 7"),
        (["--wire", "int9"], "--wire"),
    ],
)
def test_what_the_options_alone_refuse_waits_for_nothing(options: list[str], words: str) -> None:
    args = ["-X", "importtime", "-m", "aladdin_mpi.train", *options]
    done = run_ranks(4, args, is_warm=False, check=False)
    assert words in refusal(done)
    assert "aladdin_mpi.run.early" in imported(done)
    assert "torch._C" not in imported(done)


def test_a_limit_is_known_before_the_options_are_read() -> None:
    assert startup.typed_limit(["--epochs", "2", "--timeout", "9"]) == 9
    assert startup.typed_limit(["--timeout=7.5", "--quiet"]) == 7.5
    for words in ["--timeout"], ["--timeout", "soon"], ["--worker-timeout", "3"], []:
        assert startup.typed_limit(words) is None
