"""Simulation from the command line: results depend only on the seed, not on the machine's load."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from aladdin_mpi.options.run import SimulateOptions, parse
from tests.commands import metrics, refusal, simulate, summary
from tests.messages import check_names
from tests.pasted import check

PLAN = ["--workers", 4, "--hosts", 2, "--samples", 1600, "--batch-size", 16, "--jitter", 0.2]
PLAN += ["--delay-us", 300, "--log-every", 200, "--eval-every", 0.4]


@contextmanager
def a_busy_machine() -> Iterator[None]:
    spin = "import os; os.nice(5)\nwhile True: pass"  # other tests run at the same time
    loads = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(2)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def results(run_dir: Path) -> list[bytes]:
    names = ("metrics.jsonl", "model.pt", "summary.json")
    return [(run_dir / name).read_bytes() for name in names]


def test_model_is_written_for_torch_distributed_checkpoint(tmp_path: Path) -> None:
    options = ["--samples", 320, "--quiet", "--model-format"]
    for form in ("pt", "dcp"):
        simulate(tmp_path / form, *options, form)
    for _ in range(2):  # the second replaces the folder
        completed = simulate(tmp_path / "dcp", *options, "dcp", "--overwrite")
        assert not completed.stderr
    whole = torch.load(tmp_path / "pt" / "model.pt")
    state = {name: torch.zeros_like(each) for name, each in whole.items()}
    load(state, checkpoint_id=tmp_path / "dcp" / "model", no_dist=True)
    assert all(torch.equal(whole[name], each) for name, each in state.items())
    completed = simulate(tmp_path / "dcp", *options, "pt", check=False)
    check_names(refusal(completed), "--run-dir", "model")


@pytest.mark.long
def test_simulation_is_deterministic_for_a_seed(tmp_path: Path) -> None:
    simulate(tmp_path / "a", *PLAN)
    with a_busy_machine():
        simulate(tmp_path / "b", *PLAN, "--quiet", env={"PYTHONHASHSEED": "1"}, is_warm=False)
    assert results(tmp_path / "a") == results(tmp_path / "b")
    simulate(tmp_path / "c", *PLAN, "--seed", 1)
    different = zip(results(tmp_path / "a"), results(tmp_path / "c"), strict=True)
    assert all(one != other for one, other in different)


def test_config_begins_with_a_command_that_repeats_the_run(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    simulate(run, *PLAN, "--quiet", env={"SLURM_PROCID": "0", "SLURM_NTASKS": "8"})
    first = (run / "config.toml").read_text().splitlines()[0]
    assert first.startswith(f"# python -m aladdin_mpi.simulate --run-dir '{run}' --workers 4 ")
    check(first.removeprefix("# "), tmp_path)


def test_simulation_merges_cluster_file_and_command_line(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("hosts = 3\nbandwidth-gbit = 0.1\nlatency-us = 20\n")
    (tmp_path / "run.toml").write_text(
        "workers = 6\nmodel = 'size:4'\nsamples = 960\ncompute = 'timed'\ncompute-time = 0.05\n"
        "servers = 2\n"
    )
    files = ["--config", tmp_path / "run.toml", "--cluster", tmp_path / "cluster.toml"]
    simulate(tmp_path / "slow", *files)
    simulate(tmp_path / "fast", *files, "--bandwidth-gbit", 10)
    slow, fast = summary(tmp_path / "slow"), summary(tmp_path / "fast")
    options = parse(SimulateOptions, ["--config", str(tmp_path / "fast/config.toml")], "test", "")
    assert (options.cluster.hosts, options.cluster.bandwidth_gbit) == (3, 10)
    assert (slow["workers"], slow["servers"], slow["samples"]) == (6, 2, 960)
    # 30 steps of 0.05 s on 6 workers; the fast network adds almost nothing.
    assert 0.25 <= fast["seconds"] < 0.3
    assert slow["seconds"] > 2 * fast["seconds"]


def test_cluster_file_describes_unequal_hosts(tmp_path: Path) -> None:
    """Includes computing; a slow link delays its worker, and the command line takes precedence."""
    (tmp_path / "cluster.toml").write_text(
        "hosts = 4\nworkers = 4\nplacement = 'workers'\nbandwidth-gbit = 10\ncompute-time = 0.05\n"
        "backward-shape = [[0.9, 0.1]]\n[links]\n3 = 0.2\n"
    )
    words = ["--algorithm", "bsp", "--compute", "timed", "--model", "size:4", "--samples", 1280]
    words += ["--cluster", tmp_path / "cluster.toml"]
    simulate(tmp_path / "slow", *words)
    simulate(tmp_path / "equal", *words, "--links", "none")
    slow, equal = (summary(tmp_path / name) for name in ("slow", "equal"))
    # A round: 4 MB to host 3 and back at 0.2 Gbit/s.
    assert slow["seconds"] - equal["seconds"] == pytest.approx(10 * 2 * 0.16, rel=0.2)
    assert (slow["workers"], slow["samples"]) == (4, 1280)


def test_timed_simulation_measures_throughput_without_model(tmp_path: Path) -> None:
    options = ["--model", "resnet50", "--compute", "timed", "--compute-time", 0.2]
    options += ["--samples", 6400, "--workers", 64, "--servers", 8, "--hosts", 16]
    options += ["--bandwidth-gbit", 100]
    completed = simulate(tmp_path / "run", *options, "--dataset", "synthetic:3x224x224:1000:6400")
    run_summary = summary(tmp_path / "run")
    assert run_summary["parameters"] == 25_557_032
    assert run_summary["test_accuracy"] is None
    assert run_summary["gradients_computed"] == run_summary["gradients_applied"] == 200
    assert run_summary["bytes_sent_per_step"] == pytest.approx(
        25_557_032 * (1 + 4 / 256), rel=0.01
    )  # in 8 bits, with one scale per block
    assert not (tmp_path / "run" / "model.pt").exists()
    assert metrics(tmp_path / "run", "eval") == []
    assert "test accuracy" not in completed.stdout


def test_simulation_prints_progress_and_table(tmp_path: Path) -> None:
    completed = simulate(tmp_path / "run", *PLAN, "--slowdown", "0=4", "1=2")
    percents = [int(p) for p in re.findall(r"^ *(\d+) %  ", completed.stderr, re.M)]
    assert len(percents) >= 4
    assert percents == sorted(percents)
    assert percents[-1] == 100
    assert str(tmp_path / "run") in completed.stdout
    assert re.search(r"engine +virtual\n", completed.stdout)
    assert not re.findall(r"[^\n\x20-\x7e]", completed.stdout + completed.stderr)


def test_simulation_warns_of_failures_after_its_end(tmp_path: Path) -> None:
    timed = ["--compute", "timed", "--model", "size:1", "--workers", 3, "--steps", 5, "--quiet"]
    completed = simulate(tmp_path / "run", *timed, "--failures", "2=0.2,1=500")
    assert "rank 2 (host 0) has failed" in completed.stderr
    assert re.search(r"warning: --failures 1=500: .*\n", completed.stderr)


def test_simulation_in_which_every_rank_fails_is_an_error(tmp_path: Path) -> None:
    every = ["--failures", "0=0,1=0,2=0", "--workers", 2, "--samples", 64]
    completed = simulate(tmp_path / "run", *every, check=False)
    check_names(refusal(completed), "--failures", "all 3 ranks")
