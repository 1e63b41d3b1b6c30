"""Ranks that are killed over real MPI: the others train on, or the job ends and says so."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from tests.commands import EPOCH, metrics, rises, summary, train, training
from tests.launch import Completed, Job, JobError, needs

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


def outlive(
    run: Path, algorithm: str, ranks: int, killed: list[int], options: list[object]
) -> Completed:
    """A job that loses ranks when it has begun, and ends well."""
    plan = ["--algorithm", algorithm, "--epochs", 12, *PLAN, *options]
    with training(ranks, run, *plan, mpirun=ULFM) as job:
        kill(job, run, killed, EPOCH)
        done = job.wait(120)
    assert done.returncode == 0, repr(done)
    assert "Traceback" not in done.stderr, repr(done)
    assert "ULFM: if ranks die the others go on" in done.stdout
    assert sorted(failure["rank"] for failure in summary(run)["failures"]) == killed
    return done


@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed", "options"),
    [
        ("aladdin", 5, [3], ["--servers", 2]),
        pytest.param("bsp", 4, [1, 3], [], marks=pytest.mark.long),
        pytest.param("gosgd", 3, [2], [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, [2], [], marks=pytest.mark.long),
        pytest.param("local-sgd", 4, [1, 3], [], marks=pytest.mark.long),
    ],
)
def test_the_others_train_on(
    tmp_path: Path, algorithm: str, ranks: int, killed: list[int], options: list[object]
) -> None:
    run = tmp_path / "run"
    done = outlive(run, algorithm, ranks, killed, options)
    found = summary(run)
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
    ("algorithm", "ranks", "killed", "options", "goes_on"),
    [
        ("aladdin", 5, [0], ["--servers", 2], "3 workers and 1 server"),
        pytest.param("ar-sgd", 3, [0], [], "2 workers", marks=pytest.mark.long),
        ("aladdin-ahead", 5, [2], ["--spares", 1], "3 workers and 1 server"),
        pytest.param("asp", 4, [0], [], "2 workers and 1 server", marks=pytest.mark.long),
        pytest.param(
            "easgd", 5, [1], ["--servers", 2], "3 workers and 1 server", marks=pytest.mark.long
        ),
        pytest.param("multistep", 4, [2], [], "3 workers", marks=pytest.mark.long),
        pytest.param("sgp", 4, [0, 2], ["--spares", 1], "2 workers", marks=pytest.mark.long),
    ],
)
def test_those_who_are_left_form_a_new_group(
    tmp_path: Path,
    algorithm: str,
    ranks: int,
    killed: list[int],
    options: list[object],
    goes_on: str,
) -> None:
    run = tmp_path / "run"
    done = outlive(run, algorithm, ranks, killed, options)
    assert f"aladdin_mpi: the run goes on with {goes_on} from sample" in done.stderr
    found = summary(run)
    for failure in found["failures"]:
        assert f"rank {failure['rank']} (host {failure['host']}) died " in done.stdout
    assert found["samples"] == BUDGET
    lost = found.get("gradients_lost", 0)
    assert found["gradients_computed"] == found["gradients_applied"] + lost
    assert found["test_accuracy"] > 0.9
    assert rises([line for line in metrics(run) if line["kind"] == "train"])
    # The job that it began as goes on with it, whoever has been lost.
    train(ranks, None, "--resume", run, "--epochs", 13, mpirun=ULFM)
    found = summary(run)
    assert found["samples"] == 13 * EPOCH
    assert found["workers"] == ranks - sum(
        int(str(options[options.index(name) + 1])) if name in options else least
        for name, least in (("--servers", int(algorithm in SERVED)), ("--spares", 0))
    )


SERVED = ("aladdin", "aladdin-ahead", "asp", "easgd")


@pytest.mark.parametrize(
    ("algorithm", "killed", "ulfm", "words"),
    [
        pytest.param(
            "aladdin", [0, 1], True, "which kept the run's books, and its deputy are both lost"
        ),
        pytest.param(
            "asp",
            [2],
            False,
            "stopped by SIGTERM; resume with: --resume ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_the_job_ends(
    tmp_path: Path, algorithm: str, killed: list[int], ulfm: bool, words: str
) -> None:
    run = tmp_path / "run"
    plan = ["--algorithm", algorithm, "--epochs", 1000, *PLAN, "--checkpoint-every", 320]
    plan += ["--servers", 2] if 1 in killed else []
    with training(4, run, *plan, mpirun=ULFM if ulfm else []) as job:
        kill(job, run, killed, 2 * EPOCH)
        start = time.monotonic()
        done = job.wait(ENDS_WITHIN)
    assert time.monotonic() - start < ENDS_WITHIN
    assert done.returncode != 0
    assert done.stderr.count(words) == 1, repr(done)
    assert "resume with: --resume " in done.stderr
    assert "Traceback" not in done.stderr, repr(done)
    assert list((run / "checkpoint").glob("samples-*"))


def test_spares_need_an_mpi_that_survives_deaths(tmp_path: Path) -> None:
    done = train(4, tmp_path / "run", "--spares", 1, check=False)
    assert done.returncode == 2
    assert done.stderr.count("--spares: expected an MPI that survives deaths") == 1, repr(done)


def test_spares_leave_with_the_others(tmp_path: Path) -> None:
    """Where the run is refused, and where it ends without a loss."""
    run = tmp_path / "run"
    plan = ["--spares", 1, "--epochs", 2]
    done = train(4, run, *plan, mpirun=ULFM)
    assert re.search(r"^rank 3 .* spare ", done.stdout, re.MULTILINE), repr(done)
    assert summary(run)["workers"] == 2
    done = train(4, run, *plan, mpirun=ULFM, check=False)
    assert done.returncode == 2
    assert "--run-dir: expected a new folder" in done.stderr
    assert done.seconds < ENDS_WITHIN


KILLS = int(os.environ.get("ALADDIN_MPI_KILLS", "30"))
NAMES = sorted(ALGORITHMS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    """Of any rank, from the start on: the job ends well, or says how to go on, in its time."""
    r = random.Random(seed)
    name = r.choice(NAMES)
    servers = r.choice([1, 2]) if find_algorithm(name).has_servers else 0
    spares = r.choice([0, 0, 1])
    ranks = servers + r.choice([2, 3]) + spares
    plan = ["--algorithm", name, "--epochs", 12, "--log-every", 320, "--timeout", 30]
    plan += ["--spares", spares, "--servers", max(1, servers), "--eval-every", 1]
    plan += ["--checkpoint-every", r.choice(["2048", "never"])]
    killed = r.sample(range(ranks), r.choice([1, 1, 2]))
    run = tmp_path / "run"
    with training(ranks, run, *plan, mpirun=ULFM, is_warm=False) as job:
        pids = [_pid(job, rank) for rank in killed]
        if r.random() < 0.75:  # not in the start
            _await(job, lambda: drawn(run) > 0)
        for pid in pids:
            time.sleep(r.uniform(0.0, 2.5))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        done = job.wait(120)
    assert "Traceback" not in done.stderr, repr(done)
    if done.returncode == 0:
        assert (run / "summary.json").exists() or len(killed) == ranks, repr(done)
    else:
        remedies = ("resume with", "start it again", "start the job again")
        assert any(remedy in done.stderr for remedy in remedies), repr(done)


def _pid(job: Job, rank: int) -> int:
    found: list[int] = []

    def look() -> bool:
        with suppress(JobError):
            found.append(job.pid(rank))
        return bool(found)

    _await(job, look)
    return found[0]


def _await(job: Job, holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds() and job.process.poll() is None:
        assert time.monotonic() < end, job.so_far()
        time.sleep(0.02)
