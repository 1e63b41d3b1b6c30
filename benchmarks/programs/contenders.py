"""Contenders of `benchmarks.peers`: a training loop for each, written as its library recommends.

Each loop trains the same model on the same fixed batch, as Horovod's synthetic benchmark does, and
records the end of every step. All except the baseline sum the gradients of all ranks.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from aladdin_mpi.allreduce.torch_distributed import end_group
from aladdin_mpi.data.models import build_model
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.mpi.engine import MpiTransport

CLASSES = 10
PIXELS = 32
"""Pixels of an image's side."""
LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
TIMEOUT = 120.0
POWER_SGD_RANK = 1
"""PowerSGD's rank, as in torch's example: the strongest compression."""
POWER_SGD_START = 2
"""First compressed step: the smallest that error feedback allows."""
ONE_BUCKET_MB = 4096.0
"""Bucket size, larger than any model here."""


@dataclass(frozen=True)
class Task:
    """A model and the batch on which it is trained for ``steps`` steps.

    ``optimizer`` is "sgd", with momentum, or "adamw", with torch's defaults; ``pixels`` is an
    image's side.
    """

    model: str
    batch: int
    steps: int
    optimizer: str = "sgd"
    pixels: int = PIXELS

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Return the model, images and labels, the same on every rank and for every contender."""
        torch.manual_seed(1)
        module = build_model(self.model, CLASSES, 3, self.pixels)
        images = torch.randn(self.batch, 3, self.pixels, self.pixels)
        return module, images, torch.randint(CLASSES, (self.batch,))

    def torch_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for contenders that use torch's."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=DECAY)
        return torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=DECAY)

    def our_optimizer(self, module: nn.Module) -> dict[str, Any]:
        """Return the same for ``DataParallel``, whose default is momentum SGD."""
        if self.optimizer == "sgd":
            own = {"lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY}
            return {**own, "lr_schedule": "constant", "warmup_epochs": 0}
        return {"optimizer": self.torch_optimizer(module)}


Moments = list[float]
"""End of each step, by ``time.perf_counter``."""
LAST = 1
"""Number of steps after the measured ones."""


def mean_step(moments: Moments, warm_up: int) -> float:
    """Return the mean seconds of a step, without the first ones and without the `LAST`.

    The last call of ``run.step()`` returns only when the run has ended and its model is saved.
    """
    measured = moments[warm_up - 1 : -1]
    return (measured[-1] - measured[0]) / (len(measured) - 1)


Loop = Callable[[Task], Moments]


def _train(
    module: nn.Module,
    optimizer: Any,
    task: Task,
    images: Tensor,
    labels: Tensor,
    after: Callable[[], None] | None = None,
) -> Moments:
    moments = []
    for _ in range(task.steps):
        optimizer.zero_grad()
        cross_entropy(module(images), labels).backward()
        optimizer.step()
        moments.append(time.perf_counter())
        if after is not None:
            after()
    return moments


def alone(task: Task, after: Callable[[], None] | None = None) -> Moments:
    """Train each rank alone, to measure computing while the other ranks compute too.

    ``after`` is called after each step.
    """
    module, images, labels = task.build()
    return _train(module, task.torch_optimizer(module), task, images, labels, after)


# -- peers ----------------------------------------------------------------------------------
@contextmanager
def gloo() -> Iterator[None]:
    """Create a process group of all ranks, which are on one host."""
    world = MPI.COMM_WORLD
    make: Any = dist.TCPStore  # type: ignore[attr-defined]  # a compiled one, without type hints
    store = None
    if world.rank == 0:
        store = make("127.0.0.1", 0, world.size, True, wait_for_workers=False)
    port = world.bcast(store.port if store else None)
    if store is None:
        store = make("127.0.0.1", port, world.size, False)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    try:
        yield
    finally:
        world.Barrier()  # rank 0 has the store
        end_group()


def ddp(task: Task) -> Moments:
    """Train with DistributedDataParallel over gloo; gradients are views of its buckets."""
    return _ddp(task, None, lambda net: None)


def ddp_power_sgd(task: Task) -> Moments:
    """Train with torch's PowerSGD hook and one bucket.

    With several buckets, each of which the hook sums in several rounds, gloo ended a run of two
    ranks with "Received data size doesn't match expected size".
    """
    return _ddp(task, ONE_BUCKET_MB, _add_power_sgd)


def _ddp(
    task: Task, bucket_mb: float | None, prepare: Callable[[DistributedDataParallel], None]
) -> Moments:
    with gloo():
        module, images, labels = task.build()
        net = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
        prepare(net)
        return _train(net, task.torch_optimizer(net), task, images, labels)


def _add_power_sgd(net: DistributedDataParallel) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=POWER_SGD_START
    )
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@contextmanager
def horovod() -> Iterator[Any]:
    """Return ``horovod.torch``, initialised over MPI."""
    import horovod.torch as hvd

    hvd.init()
    try:
        yield hvd
    finally:
        hvd.shutdown()


def horovod_optimizer(task: Task) -> Moments:
    """Train as in examples/pytorch/pytorch_synthetic_benchmark.py of Horovod 0.28."""
    with horovod() as hvd:
        module, images, labels = task.build()
        plain = task.torch_optimizer(module)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=module.named_parameters())
        hvd.broadcast_parameters(module.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        return _train(module, optimizer, task, images, labels)


# -- ours -----------------------------------------------------------------------------------
def ar_sgd(backend: str) -> Loop:
    """Return a loop that trains with AR-SGD and an ``--ar-sgd-allreduce``."""
    return lambda task: ours(task, algorithm="ar-sgd", ar_sgd={"allreduce": backend})


def ar_sgd_compressed(task: Task) -> Moments:
    """Train with AR-SGD and deep gradient compression, as in its paper."""
    return ours(task, algorithm="ar-sgd", compression="dgc", dgc={"warmup_epochs": 0})


def ours(task: Task, **settings: Any) -> Moments:
    """Train with the public interface, including sample leases, metrics and a run folder."""
    transport = MpiTransport(timeout=TIMEOUT)
    folder = Path(tempfile.mkdtemp(prefix="peers-"))
    module, images, labels = task.build()
    items = TensorDataset(torch.zeros(task.batch, 1), torch.zeros(task.batch, dtype=torch.int64))
    workers = transport.size - settings.get("servers", 0)
    run = DataParallel(
        module,
        transport=transport,
        samples=task.steps * task.batch * workers,
        batch_size=task.batch,
        device="cpu",
        run_dir=folder / "run",
        quiet=True,
        **task.our_optimizer(module),
        **settings,
    )
    moments = []
    for _ in run.batches(items):
        loss = cross_entropy(module(images), labels)
        loss.backward()
        run.step(loss)
        moments.append(time.perf_counter())
    transport.close()
    shutil.rmtree(folder, ignore_errors=True)
    del run
    gc.collect()  # vectors of many models are few objects: Python's collector would run late
    return moments


LOOPS: dict[str, Loop] = {
    "alone": alone,
    "mpi": ar_sgd("mpi"),
    "horovod": ar_sgd("horovod"),
    "torch": ar_sgd("torch"),
    "dgc": ar_sgd_compressed,
    "DDP": ddp,
    "DDP PowerSGD": ddp_power_sgd,
    "hvd optimizer": horovod_optimizer,
}
