"""SIGUSR1 and SIGUSR2: the run is saved, ends with status 75 and is resumed by `--resume auto`."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.run import SimulateOptions, followed
from aladdin_mpi.options.settings import Setting, Settings
from aladdin_mpi.process import stop_signal
from aladdin_mpi.run.resumption import decide
from aladdin_mpi.run.run_folder import prepare
from tests import roles
from tests.commands import (
    EPOCH,
    TRAIN,
    checkpoint_part,
    metrics,
    rises,
    simulate,
    summary,
    train,
    training,
)
from tests.launch import Completed, needs, run_ranks

MODULE = """
import os, signal, time
from pathlib import Path
from torch import nn

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
# RANK:WHEN:SIGNAL, when being build, eval, or a step in training
STOP_RANK, STOP_WHEN, STOP_SIGNAL = os.environ.get("STOP", "::").split(":")


def reached(moment):
    if RANK == STOP_RANK and STOP_WHEN == str(moment):
        for _ in range(2):  # the second is not to change anything
            os.kill(os.getpid(), getattr(signal, STOP_SIGNAL))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.steps = 0

    def forward(self, x):
        if self.training:
            time.sleep(0.004)
            self.steps += 1
            reached(self.steps)
        else:
            reached("eval")
            time.sleep(float(os.environ.get("EVALUATION_SECONDS", "0")))
        return self.layer(x.flatten(1))


def build():
    reached("build")
    return Net()
"""

STOPPED = re.compile(
    r"^aladdin_mpi: stopped by (SIGUSR[12]) at sample (\d+) of (\d+); resume with: --resume (.*)$",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "stopping.py").write_text(MODULE)
    return folder


def stop_of(done: Completed, run_dir: Path, total: int) -> tuple[str, int]:
    """The signal and the sample that a job was stopped by and at, checked to be saved."""
    assert done.returncode == os.EX_TEMPFAIL == 75, repr(done)
    assert "Traceback" not in done.stderr, repr(done)
    ((name, sample, whole, folder),) = STOPPED.findall(done.stderr)
    assert (int(whole), folder) == (total, str(run_dir))
    assert not (run_dir / "summary.json").exists()
    assert checkpoint_part(run_dir, 0)["drawn"] == int(sample) < total
    return name, int(sample)


def check_end(run_dir: Path, total: int, log_every: int) -> None:
    """One run, as if it had never been stopped."""
    found = summary(run_dir)
    assert found["samples"] == total
    assert found["gradients_computed"] == found["gradients_applied"]
    lines = metrics(run_dir, "train")
    places = [0, *(line["samples"] for line in lines)]
    assert rises(lines) and rises(lines, "seconds")
    # A line comes with the first draw behind its place, and draws are ahead of steps.
    assert all(b - a < 2 * log_every for a, b in itertools.pairwise(places)), places
    assert places[-1] == total
    assert rises(metrics(run_dir, "eval"))


@needs("openmpi")
@pytest.mark.parametrize(
    ("algorithm", "ranks", "stops"),
    [
        # At the second server alone; at a worker.
        pytest.param(
            "aladdin --servers 2", 4, ["1:build:SIGUSR1", "3:20:SIGUSR2"], marks=pytest.mark.long
        ),
        # While checkpoints are written all the time.
        pytest.param(
            "bsp --checkpoint-every 64",
            3,
            ["1:20:SIGUSR2", "0:build:SIGUSR1"],
            marks=pytest.mark.long,
        ),
        pytest.param("ar-sgd", 2, ["0:8:SIGUSR2", "1:8:SIGUSR1"], marks=pytest.mark.long),
        pytest.param("gosgd", 2, ["1:8:SIGUSR1", "0:8:SIGUSR2"], marks=pytest.mark.long),
    ],
    ids=["aladdin", "bsp", "ar-sgd", "gosgd"],
)
def test_stopped_and_resumed_twice(
    tmp_path: Path, modules: Path, algorithm: str, ranks: int, stops: list[str]
) -> None:
    run_dir, total, log_every = tmp_path / "run", 3000, 300
    plan = ["--algorithm", *algorithm.split(), "--model", "stopping:build", "--samples", total]
    plan += ["--log-every", log_every, "--eval-every", 0.5, "--resume", "auto"]
    before = -1
    for stop in stops:
        _, when, expected = stop.split(":")
        env = {"STOP": stop}
        done = train(ranks, run_dir, *plan, modules=modules, env=env, check=False)
        name, sample = stop_of(done, run_dir, total)
        assert name == expected
        assert sample >= before if when == "build" else sample > before
        before = sample
    done = train(ranks, run_dir, *plan, modules=modules)
    check_end(run_dir, total, log_every)


@needs("openmpi")
def test_stopped_by_mpirun_during_an_evaluation(tmp_path: Path, modules: Path) -> None:
    """Nobody waits for the evaluation, and the resumed run makes up for it."""
    run_dir, total = tmp_path / "run", 4 * EPOCH
    plan = ["--model", "stopping:build", "--samples", total, "--log-every", 200]
    plan += ["--resume", "auto"]
    env = {"EVALUATION_SECONDS": "60"}
    with training(2, run_dir, *plan, modules=modules, env=env) as job:
        end = time.monotonic() + 60
        while not metrics_of(run_dir) or metrics_of(run_dir)[-1]["samples"] < EPOCH + 200:
            assert time.monotonic() < end and job.process.poll() is None, job.so_far()
            time.sleep(0.05)
        job.process.send_signal(signal.SIGUSR2)
        start = time.monotonic()
        name, sample = stop_of(job.wait(60), run_dir, total)
        assert time.monotonic() - start < 40
    assert (name, metrics(run_dir, "eval")) == ("SIGUSR2", [])
    train(2, run_dir, *plan, modules=modules)
    check_end(run_dir, total, 200)
    assert sample <= metrics(run_dir, "eval")[0]["samples"] < sample + 500


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []


@needs("openmpi")
def test_a_signal_after_the_last_sample_changes_nothing(tmp_path: Path, modules: Path) -> None:
    options = f"--algorithm ar-sgd --model stopping:build --samples 64 --run-dir {tmp_path / 'run'}"
    env = {**os.environ, "PYTHONPATH": str(modules), "STOP": "0:eval:SIGUSR1"}
    done = subprocess.run([sys.executable, *TRAIN, *options.split()], env=env, timeout=60)
    assert done.returncode == 0
    assert summary(tmp_path / "run")["samples"] == 64


OWN_LOOP = """
import os, signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
from aladdin_mpi import DataParallel

data = TensorDataset(torch.ones(64, 3), torch.zeros(64))
model = nn.Linear(3, 1, bias=False)
run = DataParallel(
    model, samples=800, batch_size=8, run_dir=os.environ["RUN"], resume="auto", quiet=True
)
steps = 0
try:
    for inputs, _ in run.batches(data):
        loss = model(inputs).square().mean()
        loss.backward()
        run.step(loss)
        steps += 1
        if steps == 20 and "STOP" in os.environ:
            os.kill(os.getpid(), signal.SIGUSR1)
finally:
    print("leaving", flush=True)
print("after the loop", flush=True)
"""


@needs("openmpi")
def test_own_loop(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(OWN_LOOP)

    def start(**stop: str) -> Completed:
        env = {"RUN": str(tmp_path / "run"), **stop}
        return run_ranks(2, [str(file)], cwd=tmp_path, env=env, timeout=60, check=not stop)

    done = start(STOP="1")
    stop_of(done, tmp_path / "run", 800)
    assert done.stdout.count("leaving") == 2 and "after the loop" not in done.stdout
    assert start().stdout.count("after the loop") == 2
    assert summary(tmp_path / "run")["samples"] == 800


def test_a_handler_of_the_program_stays() -> None:
    kept = [signal.getsignal(number) for number in stop_signal.SIGNALS]
    mine = lambda number, frame: None  # noqa: E731
    try:
        signal.signal(signal.SIGUSR1, mine)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        stop_signal.install()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert callable(signal.getsignal(signal.SIGUSR2))
    finally:
        for number, handler in zip(stop_signal.SIGNALS, kept, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_segment_without_samples(name: str) -> None:
    """What a signal at the start leaves to an algorithm: nothing to do, then one sample each."""
    roles.run(roles.Job(name, samples=2, segments=3)).check_accounts()


# -- what --resume auto decides -----------------------------------------------------------
RUN: dict[str, Any] = {"workers": 2, "samples": 128, "checkpoint_every": "64"}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("virtual") / "run"
    simulate(run_dir, "--workers", 2, "--samples", 128, "--checkpoint-every", 64)
    return run_dir


def decision(run_dir: Path | None, **changes: object) -> str:
    values = {**RUN, "resume": "auto", "run_dir": run_dir and str(run_dir), **changes}
    given: Settings = {(name,): Setting(value, name) for name, value in values.items()}
    return decide(SimulateOptions, given, followed(SimulateOptions, given))


def test_a_new_folder_is_started(tmp_path: Path) -> None:
    assert decision(tmp_path / "new") == "start"
    assert decision(tmp_path) == "start"
    assert decision(tmp_path, resume=None) == "as asked"


def test_a_run_is_resumed_or_complete(tmp_path: Path, simulated: Path) -> None:
    assert decision(simulated) == "complete"
    assert decision(simulated, samples=96, quiet=True) == "complete"
    assert decision(simulated, samples=256) == "resume"
    with pytest.raises(UserError, match=r"holds another run .*: batch-size: 32 and 16"):
        decision(simulated, batch_size=16)
    before = (simulated / "metrics.jsonl").read_bytes()
    done = simulate(simulated, "--workers", 2, "--samples", 128, "--resume", "auto")
    said = f"aladdin_mpi: the run in {simulated} is complete; nothing is left to do\n"
    assert done.stdout == said
    assert (simulated / "metrics.jsonl").read_bytes() == before


def test_a_run_without_a_checkpoint_is_started_anew(tmp_path: Path) -> None:
    prepare(tmp_path / "run", SimulateOptions(**RUN)).release()  # as a run that was killed
    assert decision(tmp_path / "run") == "replace"
    with pytest.raises(UserError, match=r"algorithm: aladdin-ahead and bsp"):
        decision(tmp_path / "run", algorithm="bsp")
    simulate(tmp_path / "run", *["--workers", "2", "--samples", "128", "--resume", "auto"])
    assert summary(tmp_path / "run")["samples"] == 128


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="expected the folder of the run too, got none"):
        decision(None)
    with pytest.raises(UserError, match="exclude each other"):
        decision(tmp_path, overwrite=True)
