"""Every batch script, submitted to a real Slurm, with CPUs in place of GPUs."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from aladdin_mpi.probing.cluster_file import check
from tests.commands import EPOCH, summary
from tests.slurm.batch import GPU_NODES, SCRIPTS, TIMED, submit, submit_array
from tests.slurm_cluster import SlurmCluster

DIGITS = ("--epochs", 4, "--device", "cpu")
TRAINED = 0.5
"""Minimum accuracy; chance is 0.1. The age of gradients depends on what else uses the cores."""


def ranks(output: str) -> list[list[str]]:
    """Return rank, host, role and cores, as the program prints them at its start."""
    lines = [line.split() for line in output.splitlines() if line.startswith("rank ")]
    return [[words[1], words[2].rpartition("-")[2], words[3], words[-1]] for words in lines]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["srun", pytest.param("mpirun", marks=pytest.mark.long)])
def test_train_script_binds_workers_on_two_nodes(
    cluster: SlurmCluster, tmp_path: Path, launcher: str
) -> None:
    core = str(min(os.sched_getaffinity(0)))
    scripts = shutil.copytree(SCRIPTS, tmp_path / "slurm")
    (scripts / "sites" / "mine.sh").write_text(
        f"LAUNCHER={launcher}\nSITE_CORES=({core})\nexport PMIX_MCA_psec=native\n"
    )
    env = {"ALADDIN_SLURM": str(scripts), "ALADDIN_SITE": "mine"}
    job = submit(cluster, "train.sbatch", [*GPU_NODES, "--nodes=2"], DIGITS, env)
    assert job.wait() == "COMPLETED", job.output()
    told = ranks(job.output())
    assert [line[:3] for line in told] == [
        ["0", "n1", "server"],
        ["1", "n1", "worker"],
        ["2", "n1", "worker"],
        ["3", "n2", "worker"],
        ["4", "n2", "worker"],
    ]
    assert {line[3] for line in told[1:]} == {core}
    run_summary = summary(cluster.shared / "runs" / f"aladdin-{job.number}")
    assert (run_summary["workers"], run_summary["samples"]) == (4, 4 * EPOCH)
    assert run_summary["test_accuracy"] > TRAINED


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpirun", pytest.param("srun", marks=pytest.mark.long)])
def test_train_script_spreads_servers_over_nodes(cluster: SlurmCluster, launcher: str) -> None:
    env = {"SPREAD_SERVERS": "yes", "LAUNCHER": launcher}
    nodes = [*GPU_NODES, "--nodes=2"]
    job = submit(cluster, "train.sbatch", nodes, ["--servers", 3, *TIMED, "--samples", 640], env)
    assert job.wait() == "COMPLETED", job.output()
    told = [line[1:3] for line in ranks(job.output())]
    assert told == [
        ["n1", "server"],
        ["n2", "server"],
        ["n1", "server"],
        *[[node, "worker"] for node in ("n1", "n1", "n2", "n2")],
    ]


@pytest.mark.long
@pytest.mark.slow
def test_train_script_places_spare_ranks_last(cluster: SlurmCluster) -> None:
    env = {"SPARES": "3", "LAUNCHER": "mpirun"}
    words = ["--run-dir", (run_dir := cluster.shared / "spared"), *TIMED, "--samples", 640]
    job = submit(cluster, "train.sbatch", [*GPU_NODES, "--nodes=2"], words, env)
    assert job.wait() == "COMPLETED", job.output()
    first, last = cluster.hosts[1:]
    places = rf"\b8 ranks\b.*\b1\b.*\b3\b.* {first}:4 {last}:4\b"
    assert re.search(places, job.output())
    assert [line[:3] for line in ranks(job.output())] == [
        ["0", "n1", "server"],
        *[[str(rank), node, "worker"] for rank, node in enumerate(("n1", "n1", "n2", "n2"), 1)],
        *[[str(rank), node, "spare"] for rank, node in enumerate(("n2", "n1", "n2"), 5)],
    ]
    run_summary = summary(run_dir)
    assert (run_summary["servers"], run_summary["workers"]) == (1, 4)


@pytest.mark.long
@pytest.mark.slow
def test_hetjob_script_separates_servers_and_workers(cluster: SlurmCluster) -> None:
    run_dir = cluster.shared / "het"
    options = ["-p", "cpu", "--ntasks=2", "--cpus-per-task=1", ":", *GPU_NODES, "--nodes=2"]
    job = submit(cluster, "hetjob.sbatch", options, [*DIGITS, "--run-dir", run_dir])
    assert job.wait() == "COMPLETED", job.output()
    assert [line[:3] for line in ranks(job.output())] == [
        ["0", "n0", "server"],
        ["1", "n0", "server"],
        ["2", "n1", "worker"],
        ["3", "n1", "worker"],
        ["4", "n2", "worker"],
        ["5", "n2", "worker"],
    ]
    run_summary = summary(run_dir)
    assert (run_summary["servers"], run_summary["workers"]) == (2, 4)
    assert run_summary["test_accuracy"] > TRAINED


@pytest.mark.long
@pytest.mark.slow
def test_array_ends_in_one_report_after_stopped_task(cluster: SlurmCluster) -> None:
    out = cluster.shared / "comparison"
    env = {"ALGORITHMS": "aladdin ar-sgd", "SEEDS": "3", "OUT": str(out)}
    words = [*TIMED, "--samples", 6000, "--log-every", 320]
    job = submit_array(cluster, GPU_NODES, words, env)
    metrics = out / "runs" / "ar-sgd" / "seed-3" / "metrics.jsonl"
    job.until(lambda: metrics.exists() and metrics.stat().st_size > 0)
    cluster.run("scancel", "--signal=USR2", "--batch", f"{job.number}_1")
    assert job.wait() == "COMPLETED", job.output(1)
    assert re.search(rf"\brequeueing job {job.number}_1\b", job.output(1))
    report = (out / "report" / "report.md").read_text()
    assert "aladdin" in report
    assert "ar-sgd" in report
    for algorithm in ("aladdin", "ar-sgd"):
        assert summary(out / "runs" / algorithm / "seed-3")["samples"] == 6000


@pytest.mark.long
@pytest.mark.slow
def test_scaling_script_writes_table_of_one_and_two_nodes(cluster: SlurmCluster) -> None:
    env = {"SAMPLES_PER_WORKER": "1600", "OUT": "table"}
    job = submit(cluster, "scaling.sbatch", [*GPU_NODES, "--nodes=2"], TIMED, env)
    assert job.wait() == "COMPLETED", job.output()
    lines = [line.split() for line in (cluster.shared / "table/scaling.txt").open()]
    assert [line[:3] for line in lines[1:]] == [["nodes-1", "2", "1"], ["nodes-2", "4", "1"]]
    assert float(lines[2][4]) > 1.0  # the speedup of twice the number of nodes
    assert lines[1][4:6] == ["1.00", "100.0"]


@pytest.mark.slow
def test_probe_script_measures_two_nodes(cluster: SlurmCluster) -> None:
    out = cluster.shared / "measured.toml"
    words = ["--seconds", 4, "--device", "cpu", "--out", out]
    job = submit(cluster, "probe.sbatch", [*GPU_NODES, "--nodes=2"], words)
    assert job.wait() == "COMPLETED", job.output()
    result = check(out.read_text(), "measured.toml")
    assert (result.workers, result.cluster.hosts, result.cluster.placement) == (4, 2, "workers")
    assert result.cluster.bandwidth_gbit > 0
    assert "-n1, ranks 0 to 1" in out.read_text()


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("script", "env", "words", "cause"),
    [
        ("train.sbatch", {"ALADDIN_SITE": "moon"}, [], r"ALADDIN_SITE: .*\bcsc "),
        ("train.sbatch", {"LAUNCHER": "ssh"}, [], "LAUNCHER: .*srun or mpirun.*'ssh'"),
        ("train.sbatch", {}, ["--algoritm", "bsp"], "--algoritm: "),
        ("train.sbatch", {"SPARES": "1"}, [], "SPARES=1: .*LAUNCHER=mpirun.*'srun'"),
        (
            "train.sbatch",
            {"SPARES": "1", "LAUNCHER": "mpirun", "SURVIVE": "no"},
            [],
            r"SPARES=1: .*SURVIVE=auto or yes.*\bno\b",
        ),
        ("train.sbatch", {"SPARES": "-1"}, [], "SPARES: .*'-1'"),
        ("train.sbatch", {}, ["--spares", 1], "--spares: "),
        ("compare.sbatch", {}, [], "ALGORITHMS: "),
        ("compare.sbatch", {"ALGORITHMS": "bsp asp"}, [], "--array=0-1"),
        ("probe.sbatch", {}, ["--nodes", 3], "--nodes: "),
        ("scaling.sbatch", {}, ["--epochs", 3], "--epochs: "),
        ("scaling.sbatch", {"RESTARTS": "1"}, [], "RESTARTS: "),
    ],
)
def test_batch_script_rejects_invalid_settings(
    cluster: SlurmCluster, script: str, env: dict[str, str], words: list[object], cause: str
) -> None:
    job = submit(cluster, script, [*GPU_NODES, "--nodes=1"], words, env)
    assert job.wait() == "FAILED"
    assert re.search(cause, job.output())
