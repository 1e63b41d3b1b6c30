"""Jobs that end early: signals, time limits, scancel, and the failure of a node."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from aladdin_mpi.hooks.checkpoints import MANIFEST
from benchmarks import netns
from tests.commands import checkpoint, metrics, rises, summary
from tests.launch import ROOT
from tests.slurm.batch import GPU_NODES, TIMED, BatchJob, submit
from tests.slurm_cluster import SlurmCluster

SCRIPT = ROOT / "tests" / "run" / "programs" / "commanded.py"
SAMPLES = 8000
LENGTH = (*TIMED, "--samples", SAMPLES, "--log-every", 320)
TWO_NODES = (*GPU_NODES, "--nodes=2")
IS_RANK = re.compile(rb"(?!.*--hostfile).*-m\0aladdin_mpi\.train", re.DOTALL)


def started(job: BatchJob, run_dir: Path) -> None:
    """Wait until the job trains."""
    job.until(lambda: (run_dir / "metrics.jsonl").exists() and bool(metrics(run_dir, "train")))


def wait_for_checkpoint(job: BatchJob, run_dir: Path) -> None:
    """Wait until the run has a complete checkpoint."""
    job.until(lambda: any((run_dir / "checkpoint").glob("samples-*")))


def check_continuous(run_dir: Path, samples: int) -> None:
    """Check that the run's results equal those of an uninterrupted run."""
    run_summary = summary(run_dir)
    assert run_summary["samples"] == samples
    assert run_summary["gradients_computed"] == run_summary["gradients_applied"]
    lines = metrics(run_dir, "train")
    assert rises(lines)
    assert lines[-1]["samples"] == samples


def check_last_checkpoint(run_dir: Path) -> None:
    """Check that the parts of the last checkpoint have the lengths in its manifest."""
    folder = checkpoint(run_dir)
    parts = json.loads((folder / MANIFEST).read_text())["parts"]
    assert [(folder / part["file"]).stat().st_size for part in parts] == [
        part["bytes"] for part in parts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.long)])
def test_signal_saves_job_which_resumes(cluster: SlurmCluster, launcher: str) -> None:
    run_dir = cluster.shared / f"stopped-{launcher}"
    words = [*LENGTH, "--run-dir", run_dir]
    job = submit(cluster, "train.sbatch", TWO_NODES, words, {"LAUNCHER": launcher})
    started(job, run_dir)
    cluster.run("scancel", "--signal=USR2", "--batch", job.number)
    assert job.wait() == "COMPLETED", job.output()
    assert "stopped by SIGUSR2" in job.output()
    assert f"job {job.number}, start 2:" in job.output()
    check_continuous(run_dir, SAMPLES)


@pytest.mark.long
@pytest.mark.slow
def test_signal_saves_job_of_a_script_which_resumes(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "script"
    options = ["--algorithm", "easgd", "--device", "cpu", "--samples", 4000, "--log-every", 320]
    words = [SCRIPT, *options, "--run-dir", run_dir, "--", "--pause", 0.05, "--width", 5]
    job = submit(cluster, "train.sbatch", TWO_NODES, words)
    started(job, run_dir)
    cluster.run("scancel", "--signal=USR2", "--batch", job.number)
    assert job.wait() == "COMPLETED", job.output()
    assert f"job {job.number}, start 2:" in job.output()
    assert "trained easgd, epochs None, samples 4000, easgd 3 auto, width 5" in job.output()
    check_continuous(run_dir, 4000)


@pytest.mark.long
def test_script_with_other_servers_than_placed_is_refused(cluster: SlurmCluster) -> None:
    job = submit(cluster, "train.sbatch", TWO_NODES, [SCRIPT, "--", "--servers", 2])
    assert job.wait() == "FAILED", job.output()
    assert "with 2 servers and 3 workers, but the job was started for 4 workers" in job.output()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_job_resumes_after_time_limit(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "limit"
    words = [*TIMED, "--samples", 400_000, "--log-every", 3200, "--run-dir", run_dir]
    options = [*TWO_NODES, "--time=2", "--signal=B:USR2@30"]
    job = submit(cluster, "train.sbatch", options, words)
    assert job.wait(timeout=550) == "COMPLETED", job.output()
    assert "SIGUSR2" in job.output()
    check_continuous(run_dir, 400_000)


def test_job_without_summary_fails(cluster: SlurmCluster) -> None:
    """As Open MPI's mpirun ends if it has lost a host."""
    run_dir = cluster.shared / "no-summary"
    launcher = cluster.shared / "mpirun"
    launcher.write_text("#!/bin/sh\nexit 0\n")
    launcher.chmod(0o755)
    env = {"LAUNCHER": "mpirun", "PATH": f"{cluster.shared}:{os.environ['PATH']}"}
    job = submit(cluster, "train.sbatch", TWO_NODES, [*LENGTH, "--run-dir", run_dir], env)
    assert job.wait() == "FAILED", job.output()
    assert re.search(rf"\bsummary\.json\b.*--run-dir {run_dir} ", job.output())


@pytest.mark.long
@pytest.mark.slow
def test_scancel_keeps_last_checkpoint(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "cancelled"
    words = [*LENGTH[:-4], "--samples", 200_000, "--log-every", 320, "--checkpoint-every", "1s"]
    job = submit(cluster, "train.sbatch", TWO_NODES, [*words, "--run-dir", run_dir])
    wait_for_checkpoint(job, run_dir)
    cluster.run("scancel", job.number)
    assert job.wait() == "CANCELLED"
    assert "aladdin_mpi: stopped by SIGTERM" in job.output()
    check_last_checkpoint(run_dir)


@pytest.mark.long
def test_job_resumes_from_last_checkpoint_after_node_failure(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "failed"
    words = [*LENGTH, "--checkpoint-every", "1s", "--run-dir", run_dir]
    job = submit(cluster, "train.sbatch", TWO_NODES, words)
    wait_for_checkpoint(job, run_dir)
    node = cluster.hosts[-1]
    cluster.kill_node(node)
    job.until(lambda: job.states() == {"PENDING"})
    check_last_checkpoint(run_dir)
    cluster.revive_node(node)
    assert job.wait() == "COMPLETED", job.output()
    assert f"job {job.number}, start 2:" in job.output()
    check_continuous(run_dir, SAMPLES)


def ranks_on(node: str) -> list[int]:
    """Return the processes of the ranks on a node, grouped by rank."""
    lines = {pid: Path(f"/proc/{pid}/cmdline") for pid in netns.processes([node])}
    return [
        pid for pid, line in lines.items() if line.exists() and IS_RANK.match(line.read_bytes())
    ]


@pytest.mark.long
def test_failed_run_restarts_inside_its_job(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "restarted"
    words = [*LENGTH, "--checkpoint-every", "1s", "--run-dir", run_dir]
    env = {"RESTARTS": "1", "SPARE_NODES": "1"}
    job = submit(cluster, "train.sbatch", [*TWO_NODES, "--no-kill"], words, env)
    wait_for_checkpoint(job, run_dir)
    first, spare = cluster.hosts[-2:]
    assert ranks_on(first) and not ranks_on(spare)
    os.kill(max(ranks_on(first)), signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.output()
    assert "restart 1 of 1 " in job.output()
    assert f"job {job.number}, start 2:" not in job.output(), "it was not requeued"
    check_continuous(run_dir, SAMPLES)


@pytest.mark.long
def test_surviving_ranks_continue_under_mpirun(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "survived"
    words = [*LENGTH, "--run-dir", run_dir]
    job = submit(cluster, "train.sbatch", TWO_NODES, words, {"LAUNCHER": "mpirun"})
    started(job, run_dir)
    os.kill(max(ranks_on(cluster.hosts[-1])), signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.output()
    assert "with 3 workers" in job.output()
    (failure,) = summary(run_dir)["failures"]
    assert failure["what"] == "died"
    assert summary(run_dir)["samples"] == SAMPLES


@pytest.mark.long
def test_spare_rank_replaces_rank_0(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "spare"
    words = [*LENGTH, "--run-dir", run_dir]
    env = {"LAUNCHER": "mpirun", "SPARES": "1"}
    job = submit(cluster, "train.sbatch", TWO_NODES, words, env)
    started(job, run_dir)
    os.kill(min(ranks_on(cluster.hosts[-2])), signal.SIGKILL)
    assert job.wait() == "COMPLETED", job.output()
    assert "with 4 workers and 1 server " in job.output()
    run_summary = summary(run_dir)
    (failure,) = run_summary["failures"]
    assert (failure["rank"], failure["what"]) == (0, "died")
    assert (run_summary["workers"], run_summary["samples"]) == (4, SAMPLES)
    assert rises(metrics(run_dir, "train"))


@pytest.mark.long
def test_restart_excludes_failed_node(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "fewer"
    words = [*LENGTH, "--checkpoint-every", "1s", "--run-dir", run_dir]
    job = submit(cluster, "train.sbatch", [*TWO_NODES, "--no-kill"], words, {"RESTARTS": "2"})
    wait_for_checkpoint(job, run_dir)
    lost = cluster.hosts[-1]
    cluster.kill_node(lost)
    try:
        assert job.wait() == "COMPLETED", job.output()
    finally:
        cluster.revive_node(lost)
    assert f"node {lost} " in job.output()
    assert summary(run_dir)["samples"] == SAMPLES
    assert rises(metrics(run_dir, "train"))


@pytest.mark.long
def test_run_continues_with_a_node_that_returns(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "returned"
    words = [*TIMED, "--samples", 5 * SAMPLES, "--log-every", 320, "--checkpoint-every", "1s"]
    env = {"RESTARTS": "1", "RECLAIM": "yes", "NODE_CHECK": "1"}
    options = [*TWO_NODES, "--no-kill"]
    job = submit(cluster, "train.sbatch", options, [*words, "--run-dir", run_dir], env)
    wait_for_checkpoint(job, run_dir)
    lost = cluster.hosts[-1]
    cluster.kill_node(lost)
    try:
        job.until(lambda: "restart 1 of 1 " in job.output())
    finally:
        cluster.revive_node(lost)
    assert job.wait() == "COMPLETED", job.output()
    assert f"{lost}: free again" in job.output()
    assert f"job {job.number}, start 2:" in job.output()
    assert (summary(run_dir)["workers"], summary(run_dir)["samples"]) == (4, 5 * SAMPLES)
    assert rises(metrics(run_dir, "train"))


@pytest.mark.long
def test_job_joins_the_run_of_another(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "joined"
    words = [*LENGTH, "--samples", 5 * SAMPLES, "--run-dir", run_dir]
    one_node = [*GPU_NODES, "--nodes=1"]
    first = submit(cluster, "train.sbatch", one_node, words)
    started(first, run_dir)
    env = {"WORKERS_PER_NODE": "4"}
    second = submit(cluster, "train.sbatch", one_node, ["--join", run_dir], env)
    assert first.wait() == "COMPLETED", first.output()
    assert "another job continues the run" in first.output()
    assert second.wait() == "COMPLETED", second.output()
    assert (summary(run_dir)["workers"], summary(run_dir)["samples"]) == (4, 5 * SAMPLES)


def test_invalid_options_do_not_restart(cluster: SlurmCluster) -> None:
    env = {"RESTARTS": "3"}
    job = submit(cluster, "train.sbatch", TWO_NODES, ["--algorithm", "none-such"], env)
    assert job.wait() == "FAILED", job.output()
    assert "restart" not in job.output()
