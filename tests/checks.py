"""What tests of several algorithms check in the same way."""

from __future__ import annotations

import signal
from pathlib import Path

import torch

from tests.commands import checkpoint_part, simulate
from tests.quadratic import Quadratic
from tests.roles import Job, Outcome, run
from tests.run.test_resume import MODULE, PLAN, assert_same


def check_resumed(folder: Path, algorithm: str, *options: object) -> None:
    """Kill a run after its first checkpoint, resume it, and compare all that it leaves."""
    modules = folder / "modules"
    modules.mkdir()
    (modules / "mortal.py").write_text(MODULE)
    whole, killed = folder / "whole", folder / "killed"
    plan = [*PLAN, "--algorithm", algorithm, "--servers", 2, "--checkpoint-every", 700, *options]
    simulate(whole, *plan, modules=modules)
    env = {"KILLED_AT_STEP": "50"}
    done = simulate(killed, *plan, modules=modules, env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert checkpoint_part(killed, 0)["drawn"] >= 700
    simulate(None, "--resume", killed, modules=modules)
    assert_same(whole, killed)


def check_converges(job: Job) -> Outcome:
    """Run ``job``, which must have no noise, and check that it ends in the minimum."""
    job.schedule = lambda samples: 0.2
    end = run(job)
    end.check_accounts()
    optimum = Quadratic(job.numel).optimum
    assert torch.isfinite(end.model).all()
    assert (end.model - optimum).norm() < 0.02 * (end.first - optimum).norm()
    return end
