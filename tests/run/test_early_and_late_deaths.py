"""Ranks that die before the first step, or after the last, keep nobody from the results."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate
from tests.commands import refusal, summary
from tests.launch import ROOT, Completed, needs, run_ranks

ULFM = ["--with-ft", "ulfm"]

HEAD = """
import os, signal, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)
kill = lambda pid: os.kill(pid, signal.SIGKILL)

def evaluate(module):
    if AT_END:
        kill(int(Path("pid").read_text()))
        time.sleep(2)
    return {"figure": 1.0}

run = DataParallel(
    model, algorithm=ALGORITHM, samples=320, batch_size=8, eval_every=0, evaluate=evaluate,
    run_dir="run", quiet=True,
)
if run.transport.rank in KILLED:
    Path("pid").write_text(str(os.getpid()))
    if not AT_END:
        kill(os.getpid())
for inputs, _ in run.batches(data):
    loss = model(inputs).square().mean()
    loss.backward()
    run.step(loss)
"""


def run_script(
    folder: Path, algorithm: str, killed: list[int], at_end: bool, check: bool = True
) -> Completed:
    head = f"ALGORITHM, KILLED, AT_END = {algorithm!r}, {killed}, {at_end}\n"
    (folder / "script.py").write_text(head + HEAD)
    env = {"PYTHONPATH": str(ROOT)}
    args = [str(folder / "script.py")]
    return run_ranks(3, args, env=env, cwd=folder, mpirun=ULFM, timeout=60, check=check)


@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "killed"), [("asp", 1), ("sgp", 2)])
def test_who_dies_before_training_is_done_without(
    tmp_path: Path, algorithm: str, killed: int
) -> None:
    """Also the first worker, whose data are those that all others have to have."""
    done = run_script(tmp_path, algorithm, [killed], at_end=False)
    found = summary(tmp_path / "run")
    assert [(each["rank"], each["what"]) for each in found["failures"]] == [(killed, "died")]
    assert found["samples"] == 320 and found["samples_lost"] == 0
    assert f"rank {killed} (host " in done.stderr and "at sample 0; training goes on" in done.stderr


@needs("openmpi")
def test_where_every_worker_dies_before_training(tmp_path: Path) -> None:
    done = run_script(tmp_path, "asp", [1, 2], at_end=False, check=False)
    assert "every worker has failed before the training began" in refusal(done)


@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["asp", "ar-sgd"])
def test_who_dies_behind_the_last_sample_is_in_the_summary(tmp_path: Path, algorithm: str) -> None:
    """And nothing goes on, so nothing is said to; nobody is needed any more."""
    done = run_script(tmp_path, algorithm, [2], at_end=True)
    found = summary(tmp_path / "run")
    assert [(each["rank"], each["what"]) for each in found["failures"]] == [(2, "died")]
    assert found["samples_lost"] == 0 and found["figure"] == 1.0
    assert "training goes on" not in done.stderr
    assert "at sample 320; every sample had been drawn, and the run ends without it" in done.stderr


@pytest.mark.parametrize("algorithm", ["aladdin", "bsp", "gosgd", "sgp"])
def test_who_dies_before_training_in_virtual_time(tmp_path: Path, algorithm: str) -> None:
    killed = 1 if algorithm in ("aladdin", "bsp") else 2
    words = ["--algorithm", algorithm, "--workers", 3, "--samples", 320, "--quiet"]
    words += ["--run-dir", tmp_path / "run", "--deaths", f"{killed}=0.00001"]
    found = simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))
    assert [each["rank"] for each in found["failures"]] == [killed]
    assert found["samples"] == 320 and found["samples_lost"] == 0
    assert found["gradients_computed"] == found["gradients_applied"]


def test_in_virtual_time_who_died_takes_part_again_where_the_run_goes_on(tmp_path: Path) -> None:
    """As over MPI, also where the rank was needed: its death was before that moment."""
    plan = ["--workers", 3, "--servers", 2, "--quiet", "--checkpoint-every", 160]
    words = [*plan, "--run-dir", tmp_path / "run", "--samples", 640, "--deaths", "0=1.3", "3=1.2"]
    first = simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))
    assert (first["workers"], first["servers"], len(first["failures"])) == (2, 1, 2)
    words = ["--resume", tmp_path / "run", "--samples", 960]
    found = simulate(parse(SimulateOptions, list(map(str, words)), "simulate", ""))
    assert (found["workers"], found["servers"], found["samples"]) == (3, 2, 960)
    assert [each["rank"] for each in found["failures"]] == [
        each["rank"] for each in first["failures"]
    ]
