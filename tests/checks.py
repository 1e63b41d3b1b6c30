"""Checks that the tests of several algorithms share."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from tests.commands import checkpoint_part, simulate
from tests.quadratic import Quadratic
from tests.roles import Job, Outcome, run
from tests.run.test_resume import MODULE, PLAN, assert_same


def check_resumed(folder: Path, algorithm: str, *options: object) -> None:
    """Kill a run after its first checkpoint, resume it, and compare all of its results."""
    check_killed_and_resumed(folder, 50, *PLAN, "--algorithm", algorithm, "--servers", 2, *options)


def check_killed_and_resumed(folder: Path, step: int, *plan: object) -> Path:
    """Kill a run at a worker's step, resume it, and compare it with a run that was not killed.

    Args:
        folder: an empty folder.
        step: the step of a worker of the model ``mortal:build`` that kills the run, after the
            first checkpoint.
        plan: the run's options; checkpoints are taken every 700 samples.

    Returns:
        The folder of the run that was not killed.
    """
    modules = folder / "modules"
    modules.mkdir()
    (modules / "mortal.py").write_text(MODULE)
    whole, killed = folder / "whole", folder / "killed"
    plan = (*plan, "--checkpoint-every", 700)
    simulate(whole, *plan, modules=modules)
    env = {"KILLED_AT_STEP": str(step)}
    completed = simulate(killed, *plan, modules=modules, env=env, check=False)
    assert completed.returncode == -signal.SIGKILL
    assert checkpoint_part(killed, 0)["drawn"] >= 700
    simulate(None, "--resume", killed, modules=modules)
    assert_same(whole, killed)
    return whole


def check_converges(job: Job) -> Outcome:
    """Run ``job``, which must have no noise, and check that it converges to the minimum."""
    job.schedule = lambda samples: 0.2
    end = run(job)
    end.check_accounts()
    optimum = Quadratic(job.numel).optimum
    assert torch.isfinite(end.model).all()
    assert (end.model - optimum).norm() < 0.02 * (end.first - optimum).norm()
    return end
