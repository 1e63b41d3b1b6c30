"""Settings of Open MPI before it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aladdin_mpi.transport.mpi import library
from aladdin_mpi.transport.mpi.library import TCP_FLAGS, TRANSPORTS
from benchmarks.lab import Lab
from tests import launch
from tests.launch import ROOT, needs, run_ranks

REASON = Lab.available()
SHOW = {"OMPI_MCA_mpi_show_mca_params": "all"}
START = ["-c", "import aladdin_mpi.transport.mpi.engine"]

LATE_ANSWER = """
import json, time
import torch
from aladdin_mpi.transport.mpi.engine import MpiTransport

LONG, LATE = 8_000_000, 0.1
transport = MpiTransport(timeout=60)
peer, mine = 1 - transport.rank, torch.zeros(LONG, dtype=torch.uint8)
seconds = []
for both in (False, True):
    sends = both or transport.rank == 0
    takes = both or transport.rank == 1
    transport.wait(transport.ibarrier())
    start = time.perf_counter()
    requests = [transport.irecv(torch.empty_like(mine), peer, 1)] if takes else []
    transport.sleep(LATE * transport.rank)
    requests += [transport.isend(mine, peer, 1)] if sends else []
    transport.wait(*requests)
    transport.wait(transport.ibarrier())
    seconds.append(time.perf_counter() - start)
if transport.rank == 0:
    print(json.dumps(seconds))
transport.close()
"""
"""Seconds for a long message, and for it and another in the opposite direction, 0.1 s later."""


def flags(output: str) -> list[str]:
    (line,) = (each for each in output.splitlines() if "btl_tcp_flags=" in each)
    return line.partition("=")[2].split()[0].split(",")


@pytest.mark.long
@needs("openmpi")
def test_openmpi_sends_long_tcp_messages_in_pieces() -> None:
    done = run_ranks(1, START, env=SHOW)
    assert "send" in flags(done.stdout + done.stderr)
    assert "put" not in flags(done.stdout + done.stderr)


@pytest.mark.long
@needs("openmpi")
def test_openmpi_keeps_user_setting_of_environment() -> None:
    done = run_ranks(1, START, env={**SHOW, TCP_FLAGS: "send,put"})
    assert flags(done.stdout + done.stderr) == ["send", "put"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(REASON is not None, reason=REASON or "")
def test_openmpi_uses_link_in_both_directions_concurrently() -> None:
    found = []
    with Lab(hosts=2, rate_gbit=0.1) as lab:
        for _ in range(3):
            done = lab.run(2, ["-c", LATE_ANSWER], timeout=60)
            assert done.returncode == 0, done.stderr
            one, both = json.loads(done.stdout)
            found.append((one, both))
            if both < 1.6 * one:  # in sequence, they take twice as long
                return
    pytest.fail(f"seconds of one message, and of one in each direction: {found}")


LISTENING = """
import os, time
from pathlib import Path
from aladdin_mpi.transport.mpi.engine import MpiTransport

transport = MpiTransport(timeout=60)
transport.wait(transport.ibarrier())
mine = {os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()}
rows = [row.split() for name in ("tcp", "tcp6") for row in open(f"/proc/self/net/{name}")]
listens = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
print(f"listening: {listens}", flush=True)
transport.close()
"""


@pytest.mark.long
@needs("openmpi")
@pytest.mark.parametrize(
    "mpirun",
    [
        pytest.param([], id="plain", marks=pytest.mark.long),
        pytest.param(["--with-ft", "ulfm"], id="ulfm"),
    ],
)
def test_openmpi_ranks_on_one_host_open_no_listening_socket(
    mpirun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = launch.environment("openmpi", {})
    del env[TRANSPORTS]
    monkeypatch.setattr(launch, "environment", lambda mpi, extra: env)
    done = run_ranks(2, ["-c", LISTENING], mpirun=mpirun)
    assert done.stdout.count("listening: []") == 2, done


@pytest.mark.long
@needs("openmpi")
def test_openmpi_keeps_transports_chosen_by_user() -> None:
    done = run_ranks(2, ["-c", LISTENING], env={library.TRANSPORTS: "^ofi"})
    assert done.stdout.count("listening: ['00000000:") == 2, done


SEVERAL = """
from aladdin_mpi.transport.mpi import world
from aladdin_mpi.transport.mpi.engine import MpiTransport
from mpi4py import MPI

seconds, world.LEAVE_SECONDS = world.LEAVE_SECONDS, 1000.0
for run in range(3):
    MpiTransport(timeout=60).close()
    assert MPI.COMM_WORLD.allreduce(run) == 2 * run
world.LEAVE_SECONDS = seconds
print("continued", flush=True)
"""


@pytest.mark.long
@needs("openmpi")
def test_ranks_under_ulfm_continue_together_after_a_run() -> None:
    """Rank 0 waits for the other ranks at its process's exit, not at the end of a run."""
    done = run_ranks(2, ["-c", SEVERAL], mpirun=["--with-ft", "ulfm"])
    assert done.stdout.count("continued") == 2, done


def test_openmpi_keeps_setting_of_user_file(tmp_path: Path) -> None:
    folder = tmp_path / ".openmpi"
    folder.mkdir()
    code = f"import os, aladdin_mpi.transport.mpi.library; print(os.environ.get('{TRANSPORTS}'))"
    env = {"HOME": str(tmp_path), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    for text, wanted in ("# btl = tcp\n", library.WITHOUT_NETWORK), (" btl = self,tcp\n", "None"):
        (folder / "mca-params.conf").write_text(text)
        found = subprocess.check_output([sys.executable, "-c", code], env=env, cwd=ROOT, text=True)
        assert found.strip() == wanted
