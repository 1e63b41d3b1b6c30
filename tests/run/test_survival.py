"""Ranks killed over MPI: the others continue, or the job ends with resume advice."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from tests.commands import EPOCH, metrics, refusal, rises, summary, train, training
from tests.launch import Completed, Job, JobError, needs
from tests.messages import check_names
from tests.run.jobs import ULFM, checkpoints, kill_ranks, samples_so_far, wait_until

pytestmark = [needs("openmpi"), pytest.mark.slow]

BUDGET = 12 * EPOCH
PLAN = ["--log-every", 320, "--checkpoint-every", 4 * EPOCH, "--slowdown", "0=3"]
ENDS_WITHIN = 60.0
"""Timeout in seconds; 30 on a machine without other load."""


def kill(job: Job, run_dir: Path, ranks: list[int], at: int) -> None:
    """Kill ranks as soon as ``at`` samples have been leased."""
    wait_until(job, lambda: samples_so_far(run_dir) >= at, seconds=100)
    kill_ranks(job, ranks)


def outlive(
    run: Path, algorithm: str, ranks: int, killed: list[int], options: list[object]
) -> Completed:
    """Run a job that loses ranks during training, and check that it succeeds."""
    plan = ["--algorithm", algorithm, "--epochs", 12, *PLAN, *options]
    with training(ranks, run, *plan, mpirun=ULFM) as job:
        kill(job, run, killed, EPOCH)
        completed = job.wait(120)
    assert completed.returncode == 0, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    check_names(completed.stdout, "ULFM: ", "ranks")
    assert sorted(failure["rank"] for failure in summary(run)["failures"]) == killed
    return completed


@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed", "options"),
    [
        ("aladdin", 5, [3], ["--servers", 2]),
        pytest.param("bsp", 4, [1, 3], [], marks=pytest.mark.long),
        pytest.param("gosgd", 3, [2], [], marks=pytest.mark.long),
        pytest.param("ar-sgd", 4, [2], [], marks=pytest.mark.long),
        pytest.param("local-sgd", 4, [1, 3], [], marks=pytest.mark.long),
        pytest.param(
            *("diloco", 4, [1, 3], ["--diloco-steps", 4, "--diloco-fragments", 2]),
            marks=pytest.mark.long,
        ),
        pytest.param("aladdin-local", 5, [3], ["--servers", 2], marks=pytest.mark.long),
        pytest.param(
            *("async-diloco", 5, [3], ["--servers", 2, "--async-diloco-steps", 4]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_surviving_ranks_continue_training(
    tmp_path: Path, algorithm: str, ranks: int, killed: list[int], options: list[object]
) -> None:
    run = tmp_path / "run"
    completed = outlive(run, algorithm, ranks, killed, options)
    figures = summary(run)
    for failure in figures["failures"]:
        name = f"rank {failure['rank']} (host {failure['host']}) "
        check_names(completed.stderr, name)
        assert 0 <= failure["samples_lost"] < EPOCH
        check_names(completed.stdout, name, f"{failure['samples_lost']:,} sample")
    assert figures["samples"] == BUDGET
    assert figures["samples_lost"] == sum(each["samples_lost"] for each in figures["failures"])
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert figures["test_accuracy"] > 0.9
    # The checkpoint of the surviving ranks is valid for all ranks: the failed ones rejoin.
    completed = train(ranks, None, "--resume", run, "--epochs", 13, mpirun=ULFM)
    figures = summary(run)
    assert figures["samples"] == 13 * EPOCH
    assert figures["gradients_computed"] == figures["gradients_applied"]
    assert rises([line for line in metrics(run) if line["kind"] == "train"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed", "options", "group"),
    [
        pytest.param(
            "aladdin", 5, [0], ["--servers", 2], "3 workers and 1 server", marks=pytest.mark.long
        ),
        pytest.param("ar-sgd", 3, [0], [], "2 workers", marks=pytest.mark.long),
        ("aladdin-ahead", 5, [2], ["--spares", 1], "3 workers and 1 server"),
        pytest.param("asp", 4, [0], [], "2 workers and 1 server", marks=pytest.mark.long),
        pytest.param(
            "easgd", 5, [1], ["--servers", 2], "3 workers and 1 server", marks=pytest.mark.long
        ),
        pytest.param(
            "aladdin-local",
            5,
            [0],
            ["--servers", 2],
            "3 workers and 1 server",
            marks=pytest.mark.long,
        ),
        pytest.param("multistep", 4, [2], [], "3 workers", marks=pytest.mark.long),
        pytest.param("sgp", 4, [0, 2], ["--spares", 1], "2 workers", marks=pytest.mark.long),
    ],
)
def test_surviving_ranks_form_a_new_group(
    tmp_path: Path,
    algorithm: str,
    ranks: int,
    killed: list[int],
    options: list[object],
    group: str,
) -> None:
    run = tmp_path / "run"
    completed = outlive(run, algorithm, ranks, killed, options)
    check_names(completed.stderr, f" with {group} from sample")
    figures = summary(run)
    for failure in figures["failures"]:
        check_names(completed.stdout, f"rank {failure['rank']} (host {failure['host']}) ")
    assert figures["samples"] == BUDGET
    lost = figures.get("gradients_lost", 0)
    assert figures["gradients_computed"] == figures["gradients_applied"] + lost
    assert figures["test_accuracy"] > 0.9
    assert rises([line for line in metrics(run) if line["kind"] == "train"])
    # A job of the original size resumes it, whichever ranks failed.
    train(ranks, None, "--resume", run, "--epochs", 13, mpirun=ULFM)
    figures = summary(run)
    assert figures["samples"] == 13 * EPOCH
    assert figures["workers"] == ranks - sum(
        int(str(options[options.index(name) + 1])) if name in options else least
        for name, least in (("--servers", int(algorithm in SERVED)), ("--spares", 0))
    )


SERVED = ("aladdin", "aladdin-ahead", "asp", "easgd")


@pytest.mark.parametrize(
    ("algorithm", "killed", "ulfm", "names"),
    [
        ("aladdin", [0, 1], True, ["rank 0 (host ", "both"]),
        pytest.param("asp", [2], False, ["SIGTERM"], marks=pytest.mark.long),
    ],
)
def test_job_ends_with_resume_advice_if_it_cannot_continue(
    tmp_path: Path, algorithm: str, killed: list[int], ulfm: bool, names: list[str]
) -> None:
    run = tmp_path / "run"
    plan = ["--algorithm", algorithm, "--epochs", 1000, *PLAN, "--checkpoint-every", 320]
    plan += ["--servers", 2] if 1 in killed else []
    with training(4, run, *plan, mpirun=ULFM if ulfm else []) as job:
        kill(job, run, killed, 2 * EPOCH)
        start = time.monotonic()
        completed = job.wait(ENDS_WITHIN)
    assert time.monotonic() - start < ENDS_WITHIN
    assert completed.returncode != 0
    (line,) = [line for line in completed.stderr.splitlines() if "--resume " in line]
    check_names(line, *names, f"--resume {run}")
    assert "Traceback" not in completed.stderr, repr(completed)
    assert checkpoints(run)


def test_spares_option_requires_an_mpi_with_ulfm(tmp_path: Path) -> None:
    completed = train(4, tmp_path / "run", "--spares", 1, check=False)
    assert completed.returncode == 2
    check_names(refusal(completed), "--spares requires", "MPI")


@pytest.mark.long
def test_spare_ranks_exit_with_the_job(tmp_path: Path) -> None:
    """Both if the run is refused, and if it ends without a failure."""
    run = tmp_path / "run"
    plan = ["--spares", 1, "--epochs", 2]
    completed = train(4, run, *plan, mpirun=ULFM)
    assert re.search(r"^rank 3 .* spare ", completed.stdout, re.MULTILINE), repr(completed)
    assert summary(run)["workers"] == 2
    completed = train(4, run, *plan, mpirun=ULFM, check=False)
    assert completed.returncode == 2
    check_names(refusal(completed), "--run-dir:", str(run))
    assert completed.seconds < ENDS_WITHIN


KILLS = int(os.environ.get("ALADDIN_MPI_KILLS", "30"))
NAMES = sorted(ALGORITHMS)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(KILLS))
def test_ranks_killed_at_random_moments_leave_a_finished_or_resumable_run(
    tmp_path: Path, seed: int
) -> None:
    """Any ranks, from the start on: the job succeeds, or reports in time how to resume."""
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
        if r.random() < 0.75:  # not during startup
            wait_until(job, lambda: samples_so_far(run) > 0, or_end=True)
        for pid in pids:
            time.sleep(r.uniform(0.0, 2.5))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        completed = job.wait(120)
    assert "Traceback" not in completed.stderr, repr(completed)
    if completed.returncode == 0:
        assert (run / "summary.json").exists() or len(killed) == ranks, repr(completed)
    else:
        remedies = ("resume with", "restart with", "start the job again")
        assert any(remedy in completed.stderr for remedy in remedies), repr(completed)


def _pid(job: Job, rank: int) -> int:
    pids: list[int] = []

    def is_running() -> bool:
        with suppress(JobError):
            pids.append(job.pid(rank))
        return bool(pids)

    wait_until(job, is_running, or_end=True)
    return pids[0]
