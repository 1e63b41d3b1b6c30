"""Optimizers of custom training loops over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.commands import metrics, summary
from tests.launch import Completed, needs
from tests.messages import check_names
from tests.run.optimizer_cases import (
    AS_TORCH,
    CASES,
    CLIPPED,
    LEARN,
    NUMBERS,
    RESUMED,
    Make,
    loss_of,
    network,
    one_cycle,
)
from tests.run.program_runs import run_program

pytestmark = needs("openmpi")


def train(folder: Path, names: list[str], check: bool = True) -> Completed:
    """Run several trainings in one job: importing what torch.optim needs takes a rank seconds."""
    return run_program(folder, "custom_optimizers", *names, check=check, timeout=150)


def reference(stored: list[list[torch.Tensor]], make: Make, clip: str) -> nn.Module:
    """Step torch's optimizer in one process, with the mean of all workers' gradients."""
    model = network()
    optimizer = make(model, 0)
    scheduler = one_cycle(optimizer)
    for batches in zip(*stored, strict=True):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for numbers in batches:
            model.zero_grad()
            loss_of(model, numbers).backward()
            if clip == "own":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for total, p in zip(sums, model.parameters(), strict=True):
                assert p.grad is not None
                total += p.grad / len(batches)
        for total, p in zip(sums, model.parameters(), strict=True):
            p.grad = total
        if clip == "mean":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in batches:
            scheduler.step()
    return model


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name, values in one.items():
        torch.testing.assert_close(values, other[name], rtol=1e-4, atol=1e-5)


def check_steps_as_torch(folder: Path, name: str) -> None:
    """With groups, a scheduler, and the norm of the mean or of each worker's gradient."""
    case = CASES[name]
    ranks = [torch.load(folder / f"{name}-{rank}.pt") for rank in range(3)]
    workers = ranks if case.algorithm == "ar-sgd" else ranks[1:]
    batches = [each["batches"] for each in workers]
    expected = reference(batches, case.make, CLIPPED.get(name, ""))
    for each in ranks:
        assert_close(expected.state_dict(), each["model"])
    rates = [line["lr"] for line in metrics(folder / name, "train")]
    assert max(rates) > 2 * rates[0] > 0  # the scheduler's, reported by a worker


def check_learns(folder: Path, name: str) -> None:
    figures = summary(folder / name)
    assert figures["gradients_applied"] == figures["gradients_computed"]
    model = network()
    before = loss_of(model, NUMBERS).item()
    model.load_state_dict(torch.load(folder / f"{name}-0.pt")["model"])
    assert loss_of(model, NUMBERS).item() < 0.9 * before


def check_resumed(folder: Path, algorithm: str) -> None:
    """Two halves of a run equal the whole run; the scheduler resumes too."""
    for rank in range(3):
        halves, straight = (
            torch.load(folder / f"{algorithm}, {name}-{rank}.pt")["model"]
            for name in ("other half", "straight")
        )
        assert_close(halves, straight)


@pytest.mark.long
def test_custom_optimizers_match_torch_converge_and_resume(tmp_path: Path) -> None:
    """Synchronous algorithms match torch; others converge; halves of runs are resumed."""
    train(tmp_path, [*AS_TORCH, *LEARN, *RESUMED])
    for name in AS_TORCH:
        check_steps_as_torch(tmp_path, name)
    for name in LEARN:
        check_learns(tmp_path, name)
    for algorithm in ("ar-sgd", "bsp"):
        check_resumed(tmp_path, algorithm)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("in the middle", ["run.clip_grad_norm_()", "first step"]),
        pytest.param("parts", ["run.clip_grad_norm_()", "clip="], marks=pytest.mark.long),
        pytest.param("stepped", ["scheduler.step()"], marks=pytest.mark.long),
        pytest.param("multistep", ["multistep", "momentum SGD"], marks=pytest.mark.long),
        pytest.param("rate", ["lr ", "optimizer"], marks=pytest.mark.long),
        pytest.param("server", ["asp={'momentum': ...}:", "built-in SGD"], marks=pytest.mark.long),
        pytest.param(
            "ranks differ", ["optimizer.groups", "Adam", "4 parameters"], marks=pytest.mark.long
        ),
    ],
)
def test_unsupported_optimizer_use_is_refused_by_name(
    tmp_path: Path, name: str, names: list[str]
) -> None:
    completed = train(tmp_path, [name], check=False)
    assert completed.returncode != 0
    check_names(completed.stderr, *names)
