"""Count memory passes, messages, polls and sleeps along the path of a gradient.

Trains with ALADDIN over MPI, with every function on the path marked as a stage. The last line that
rank 0 prints is a JSON list with the counts of every rank.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mpi4py import MPI

# isort: split
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.data import TensorDataset

from aladdin_mpi.algorithms import aladdin
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.exchange.server import GradientSum
from aladdin_mpi.exchange.server_mailbox import ModelSender
from aladdin_mpi.exchange.worker_mailbox import ModelInbox
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.process import guard
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Event, Request
from aladdin_mpi.transport.mpi import engine, progress
from aladdin_mpi.worker.gradient_pass import GradientCheck, GradientPass
from benchmarks.programs.contenders import DECAY, LR, MOMENTUM, TIMEOUT, Task

SMALL = 1024
"""Largest size in bytes of tensors that are not counted: headers and single values."""
BACKWARD = "backward"
STAGES: list[tuple[Any, str, str]] = [
    (GradientPass, "compute", BACKWARD),
    (GradientCheck, "look", "look"),
    (MomentumSGD, "descend", "own update"),
    (DenseWire, "encode", "wire buffer"),
    (aladdin.AladdinServer, "_update", "update"),
    (ModelInbox, "_blend", "blend"),
    (GradientSum, "add", "accumulation"),
    (ModelSender, "_write", "model copy"),
]
"""Each stage's class, function and name."""


class Passes(TorchDispatchMode):
    """Counts the reads and writes of torch's operations in the current stage."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.operations: dict[str, Counter[str]] = defaultdict(Counter)
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.stage = ""
        self.gradient: Callable[[], int] = lambda: 0
        """Address of the gradient that backward writes into."""

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Count in this block; a stage inside backward counts separately."""
        before = self.stage
        if before in ("", BACKWARD):
            self.stage = stage
            self.calls[stage] += 1
        try:
            yield
        finally:
            self.stage = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.stage and not func.is_view:
            self._count(func, args, result)
        return result

    def _count(self, func: Any, args: Any, result: Any) -> None:
        schema = func._schema.arguments
        pairs = [
            (tensor, argument.alias_info is not None and argument.alias_info.is_write)
            for argument, value in zip(schema, args, strict=False)
            for tensor in tree_flatten(value)[0]
            if isinstance(tensor, Tensor) and tensor.nbytes > SMALL
        ]
        changed = [tensor for tensor, is_changed in pairs if is_changed]
        if self.stage == BACKWARD and not any(map(self._is_gradient, changed)):
            return  # computing
        name = func.overloadpacket.__name__
        overwrites = name in ("copy_", "_foreach_copy_", "zero_", "fill_")
        used = {t.data_ptr(): t for t, is_changed in pairs if not (is_changed and overwrites)}
        read = sum(tensor.nbytes for tensor in used.values())
        made = [] if changed else [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        written = sum(t.nbytes for t in changed + made if t.nbytes > SMALL)
        if read or written:
            self.operations[self.stage][name] += 1
            self.read[self.stage] += read
            self.written[self.stage] += written

    def _is_gradient(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.gradient()


def mark(passes: Passes) -> None:
    """Wrap the function of every stage to mark its begin and end."""
    for owner, name, stage in STAGES:
        setattr(owner, name, _marked(passes, getattr(owner, name), stage))


def count_training_only(transport: CountingTransport) -> None:
    """Exclude the start and the end of the job."""
    for role in (aladdin.AladdinServer, aladdin.AladdinWorker):
        setattr(role, "run", _counted(transport, role.run))  # noqa: B010


def _counted(transport: CountingTransport, run: Callable[..., None]) -> Callable[..., None]:
    def call(self: Any) -> None:
        transport.counts.clear()
        run(self)
        transport.in_training = transport.counts.copy()

    return call


def _marked(passes: Passes, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if stage == BACKWARD:
            step = args[0]
            assert isinstance(step, GradientPass)
            pointer = step.vector.untyped_storage().data_ptr()
            passes.gradient = lambda: pointer
        with passes.during(stage):
            return function(*args, **kwargs)

    return call


class CountingTransport(engine.MpiTransport):
    """Counts messages by tag and polls by thread."""

    def __init__(self, timeout: float) -> None:
        self.counts: Counter[str] = Counter()
        self.in_training: Counter[str] = Counter()
        super().__init__(timeout)
        self._complete = self._requests.complete
        self._requests.complete = self._counted  # type: ignore[method-assign]

    def isend(
        self,
        buffer: Tensor | Sequence[float],
        dest: int,
        tag: int,
        after: Event | None = None,
    ) -> Request:
        self.counts[f"sent {Tag(tag).name}"] += 1
        return super().isend(buffer, dest, tag, after)

    def _counted(self) -> None:
        self.counts[f"polls by {self._thread}"] += 1
        before = self._requests.completions
        self._complete()
        self.counts[f"completed by {self._thread}"] += self._requests.completions - before

    @property
    def _thread(self) -> str:
        mine = threading.current_thread() is self._polling.thread
        return "the progress thread" if mine else "the rank"

    def count_sleep(self) -> None:
        """Count a sleep."""
        self.counts[f"sleeps of {self._thread}"] += 1


class CountingTime:
    """The module ``time`` for the transport; counts every sleep."""

    def __init__(self, transport: CountingTransport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None:
        """Sleep and count it."""
        self._transport.count_sleep()
        time.sleep(seconds)


class CountingEvent(threading.Event):
    """Event that counts every wait that blocks."""

    def __init__(self, transport: CountingTransport) -> None:
        super().__init__()
        self._transport = transport

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._transport.count_sleep()
        return super().wait(timeout)


def train(task: Task, pi: int, bucket_mb: float) -> dict[str, Any]:
    """Train and return this rank's counts."""
    passes = Passes()
    mark(passes)
    module, images, labels = task.build()
    transport = CountingTransport(TIMEOUT)
    for names in (vars(engine), vars(progress)):
        names["time"] = CountingTime(transport)
    transport._signals.news = CountingEvent(transport)
    transport._signals.takes_over = CountingEvent(transport)
    count_training_only(transport)
    folder = Path(tempfile.mkdtemp(prefix="gradient-"))
    workers = transport.size - 1
    run = DataParallel(
        module,
        transport=transport,
        algorithm="aladdin",
        aladdin={"pi": pi},
        samples=task.steps * task.batch * workers,
        batch_size=task.batch,
        lr=LR,
        momentum=MOMENTUM,
        weight_decay=DECAY,
        bucket_mb=bucket_mb,
        device="cpu",
        run_dir=folder / "run",
        quiet=True,
    )
    items = TensorDataset(torch.zeros(task.batch, 1), torch.zeros(task.batch, dtype=torch.int64))
    with passes:
        for _ in run.batches(items):
            loss = cross_entropy(module(images), labels)
            loss.backward()
            run.step(loss)
    shutil.rmtree(folder, ignore_errors=True)
    rank = run._ready()
    role_counts = rank.session.role.counts()
    found = {
        "rank": transport.rank,
        "gradients": role_counts["applied" if run.is_server else "computed"],
        "gradient bytes": 4 * rank.context.replica.numel,
        "buckets": len(rank.context.layout.buckets),
        "counts": dict(transport.in_training),
        "stages": {
            stage: {
                "calls": passes.calls[stage],
                "operations": dict(passes.operations[stage]),
                "read": passes.read[stage],
                "written": passes.written[stage],
            }
            for stage in passes.calls
        },
    }
    transport.close()
    return found


def main() -> int:
    """Count."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True)
    add("--batch", type=int, required=True)
    add("--steps", type=int, required=True)
    add("--pi", type=int, required=True)
    add("--bucket-mb", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = train(Task(args.model, args.batch, args.steps), args.pi, args.bucket_mb)
    everyone = MPI.COMM_WORLD.gather(found)
    if everyone is not None:
        print(json.dumps(everyone), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
