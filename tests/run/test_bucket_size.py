"""The default bucket size depends on the devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.handshake import GPU_BUCKET_MB, with_bucket_size
from tests.launch import run_ranks

PROGRAM = Path(__file__).parent / "programs" / "as_on_gpus.py"


class Alone:
    """The part of a transport that a single rank needs for the decision."""

    rank, size, meets, survives, simulation = 0, 1, False, False, None

    def __init__(self, models_time: bool = False) -> None:
        self.models_time = models_time


@pytest.mark.parametrize(
    ("device", "given", "models_time", "expected"),
    [
        ("cpu", {}, False, 4.0),
        ("cuda", {}, False, GPU_BUCKET_MB),
        ("cuda", {"bucket_mb": 4.0}, False, 4.0),
        ("cuda", {}, True, 4.0),
    ],
)
def test_default_bucket_size_is_larger_with_gpus(
    device: str, given: dict[str, Any], models_time: bool, expected: float
) -> None:
    transport: Any = Alone(models_time)
    options = with_bucket_size(transport, RunOptions(**given), torch.device(device))
    assert options.bucket_mb == expected


@pytest.mark.long
def test_run_on_gpus_is_found_again_by_resume_auto(tmp_path: Path) -> None:
    words = ["--algorithm", "ar-sgd", "--samples", "64", "--run-dir", str(tmp_path / "run")]
    words += ["--bn-batches", "8", "--resume", "auto"]
    run_ranks(2, [str(PROGRAM), *words])
    assert "bucket-mb = 16.0\n" in (tmp_path / "run" / "config.toml").read_text()
    again = run_ranks(2, [str(PROGRAM), *words])
    assert f"the run in {tmp_path / 'run'} is complete" in again.stdout
