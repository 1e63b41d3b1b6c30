"""The test cluster is started and removed by one command each, and removed without leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import netns
from tests import slurm_cluster
from tests.commands import running
from tests.launch import ROOT

NAME = f"slurmtest{os.getpid()}"
# Use another name than the command line's default, whose cluster may be in use.
COMMAND = f"import tests.slurm_cluster as s; s.NAME = {NAME!r}; raise SystemExit(s.main())"


@pytest.fixture(autouse=True)
def _removed() -> Iterator[None]:
    reason = slurm_cluster.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    yield
    slurm_cluster.down(NAME)


def command(*words: str, status: int = 0) -> str:
    completed = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert completed.returncode == status, repr(completed)
    return completed.stdout + completed.stderr


def remains() -> list[str]:
    return [str(pid) for pid in running(NAME)] + [
        str(path) for folder in (netns.STATE, netns.NAMESPACES) for path in folder.glob(f"{NAME}*")
    ]


@pytest.mark.long
def test_cluster_up_and_down_are_idempotent() -> None:
    assert "2 nodes are up" in command("up")
    assert "2 nodes are up" in command("up", "--nodes", "3")  # the existing cluster
    assert len(set(command("run", "srun", "-N2", "hostname").split())) == 2
    assert "removed" in command("down")
    assert remains() == []
    assert "nothing to remove" in command("down")
    assert "no cluster is up" in command("run", "sinfo", status=2)


@pytest.mark.long
def test_crashed_cluster_is_removed_and_restarted() -> None:
    command("up")
    command("run", "sbatch", "-o", "/dev/null", "--wrap", "sleep 100")
    (controller,) = [pid for pid in running(NAME) if b"slurmctld" in _name(pid)]
    os.kill(controller, signal.SIGKILL)
    assert "no cluster is up" in command("run", "sinfo", status=2)
    assert "2 nodes are up" in command("up")
    assert command("run", "squeue", "-h") == ""
    command("down")
    assert remains() == []


def test_cluster_rejects_five_nodes() -> None:
    assert "--nodes: expected 2 to 4, got 5" in command("up", "--nodes", "5", status=2)


def _name(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes()
    except OSError:
        return b""
