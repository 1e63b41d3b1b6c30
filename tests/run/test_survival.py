"""Ranks that are killed over real MPI: the others train on, or the job ends and says so."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.commands import EPOCH, metrics, rises, summary, train, training
from tests.launch import Job, needs

pytestmark = [needs("openmpi"), pytest.mark.slow]

ULFM = ["--with-ft", "ulfm"]
BUDGET = 12 * EPOCH
PLAN = ["--log-every", 320, "--checkpoint-every", 4 * EPOCH, "--slowdown", "0=3"]
ENDS_WITHIN = 60.0
"""Seconds; 30 on a machine that has nothing else to do."""


def drawn(run_dir: Path) -> int:
    """Samples at the last line of metrics."""
    if not (run_dir / "metrics.jsonl").exists():
        return 0
    lines = metrics(run_dir)
    return int(lines[-1]["samples"]) if lines else 0


def kill(job: Job, run_dir: Path, ranks: list[int], at: int) -> None:
    """Kill ranks once so many samples have been drawn."""
    end = time.monotonic() + 100
    while not drawn(run_dir) >= at:
        assert time.monotonic() < end and job.process.poll() is None, job.so_far()
        time.sleep(0.02)
    pids = [job.pid(rank) for rank in ranks]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed", "options"),
    [
        ("aladdin", 5, [3], ["--servers", 2]),
        pytest.param("bsp", 4, [1, 3], [], marks=pytest.mark.long),
        pytest.param("gosgd", 3, [2], [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, [2], []),
        pytest.param("local-sgd", 4, [1, 3], [], marks=pytest.mark.long),
    ],
)
def test_the_others_train_on(
    tmp_path: Path, algorithm: str, ranks: int, killed: list[int], options: list[object]
) -> None:
    run = tmp_path / "run"
    plan = ["--algorithm", algorithm, "--epochs", 12, *PLAN, *options]
    with training(ranks, run, *plan, mpirun=ULFM) as job:
        kill(job, run, killed, EPOCH)
        done = job.wait(120)
    assert done.returncode == 0, repr(done)
    assert "ULFM: if ranks die the others go on" in done.stdout
    found = summary(run)
    assert sorted(failure["rank"] for failure in found["failures"]) == killed
    for failure in found["failures"]:
        assert f"rank {failure['rank']} (host {failure['host']}) has failed" in done.stderr
        assert 0 <= failure["samples_lost"] < EPOCH
        row = f"rank {failure['rank']} (host {failure['host']}) died"
        assert f"{row} " in done.stdout and f"{failure['samples_lost']} sample" in done.stdout
    assert found["samples"] == BUDGET
    assert found["samples_lost"] == sum(each["samples_lost"] for each in found["failures"])
    assert found["gradients_computed"] == found["gradients_applied"]
    assert found["test_accuracy"] > 0.9
    # The checkpoint of the fewer is one of all: those who died take part again.
    done = train(ranks, None, "--resume", run, "--epochs", 13, mpirun=ULFM)
    found = summary(run)
    assert found["samples"] == 13 * EPOCH
    assert found["gradients_computed"] == found["gradients_applied"]
    assert rises([line for line in metrics(run) if line["kind"] == "train"])


@pytest.mark.parametrize(
    ("algorithm", "killed", "ulfm", "words"),
    [
        pytest.param(
            "multistep",
            2,
            True,
            "; multistep needs every worker; resume with: --resume ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "aladdin",
            1,
            True,
            "; it kept a part of the model; resume with: --resume ",
            marks=pytest.mark.long,
        ),
        pytest.param("aladdin", 0, True, "rank 0 (host ", marks=pytest.mark.long),
        pytest.param(
            "asp", 2, False, "stopped by SIGTERM; resume with: --resume ", marks=pytest.mark.long
        ),
    ],
)
def test_the_job_ends(tmp_path: Path, algorithm: str, killed: int, ulfm: bool, words: str) -> None:
    run = tmp_path / "run"
    plan = ["--algorithm", algorithm, "--epochs", 1000, *PLAN, "--checkpoint-every", 320]
    plan += ["--servers", 2] if killed == 1 else []
    with training(4, run, *plan, mpirun=ULFM if ulfm else []) as job:
        kill(job, run, [killed], 2 * EPOCH)
        start = time.monotonic()
        done = job.wait(ENDS_WITHIN)
    assert time.monotonic() - start < ENDS_WITHIN
    assert done.returncode != 0
    assert done.stderr.count(words) == 1, repr(done)
    assert "Traceback" not in done.stderr, repr(done)
    assert list((run / "checkpoint").glob("samples-*"))
