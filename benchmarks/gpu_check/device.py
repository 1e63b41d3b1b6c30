"""The accelerator under check: a GPU, or the delayed-copy test device."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from aladdin_mpi import accelerator

VARIABLE = "ALADDIN_MPI_GPU_CHECK_DEVICE"
"""Environment variable by which the parent process selects the device for its programs."""
FOLDER = "ALADDIN_MPI_GPU_CHECK_FOLDER"
"""Environment variable with the report's folder, for figures and traces."""
TEST = "test"
LONGEST_COPY = 200
"""Largest delay of a copy on the test device in microseconds."""


def is_test_device() -> bool:
    """Return whether the programs run on the delayed-copy test device."""
    return os.environ.get(VARIABLE) == TEST


def report_folder() -> Path:
    """Return the folder of the report, for a program's additional files."""
    return Path(os.environ[FOLDER])


def load() -> None:
    """Register the test device with torch if it is selected; do nothing for a GPU."""
    if is_test_device():
        test_device = importlib.import_module("tests.late.device")
        test_device.runtime.set_delays(LONGEST_COPY, 0, 0)


def obstacle(name: str) -> str | None:
    """Return why ``name``, "gpu" or "test", cannot be used here; None if it can."""
    if name == TEST:
        build = importlib.import_module("tests.late.build")
        found: str | None = build.obstacle()
        return found
    if accelerator.kind() is None:
        return "torch finds no GPU; check the driver, or use --device test"
    return None
