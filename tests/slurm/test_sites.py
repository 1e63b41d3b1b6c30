"""Settings of the site profiles, read by a shell without a cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from aladdin_mpi.run.placement import cpulist
from tests.launch import ROOT
from tests.run.test_near_cores import MACHINES

SITES = sorted(path.stem for path in (ROOT / "slurm" / "sites").glob("*.sh"))
READ = """
set -euo pipefail
module() { :; }
. "$ALADDIN_SLURM/site.sh"
echo "$LAUNCHER $SRUN_MPI"
echo "${SITE_SRUN[*]}"
echo "${SITE_CORES[*]}"
echo "${MPICH_GPU_SUPPORT_ENABLED:-}"
"""


def read(site: str) -> list[str]:
    """Return launcher, MPI start method, options of srun, cores, and settings of Cray MPICH."""
    env = {
        "PATH": os.environ["PATH"],
        "USER": "me",
        "ALADDIN_SLURM": str(ROOT / "slurm"),
        "ALADDIN_SITE": site,
        "MPICH_GPU_SUPPORT_ENABLED": "1",  # as set by some modules
    }
    completed = subprocess.run(
        ["bash", "-c", READ], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    return completed.stdout.splitlines()


@pytest.mark.parametrize("site", SITES)
def test_site_gives_each_worker_its_own_cores(site: str) -> None:
    _, srun, cores, _ = read(site)
    lists = [cpulist(each) for each in cores.split()]
    assert all(lists)
    assert sum(map(len, lists)) == len({core for each in lists for core in each})
    # A task that srun has bound cannot be bound to other cores.
    assert "--cpu-bind=none" in srun or not lists


@pytest.mark.parametrize(
    ("site", "machine"), [("juwels_booster", "JUWELS Booster"), ("perlmutter", "Perlmutter")]
)
def test_site_cores_match_system_documentation(site: str, machine: str) -> None:
    assert read(site)[2].split() == list(MACHINES[machine][1].values())


@pytest.mark.parametrize("site", SITES)
def test_site_disables_gpu_support_of_cray_mpich(site: str) -> None:
    launch, *_, gpus = read(site)
    is_cray = launch == "srun cray_shasta"
    assert is_cray == (site in ("frontier", "lumi", "perlmutter"))
    assert gpus == ("0" if is_cray else "1")


@pytest.mark.parametrize("site", SITES)
def test_site_is_in_cluster_guide(site: str) -> None:
    assert f"\n| `{site}` | " in (ROOT / "docs" / "cluster.md").read_text()
    text = (ROOT / "slurm" / "sites" / f"{site}.sh").read_text()
    assert site == "generic" or "# Not tested " in text


def test_bind_script_binds_worker_to_cores_of_its_gpu(tmp_path: Path) -> None:
    """Two nodes of four GPUs; on the first, ranks 0 and 1 are servers."""
    (tmp_path / "taskset").write_text('#!/bin/sh\nshift\necho "$1"\n')
    (tmp_path / "taskset").chmod(0o755)
    cores = read("juwels_booster")[2]

    def bound(rank: int, place: int) -> str:
        env = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ALADDIN_CORES": cores,
            "ALADDIN_SERVERS": "2",
            "ALADDIN_WORKERS": "4",
            "ALADDIN_TRAINING": "10",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(place),
        }
        script = str(ROOT / "slurm" / "bind.sh")
        completed = subprocess.run(
            ["bash", script, "echo", "free"], env=env, capture_output=True, text=True, check=True
        )
        return completed.stdout.strip()

    first = [bound(rank, rank) for rank in range(6)]
    second = [bound(6 + place, place) for place in range(4)]
    assert bound(10, 4) == "free", "it waits"
    assert first == ["free", "free", *cores.split()]
    assert second == cores.split()
