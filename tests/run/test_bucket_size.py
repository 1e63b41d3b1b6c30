"""The default bucket size depends on the devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.run.handshake import GPU_BUCKET_MB, with_bucket_size


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
