"""Device and pinned memory of a worker by algorithm, against the table in docs/gpus.md.

Runs under mpirun with three ranks, or four for islands; the arguments are a folder for the runs,
and algorithms instead of all. The figures are multiples of the model (its trainable parameters in
fp32) on the worker that uses most, after six steps, without activations and backward's temporary
memory.
"""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel, accelerator
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.training import WORLD

PART = "memory"
GUIDE = Path(__file__).parents[2] / "docs" / "gpus.md"
WIDTH = 1000
SHARE, ROUNDING = 0.05, 0.05
"""Largest deviation from the guide: a share, or half a digit of its last decimal place."""
UPPER_BOUNDS = ("aladdin", "aladdin-ahead", "multistep")
"""Algorithms that use less than the guide says when messages leave and arrive in time."""
WARM_UP = ("bsp", "ar-sgd")
"""Runs before the measurement, for memory that the process keeps, such as cuBLAS's workspace on all
ranks."""
OPTIONS: dict[str, dict[str, Any]] = {
    "DGC": {"compression": "dgc"},
    "--node-sums": {"node_sums": True},
    "--island 2": {"island": 2, "servers": 2},
}
"""Cases of the guide's table that are not a wire format."""
RANKS = {"--island 2": 4}
"""Number of ranks of cases, if it is not three."""
OWN: dict[str, dict[str, Any]] = {
    "diloco": {"diloco": {"steps": 4, "fragments": 4, "overlap": 1}},
    "async-diloco": {"async_diloco": {"steps": 2}},
}
"""Options by which an algorithm exchanges progress during the measured steps."""


def guide_table(text: str) -> dict[tuple[str, str], tuple[float, float]]:
    """Return device and pinned memory by algorithm and case ("" for the default wire format).

    A figure with a "+ l" grows with the node's workers, of which there are two here.
    """
    section = text.partition("## Memory")[2].partition("\n## ")[0]
    found = {}
    for line in re.findall(r"^\| `.*\|$", section, re.MULTILINE):
        names, device, pinned = (cell.strip() for cell in line.strip("|").split("|"))
        base, *per_worker = pinned.split("+")
        figures = float(device), float(base) + (2.0 if per_worker else 0.0)
        algorithms = re.findall(r"`([a-z][a-z-]*)`", names)
        case = re.sub(r"\(.*?\)|`", "", names.rpartition("`, ")[2]).strip() if ", " in names else ""
        case = "" if case in algorithms else case
        for algorithm in algorithms:
            found[algorithm, case] = figures
    return found


def network() -> nn.Module:
    """Return a network of three million parameters, with buckets as large as real models have."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


class _Meter:
    """Measures the bytes of device memory and of pinned memory in use by this process."""

    def __init__(self) -> None:
        self._registered = 0
        if not is_test_device():
            self._watch_registration()

    def _watch_registration(self) -> None:
        """Count pages registered with the CUDA runtime, which torch's statistics omit."""
        pages: Any = accelerator._Pages
        create, release = pages.__init__, pages.__del__

        def created(this: Any, *args: Any) -> None:
            create(this)
            self._registered += len(this)

        def released(this: Any) -> None:
            self._registered -= len(this)
            release(this)

        pages.__init__, pages.__del__ = created, released

    def read(self) -> tuple[int, int]:
        """Wait for the device and return device and pinned bytes.

        Bytes of a GPU are the requested ones: its allocator rounds a vector up, by at most 2 MiB.
        """
        torch.accelerator.synchronize()
        if is_test_device():
            from tests.late.device import runtime

            used = runtime.memory_used()
            return used[0], used[2]
        torch.empty(1, device="cuda")  # reclaims memory that the device has just finished using
        device = torch.cuda.memory_stats()["requested_bytes.all.current"]
        pinned = torch.cuda.host_memory_stats()["active_bytes.current"]
        return device, pinned + self._registered


def measure(meter: _Meter, folder: str, algorithm: str, case: str) -> tuple[float, float]:
    """Return the device and pinned memory that a run uses, in multiples of the model."""
    settings = OPTIONS.get(case, {"wire": case} if case else {}) | OWN.get(algorithm, {})
    gc.collect()
    before = meter.read()
    module = network()
    nbytes = sum(4 * p.numel() for p in module.parameters())
    run = DataParallel(
        module,
        algorithm=algorithm,
        device="gpu",
        samples=4 * 8 * WORLD.size,
        batch_size=4,
        lr=0.001,
        bucket_mb=1.0,
        run_dir=folder,
        quiet=True,
        overwrite=True,
        **settings,
    )
    data = TensorDataset(torch.randn(64, WIDTH), torch.zeros(64, dtype=torch.long))
    now = before
    for number, (inputs, labels) in enumerate(run.batches(data)):
        nn.functional.cross_entropy(module(inputs), labels).backward()
        run.step()
        if number == 5:
            now = meter.read()
    return (now[0] - before[0]) / nbytes, (now[1] - before[1]) / nbytes


def agrees(algorithm: str, measured: float, expected: float) -> bool:
    """Return whether a figure is within the tolerance of the guide's, or below an upper bound."""
    tolerance = max(SHARE * expected, ROUNDING)
    return measured - expected <= tolerance and (
        algorithm in UPPER_BOUNDS or expected - measured <= tolerance
    )


def main() -> None:
    """Report a row for each line of the guide's table."""
    meter = _Meter()
    folder, *names = sys.argv[1:]
    table = guide_table(GUIDE.read_text())
    for algorithm in WARM_UP:
        measure(meter, folder, algorithm, "")
    for (algorithm, case), expected in table.items():
        if RANKS.get(case, 3) != WORLD.size or (names and algorithm not in names):
            continue
        mine = measure(meter, folder, algorithm, case)
        found = [WORLD.allreduce(each, MPI.MAX) for each in mine]
        if WORLD.rank == 0:
            passed = all(agrees(algorithm, *pair) for pair in zip(found, expected, strict=True))
            figures = f"device {found[0]:.2f}, pinned {found[1]:.2f} models"
            note = f"guide: {expected[0]:.1f} and {expected[1]:.1f}"
            rows.report(PART, f"{algorithm} {case}".strip(), passed, figures, note)


if __name__ == "__main__":
    main()
