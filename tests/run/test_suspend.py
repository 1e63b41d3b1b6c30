"""SIGUSR1 and SIGUSR2 save the run and end it with status 75; `--resume auto` resumes it."""

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
from aladdin_mpi.options.run import RunRequest, SimulateOptions
from aladdin_mpi.options.settings import Setting, Settings
from aladdin_mpi.process import guard
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
from tests.launch import Completed, needs
from tests.messages import check_names, naming
from tests.run.jobs import samples_so_far, wait_until
from tests.run.program_runs import PROGRAMS, run_program

STOPPED = re.compile(
    r"^aladdin_mpi: .*(SIGUSR[12]) .* (\d+) of (\d+)\b.* --resume (.*)$",
    re.MULTILINE,
)


def stop_of(completed: Completed, run_dir: Path, total: int) -> tuple[str, int]:
    """Return the signal and the sample at which a job was stopped, and check that it was saved."""
    assert completed.returncode == os.EX_TEMPFAIL == 75, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    ((name, sample, whole, folder),) = STOPPED.findall(completed.stderr)
    # It is relative if it is in the job's current folder.
    assert (int(whole), run_dir.parent / folder) == (total, run_dir)
    assert not (run_dir / "summary.json").exists()
    assert checkpoint_part(run_dir, 0)["drawn"] == int(sample) < total
    return name, int(sample)


def check_end(run_dir: Path, total: int, log_every: int) -> None:
    """Check that the run's results equal those of an uninterrupted run."""
    figures = summary(run_dir)
    assert figures["samples"] == total
    assert figures["gradients_computed"] == figures["gradients_applied"]
    lines = metrics(run_dir, "train")
    places = [0, *(line["samples"] for line in lines)]
    assert rises(lines) and rises(lines, "seconds")
    # A line is written with the first lease after its sample count, and leases are ahead of steps.
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
        # While checkpoints are written continuously.
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
def test_run_stopped_by_signal_resumes_twice(
    tmp_path: Path, algorithm: str, ranks: int, stops: list[str]
) -> None:
    run_dir, total, log_every = tmp_path / "run", 3000, 300
    plan = ["--algorithm", *algorithm.split(), "--model", "stopping:build", "--samples", total]
    plan += ["--log-every", log_every, "--eval-every", 0.5, "--resume", "auto"]
    before = -1
    for stop in stops:
        _, when, expected = stop.split(":")
        env = {"STOP": stop}
        completed = train(ranks, run_dir, *plan, modules=PROGRAMS, env=env, check=False)
        name, sample = stop_of(completed, run_dir, total)
        assert name == expected
        assert sample >= before if when == "build" else sample > before
        before = sample
    completed = train(ranks, run_dir, *plan, modules=PROGRAMS)
    check_end(run_dir, total, log_every)


@needs("openmpi")
def test_signal_to_mpirun_suspends_the_run_during_an_evaluation(tmp_path: Path) -> None:
    """No rank waits for the evaluation, and the resumed run repeats it."""
    run_dir, total = tmp_path / "run", 4 * EPOCH
    plan = ["--model", "stopping:build", "--samples", total, "--log-every", 200]
    plan += ["--resume", "auto"]
    env = {"EVALUATION_SECONDS": "60"}
    with training(2, run_dir, *plan, modules=PROGRAMS, env=env) as job:
        wait_until(job, lambda: samples_so_far(run_dir) >= EPOCH + 200)
        job.process.send_signal(signal.SIGUSR2)
        start = time.monotonic()
        name, sample = stop_of(job.wait(60), run_dir, total)
        assert time.monotonic() - start < 40
    assert (name, metrics(run_dir, "eval")) == ("SIGUSR2", [])
    train(2, run_dir, *plan, modules=PROGRAMS)
    check_end(run_dir, total, 200)
    assert sample <= metrics(run_dir, "eval")[0]["samples"] < sample + 500


@pytest.mark.long
@needs("openmpi")
def test_signal_after_the_last_sample_is_ignored(tmp_path: Path) -> None:
    options = f"--algorithm ar-sgd --model stopping:build --samples 64 --run-dir {tmp_path / 'run'}"
    env = {**os.environ, "PYTHONPATH": str(PROGRAMS), "STOP": "0:eval:SIGUSR1"}
    completed = subprocess.run([sys.executable, *TRAIN, *options.split()], env=env, timeout=60)
    assert completed.returncode == 0
    assert summary(tmp_path / "run")["samples"] == 64


@needs("openmpi")
def test_signal_suspends_a_custom_loop(tmp_path: Path) -> None:
    def start(stop_at: int) -> Completed:
        words = (tmp_path / "run", stop_at)
        return run_program(tmp_path, "stopped_loop", *words, ranks=2, check=not stop_at)

    completed = start(stop_at=20)
    stop_of(completed, tmp_path / "run", 800)
    assert completed.stdout.count("leaving") == 2 and "after the loop" not in completed.stdout
    assert start(stop_at=0).stdout.count("after the loop") == 2
    assert summary(tmp_path / "run")["samples"] == 800


def test_signal_handler_of_the_program_is_kept() -> None:
    kept = [signal.getsignal(number) for number in guard.SUSPEND_SIGNALS]
    mine = lambda number, frame: None  # noqa: E731
    try:
        signal.signal(signal.SIGUSR1, mine)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        guard.note_suspend_signals()
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert callable(signal.getsignal(signal.SIGUSR2))
    finally:
        for number, handler in zip(guard.SUSPEND_SIGNALS, kept, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_algorithm_handles_a_segment_without_samples(name: str) -> None:
    """As after a signal at the start: no samples in the first segment, then one in each."""
    roles.run(roles.Job(name, samples=2, segments=3)).check_accounts()


# -- decisions of --resume auto --------------------------------------------------------------
RUN: dict[str, Any] = {"workers": 2, "samples": 128, "checkpoint_every": "64", "bn_batches": 8}


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("virtual") / "run"
    simulate(run_dir, "--workers", 2, "--samples", 128, "--checkpoint-every", 64)
    return run_dir


def decision(run_dir: Path | None, **changes: object) -> str:
    values = {**RUN, "resume": "auto", "run_dir": run_dir and str(run_dir), **changes}
    given: Settings = {(name,): Setting(value, name) for name, value in values.items()}
    return decide(RunRequest(SimulateOptions, given))


def test_auto_resume_starts_a_run_in_a_new_folder(tmp_path: Path) -> None:
    assert decision(tmp_path / "new") == "start"
    assert decision(tmp_path) == "start"
    assert decision(tmp_path, resume=None) == "as requested"


def test_auto_resume_continues_or_completes_an_existing_run(
    tmp_path: Path, simulated: Path
) -> None:
    assert decision(simulated) == "complete"
    assert decision(simulated, samples=96, quiet=True) == "complete"
    assert decision(simulated, samples=256) == "resume"
    with pytest.raises(UserError, match=naming("batch-size: 32 and 16", str(simulated))):
        decision(simulated, batch_size=16)
    before = (simulated / "metrics.jsonl").read_bytes()
    completed = simulate(simulated, "--workers", 2, "--samples", 128, "--resume", "auto")
    check_names(completed.stdout, f"aladdin_mpi: the run in {simulated} is complete")
    assert completed.stdout.count("\n") == 1
    assert (simulated / "metrics.jsonl").read_bytes() == before


def test_auto_resume_restarts_a_run_without_a_checkpoint(tmp_path: Path) -> None:
    prepare(tmp_path / "run", SimulateOptions(**RUN)).release()  # like a killed run
    assert decision(tmp_path / "run") == "replace"
    with pytest.raises(UserError, match=naming("algorithm: aladdin-ahead and bsp")):
        decision(tmp_path / "run", algorithm="bsp")
    simulate(tmp_path / "run", *["--workers", "2", "--samples", "128", "--resume", "auto"])
    assert summary(tmp_path / "run")["samples"] == 128


def test_auto_resume_refuses_missing_or_conflicting_options(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=naming("resume auto", "--run-dir")):
        decision(None)
    with pytest.raises(UserError, match=naming("resume auto", "overwrite")):
        decision(tmp_path, overwrite=True)
