"""Sizes of data sets that timed computing knows without their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run.trainer import simulate


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("dataset", "parameters", "epoch"),
    [
        ("imagenet", 25_557_032, 1_281_167),
        ("cifar100", 23_712_932, 50_000),
        ("synthetic:3x64x64:7:70000", 23_522_375, 70_000),
    ],
)
def test_timed_model_has_classes_of_described_set(
    tmp_path: Path, dataset: str, parameters: int, epoch: int
) -> None:
    """ResNet-50 has torchvision's number of parameters; no data exist."""
    words = ["--compute", "timed", "--model", "resnet50", "--dataset", dataset, "--samples", "64"]
    words += ["--workers", "2", "--run-dir", str(tmp_path / "run"), "--quiet"]
    completed = simulate(parse(SimulateOptions, words, "simulate", ""))
    assert completed["parameters"] == parameters
    assert completed["epochs"] == pytest.approx(64 / epoch)


def test_imagenet_set_requires_timed_computing(tmp_path: Path) -> None:
    words = ["--model", "resnet50", "--dataset", "imagenet", "--run-dir", str(tmp_path / "run")]
    with pytest.raises(UserError, match=r"--dataset imagenet .*--compute timed.*imagefolder"):
        simulate(parse(SimulateOptions, words, "simulate", ""))
