"""Check settings that only affect a GPU: precision, cuDNN, memory format, compilation, NCCL.

Runs under mpirun with one rank, or with two for NCCL between GPUs; the argument is a folder for the
runs. With one rank the algorithm is ar-sgd.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import Subset

from aladdin_mpi import DataParallel, accelerator, load_dataset
from aladdin_mpi.run.handshake import GPU_BUCKET_MB
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.training import BATCH, WORLD, make, network, parameters

PART = "settings"
TOLERANCE = 1e-3
"""Largest difference from the default settings, relative to the largest change in training."""
HALF_TOLERANCE = 0.2
"""The same for a forward pass in 16 bits: the loss is rounded to three digits."""
SCALED_STEPS, OVERFLOW = 12, 2
"""Steps in float16, and the one in which the loss overflows."""
Loss = Callable[[DataParallel, nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def plain_loss(
    run: DataParallel, module: nn.Module, images: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Return the loss in the parameters' precision."""
    return nn.functional.cross_entropy(module(images), labels)


def cast_loss(dtype: torch.dtype) -> Loss:
    """Return a loss whose forward pass is in ``dtype``."""

    def loss(
        run: DataParallel, module: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with torch.autocast(images.device.type, dtype):
            return nn.functional.cross_entropy(module(images), labels)

    return loss


def train(folder: str, name: str, loss_of: Loss = plain_loss, **options: Any) -> torch.Tensor:
    """Return the parameters after a run with ``options``."""
    module = network()
    run = make(module, folder, "gpu", f"ar-sgd {name}", **options)
    for images, labels in _batches(run):
        loss = loss_of(run, module, images, labels)
        loss.backward()
        run.step(loss)
    return parameters(module)


def _batches(run: DataParallel) -> Iterator[Any]:
    data: Any = Subset(cast(Any, load_dataset("digits").train), range(480))
    return iter(run.batches(data))


class Comparison:
    """Compares runs with a run of the default settings.

    Args:
        folder: for the runs.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._expected = train(folder, "default")
        self._change = float((self._expected - parameters(network())).abs().max())

    def report(
        self, name: str, loss_of: Loss = plain_loss, tolerance: float = TOLERANCE, **options: Any
    ) -> None:
        """Train with other settings and print the row."""
        result = train(self._folder, name, loss_of, **options)
        error = float((result - self._expected).abs().max()) / self._change
        passed = error <= tolerance  # false for NaN
        figures = f"difference from the default {error:.1e} of the change"
        rows.report(PART, name, passed, figures, f"at most {tolerance:g}")


def check_tf32(folder: str) -> None:
    """Measure the error of a product of matrices before and after a run with TF32."""
    before = _product_error()
    train(folder, "tf32", tf32=True)
    after = _product_error()
    torch.set_float32_matmul_precision("highest")
    figures = f"error of a matrix product {before:.1e}, with --tf32 {after:.1e}"
    rows.report(PART, "TF32", before < 1e-5 < after < 1e-2, figures)


def _product_error() -> float:
    a, b = torch.randn(2, 1024, 1024, device="cuda")
    exact = a.double() @ b.double()
    return float(((a @ b).double() - exact).norm() / exact.norm())


def check_loss_scale(folder: str) -> None:
    """Train in float16 with an overflow in one step; the scale has to halve."""
    module = network()
    start = parameters(module)
    run = make(module, folder, "gpu", "ar-sgd fp16", samples=BATCH * SCALED_STEPS)
    scales = []
    for number, (images, labels) in enumerate(_batches(run)):
        loss = cast_loss(torch.float16)(run, module, images, labels)
        scales.append(float(run.scale(torch.ones((), device=run.device))))
        run.scale(loss * float("inf") if number == OVERFLOW else loss).backward()
        run.step(loss)
    result = parameters(module)
    halved = scales[-1] == scales[0] / 2
    moved = bool(result.isfinite().all()) and float((result - start).abs().max()) > 0
    figures = f"scale {scales[0]:g}, after an overflow {scales[-1]:g}"
    rows.report(PART, "float16 with a loss scale", halved and moved, figures)


def check_pinned() -> None:
    """Register pinned memory, copy from it, and release it."""
    device = torch.device(accelerator.kind() or "cpu", 0)
    vector = accelerator.pinned(1 << 20, torch.float32, device)
    vector.copy_(torch.arange(1 << 20))
    there, event = accelerator.CopyStream(device).fetch(vector)
    arrived = bool(torch.equal(there.cpu(), vector)) and event.query()
    is_pinned = vector.is_pinned()
    del vector
    gc.collect()
    left = sum(type(each) is accelerator._Pages for each in gc.get_objects())
    figures = f"pinned: {is_pinned}, registered regions left: {left}"
    passed = is_pinned and arrived and left == 0
    rows.report(PART, "registration of pinned memory", passed, figures)


def check_bucket_size(folder: str) -> None:
    """Run without a given message size, and compare the size with the default for GPUs."""
    module = network()
    run = DataParallel(module, algorithm="ar-sgd", device="gpu", run_dir=f"{folder}/buckets")
    size = run.options.bucket_mb
    run.close()
    rows.report(PART, "size of messages", size == GPU_BUCKET_MB, f"at most {size:g} MB")


def compiled_loss() -> Loss:
    """Return a loss whose forward pass is compiled."""
    compiled: list[Any] = []

    def loss(
        run: DataParallel, module: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        if not compiled:
            compiled.append(torch.compile(module))
        return nn.functional.cross_entropy(compiled[0](images), labels)

    return loss


def check_nccl(folder: str) -> None:
    """Compare sums by NCCL between two GPUs with sums over MPI."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < WORLD.size:
        if WORLD.rank == 0:
            note = f"needs {WORLD.size} GPUs"
            rows.print_row(Row(PART, f"NCCL, {WORLD.size} ranks", SKIP, note=note))
        return
    expected = train(folder, "mpi", ar_sgd={"allreduce": "mpi"})
    result = train(folder, "nccl", ar_sgd={"allreduce": "torch"})
    change = float((expected - parameters(network())).abs().max())
    error = float((result - expected).abs().max()) / change
    if WORLD.rank == 0:
        figures = f"difference from MPI {error:.1e} of the change"
        rows.report(PART, f"NCCL, {WORLD.size} ranks", error <= TOLERANCE, figures)


def check_one_rank(folder: str) -> None:
    """Check the settings with one worker."""
    compare = Comparison(folder)
    check_pinned()
    check_bucket_size(folder)
    compare.report("--channels-last", channels_last=True)
    compare.report("--cudnn-benchmark", cudnn_benchmark=True)
    torch.backends.cudnn.benchmark = False
    compare.report("bfloat16", cast_loss(torch.bfloat16), HALF_TOLERANCE)
    check_loss_scale(folder)
    if is_test_device():
        for name in ("TF32", "torch.compile", "NCCL, 1 rank"):
            rows.print_row(Row(PART, name, SKIP, note="needs a GPU"))
        return
    compare.report("NCCL, 1 rank", ar_sgd={"allreduce": "torch"})
    check_tf32(folder)
    compare.report("torch.compile", compiled_loss())


def main() -> None:
    """Run the checks for this number of ranks."""
    if WORLD.size == 1:
        check_one_rank(sys.argv[1])
    else:
        check_nccl(sys.argv[1])


if __name__ == "__main__":
    main()
