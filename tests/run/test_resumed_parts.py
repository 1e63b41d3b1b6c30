"""Resumed runs of models with parts, also with other numbers of workers; a simulated script."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.commands import checkpoint_part, simulate, summary
from tests.launch import ROOT
from tests.run.test_parts import (
    BATCH,
    SAMPLES,
    Optimizers,
    adafactors,
    adams,
    by_torch,
    flat,
    gan,
    momenta,
    train,
)

Make = Callable[[nn.ModuleDict], Optimizers]


class Interruption(Exception):
    """Ends a run in the middle of a batch."""


def interrupted_in(batch: int) -> nn.ModuleDict:
    """Return a model whose discriminator fails in a batch, after its own step."""
    model, calls = gan(), count(1)

    def fail(*_: object) -> None:
        if next(calls) == 3 * batch:
            raise Interruption

    model["D"].register_forward_pre_hook(fail)
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("algorithm", "make", "settings"),
    [
        ("ar-sgd", adams, {}),
        ("ar-sgd", adafactors, {}),
        ("aladdin-ahead", adams, {"jitter": 0.3, "slowdown": {1: 3.0}}),
        ("local-sgd", momenta, {}),
    ],
)
def test_run_resumed_within_an_epoch_equals_uninterrupted_run(
    tmp_path: Path, algorithm: str, make: Make, settings: dict[str, Any]
) -> None:
    """It fails between the two steps of a batch, whose first step is repeated."""
    plan = {"resume": "auto", "epochs": 2, "checkpoint_every": "36samples", **settings}
    whole = train(tmp_path / "whole", algorithm, 2, make, **plan)
    cut = tmp_path / "cut"
    with pytest.raises(Interruption):
        train(cut, algorithm, 2, make, model=lambda: interrupted_in(8), **plan)
    assert checkpoint_part(cut / "run", 0)["drawn"] % SAMPLES
    resumed = train(cut, algorithm, 2, make, **plan)
    assert sum(map(len, resumed.batches)) < sum(map(len, whole.batches))
    assert torch.equal(resumed.x, whole.x)
    assert resumed.summary["gradients_computed"] == whole.summary["gradients_computed"]


@pytest.mark.parametrize("make", [adams, momenta])
def test_run_resumed_on_another_number_of_workers_equals_torch(tmp_path: Path, make: Make) -> None:
    """Batches of two workers, then of three, with one optimizer's state."""
    rounds: list[Any] = []
    for workers, samples in ((2, 24), (3, 60)):
        plan: dict[str, Any] = {"resume": "auto", "allow_resize": True, "samples": samples}
        trained = train(tmp_path, "ar-sgd", workers, make, **plan)
        rounds += zip(*trained.batches, strict=True)
    together = [[torch.cat(parts) for parts in zip(*each, strict=True)] for each in rounds]
    assert [len(points) for points, _ in together] == 3 * [2 * BATCH] + 3 * [3 * BATCH]
    x, _ = by_torch([together], make)
    torch.testing.assert_close(trained.x, x, rtol=1e-5, atol=5e-6)


def test_asynchronous_run_is_resumed_on_another_number_of_workers(tmp_path: Path) -> None:
    batches = []
    for workers, samples in ((2, 24), (4, 60), (1, 84)):
        plan: dict[str, Any] = {"resume": "auto", "allow_resize": True, "samples": samples}
        trained = train(tmp_path, "aladdin-ahead", workers, jitter=0.3, **plan)
        batches += [each for of_worker in trained.batches for each in of_worker]
    figures = trained.summary
    assert figures["samples"] == sum(len(points) for points, _ in batches) == 84
    assert figures["gradients_applied"] == figures["gradients_computed"] == 2 * len(batches)
    assert trained.x.isfinite().all()
    assert not torch.allclose(trained.x, flat(gan()), atol=1e-3)


@pytest.mark.parametrize("algorithm", ["ar-sgd", "aladdin-ahead"])
def test_script_with_parts_is_simulated(tmp_path: Path, algorithm: str) -> None:
    script = ROOT / "examples" / "parallel" / "gan.py"
    words = ["--algorithm", algorithm, "--workers", 3, "--slowdown", "0=3", "--samples", 960]
    simulate(None, script, "--run-dir", tmp_path / "run", *words)
    figures = summary(tmp_path / "run")
    assert (figures["engine"], figures["workers"], figures["samples"]) == ("virtual", 3, 960)
    assert figures["gradients_applied"] == figures["gradients_computed"] == 2 * 960 / 32
