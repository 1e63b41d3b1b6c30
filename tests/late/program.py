"""Run under mpirun by test_late.py: training on the device "late" against training on the CPU.

The arguments: the folder for the runs, and ``equal``, ``all`` or ``defects``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from mpi4py import MPI

# isort: split
import torch
from torch import nn
from torch.utils.data import Subset

from aladdin_mpi import DataParallel, accelerator, load_dataset
from aladdin_mpi.algorithms.registry import ALGORITHMS
from aladdin_mpi.allreduce import over_transport
from tests.late import guarded
from tests.late.device import runtime

WORLD = MPI.COMM_WORLD
STEPS = 5
COPIES, KERNELS = 4000, 100
"""Longest delays in microseconds."""
LATE_COPIES, LATE_KERNELS = (30_000, 100), (0, 2000)
"""The same where a mistake is to show: it must not depend on what else the cores do."""

EQUAL: dict[str, dict[str, Any]] = {
    "ar-sgd": {},
    "ar-sgd bf16": {"wire": "bf16"},
    "ar-sgd dgc": {"compression": "dgc"},
    "bsp": {},
    "bsp bf16": {"wire": "bf16"},
    "bsp dgc": {"compression": "dgc"},
    "bsp host-first": {"bsp": {"host_first": True}},
    "bsp checksum": {"checksum": True},
    "local-sgd": {},
    "multistep": {},
    "multistep activations": {"multistep": {"exchange": "activations"}},
    "sgp": {},
    "sgp bf16": {"wire": "bf16"},
}
"""Those whose result is the same every time: it has to be the CPU's, to the bit."""


own: set[int] = set()
"""The devices that this rank has had: what a former run has left may still touch its own."""


def train(folder: str, device: str, name: str, options: dict[str, Any]) -> torch.Tensor:
    """The trained parameters; a step for each batch of 16."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(144, 24),
        nn.ReLU(),
        nn.Linear(24, 10),
    )
    algorithm = name.split()[0]
    run = DataParallel(
        module,
        algorithm=algorithm,
        device=device,
        samples=16 * STEPS * WORLD.size,
        batch_size=16,
        lr=0.02,
        lr_schedule="constant",
        bucket_mb=0.004,
        run_dir=f"{folder}/{name.replace(' ', '-')}-{device}",
        quiet=True,
        overwrite=True,
        **options,
    )
    runtime.forget()
    few: Any = Subset(cast(Any, load_dataset("digits").train), range(480))
    for images, labels in run.batches(few):
        loss = nn.functional.cross_entropy(module(images), labels)
        loss.backward()
        run.step(loss)
    if accelerator.is_accelerator(run.device):
        own.add(run.device.index)
    others = set(runtime.touched()) - own
    expect(not others, f"{name}: {run.device} is this rank's, and {others} were touched")
    return torch.cat([p.detach().cpu().reshape(-1) for p in module.parameters()])


def expect(is_so: bool, what: str) -> None:
    """End the job if it is not."""
    if not is_so:
        print(f"rank {WORLD.rank}: {what}", file=sys.stderr, flush=True)
        WORLD.Abort(1)


def anywhere(flag: bool) -> bool:
    return bool(WORLD.allreduce(int(flag), MPI.MAX))


def check_equal(folder: str) -> None:
    for name, options in EQUAL.items():
        expected = train(folder, "cpu", name, options)
        result = train(folder, "gpu", name, options)
        error = (result - expected).abs().max().item()
        expect(torch.equal(result, expected), f"{name}: differs from the CPU's by {error}")
        expect(not guarded.found, f"{name}: handed over too early: {guarded.found}")


def check_all(folder: str) -> None:
    """What is not the same every time keeps its books, or the run would end with an error."""
    for name in sorted(ALGORITHMS):
        result = train(folder, "gpu", name, {})
        expect(bool(result.isfinite().all()), f"{name}: not finite")
        expect(not guarded.found, f"{name}: handed over too early: {guarded.found}")


# -- mistakes that have to be found --------------------------------------------------------
@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def copy_at_once(self: accelerator.CopyStream, source: torch.Tensor, target: torch.Tensor) -> Any:
    """:meth:`CopyStream.copy` that does not wait for what computes ``source``."""
    with self._module.stream(self._stream):
        target.copy_(source, non_blocking=True)
        return accelerator.CopyEvent(self._stream.record_event(), self._device)


@contextmanager
def receives_posted_at_once() -> Iterator[None]:
    """Sums may then come into memory that the device still reads the last ones from."""
    kind = over_transport.DirectAllReduce
    post, exchange = kind._await_sums, kind._exchange

    def early(self: Any, pending: Any) -> None:
        post(self, pending)
        exchange(self, pending)

    with (
        replaced(kind, "_exchange", early),
        replaced(kind, "_await_sums", lambda self, pending: None),
    ):
        yield


DEFECTS: dict[str, tuple[str, tuple[int, int], Callable[[], Any]]] = {
    "no wait for the stream": (
        "bsp",
        LATE_KERNELS,
        lambda: replaced(accelerator.CopyStream, "copy", copy_at_once),
    ),
    "a send without its event": (
        "bsp",
        LATE_COPIES,
        lambda: replaced(accelerator.CopyEvent, "query", lambda self: True),
    ),
    "a sum before its event": (
        "ar-sgd",
        LATE_COPIES,
        lambda: replaced(over_transport, "_happened", lambda event: True),
    ),
    "a receive into memory that a copy reads": (
        "ar-sgd bf16",
        LATE_COPIES,
        receives_posted_at_once,
    ),
    "a temporary that is not kept": (
        "bsp dgc",
        LATE_COPIES,
        lambda: replaced(accelerator.CopyStream, "_keep", lambda self, source: None),
    ),
    "a model that changes while it is copied": (
        "sgp",
        LATE_COPIES,
        lambda: replaced(accelerator.CopyEvent, "hold", lambda self: None),
    ),
}


def check_defects(folder: str) -> None:
    for defect, (name, delays, plant) in DEFECTS.items():
        runtime.set_delays(*delays, WORLD.rank)
        expected = train(folder, "gpu", name, EQUAL[name])
        expect(not guarded.found, f"before {defect}: {guarded.found}")
        with plant():
            result = train(folder, "gpu", name, EQUAL[name])
        differs = anywhere(not torch.equal(result, expected))
        was_told = anywhere(bool(guarded.found))
        guarded.found.clear()
        expect(differs or was_told, f"{defect}: not found")
        if WORLD.rank == 0:
            print(f"found: {defect}: differs {differs}, told {was_told}", flush=True)


runtime.set_delays(COPIES, KERNELS, WORLD.rank)
guarded.install()
{"equal": check_equal, "all": check_all, "defects": check_defects}[sys.argv[2]](sys.argv[1])
if WORLD.rank == 0:
    print("done", flush=True)
