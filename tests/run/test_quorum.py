"""``--min-workers``: a run with too few workers left is saved, and ends with status 75."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from aladdin_mpi.errors import SuspendedError
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from tests.commands import EPOCH, checkpoint_part, refusal, summary, train, training
from tests.launch import needs
from tests.messages import check_names
from tests.run.jobs import ULFM, kill_ranks, samples_so_far, wait_until
from tests.run.test_takeover import BATCH, SCHEDULES, STEP_SECONDS, Schedule, check, play

WORKERS, STEPS = 3, 12


def plan_of(algorithm: str, seed: int, spares: int, failing: list[int]) -> Schedule:
    """Return a run in which ranks fail one after the other, from the third step on."""
    servers = 1 + seed % 2 if find_algorithm(algorithm).has_servers else 0
    times = [(3 + 0.3 * seed + 2 * turn) * STEP_SECONDS for turn in range(len(failing))]
    settings = {"min_workers": WORKERS, "checkpoint_every": "never", "jitter": 0.3}
    return Schedule(
        algorithm,
        WORKERS,
        servers,
        spares,
        BATCH * WORKERS * STEPS,
        dict(zip(failing, times, strict=True)),
        settings,
        seed,
        2,
        False,
    )


@pytest.mark.sample(4)
@pytest.mark.parametrize("seed", range(max(1, SCHEDULES // 20)))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_run_below_min_workers_is_saved_and_resumes(
    algorithm: str, seed: int, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    plan = plan_of(algorithm, seed, 0, [])
    plan.failures[plan.size - 1 - seed % WORKERS] = (3 + 0.3 * seed) * STEP_SECONDS
    with pytest.raises(SuspendedError):
        play(plan, run)
    drawn = checkpoint_part(run, 0)["drawn"]
    assert 0 < drawn < plan.samples
    whole = replace(plan, failures={}, settings={**plan.settings, "resume": "auto"})
    outcome = play(whole, run)
    (figures,) = filter(None, outcome.summaries.values())
    assert figures["samples"] == plan.samples
    assert [failure["rank"] for failure in figures["failures"]] == list(plan.failures)


@pytest.mark.parametrize("algorithm", ["aladdin", "ar-sgd", "gosgd"])
def test_spare_rank_restores_the_number_of_workers(algorithm: str, tmp_path: Path) -> None:
    plan = plan_of(algorithm, 0, 1, [WORKERS - 1])
    outcome = play(plan, tmp_path / "run")
    assert not outcome.reason
    check(plan, outcome)


@pytest.mark.parametrize("algorithm", ["aladdin", "ar-sgd", "gosgd"])
def test_run_ends_once_there_is_no_spare_rank_left(algorithm: str, tmp_path: Path) -> None:
    plan = plan_of(algorithm, 0, 1, [WORKERS - 1, WORKERS])
    with pytest.raises(SuspendedError):
        play(plan, tmp_path / "run")


@pytest.mark.long
@needs("openmpi")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "ranks", "killed"),
    [
        ("ar-sgd", 3, 1),
        pytest.param("aladdin", 4, 2, marks=pytest.mark.long),
        pytest.param("bsp", 4, 0, marks=pytest.mark.long),
    ],
)
def test_job_below_min_workers_resumes_with_all_ranks(
    tmp_path: Path, algorithm: str, ranks: int, killed: int
) -> None:
    run, total = tmp_path / "run", 12 * EPOCH
    workers = ranks - find_algorithm(algorithm).has_servers
    # Rank 0 is killed as the coordinator: a worker replaces its server.
    least = workers if killed else 2
    plan = ["--algorithm", algorithm, "--samples", total, "--min-workers", least]
    plan += ["--log-every", 320, "--checkpoint-every", "never", "--slowdown", "0=3"]
    with training(ranks, run, *plan, mpirun=ULFM) as job:
        wait_until(job, lambda: samples_so_far(run) >= EPOCH, seconds=100)
        kill_ranks(job, [killed] if killed else [0, 2])
        completed = job.wait(120)
    assert completed.returncode == os.EX_TEMPFAIL, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    check_names(completed.stderr, f"--min-workers {least}", f"--resume {run}")
    assert EPOCH <= checkpoint_part(run, 0)["drawn"] < total
    train(ranks, None, "--resume", run, "--allow-resize", mpirun=ULFM)
    assert summary(run)["samples"] == total


@needs("openmpi")
def test_min_workers_above_the_number_of_workers_is_refused(tmp_path: Path) -> None:
    completed = train(
        3, tmp_path / "run", "--algorithm", "aladdin", "--min-workers", 3, check=False
    )
    check_names(refusal(completed), "--min-workers", "workers, 2", "got 3")
