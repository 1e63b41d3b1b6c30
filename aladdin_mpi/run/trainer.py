"""The built-in training of a model on a dataset, through the public interface."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from aladdin_mpi.accelerator import is_accelerator
from aladdin_mpi.control.exchange import all_or_none
from aladdin_mpi.data import loading
from aladdin_mpi.data.datasets import DatasetPair, describe_set, load_dataset
from aladdin_mpi.data.imagefolder import Fault
from aladdin_mpi.data.models import build_model
from aladdin_mpi.data.preparation import check_images, stage
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.hooks.measurement import Measurement, Sums, reestimate_batch_norm
from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.general import SIZE_PREFIX
from aladdin_mpi.options.run import RunOptions, SimulateOptions, check_cluster, check_failures
from aladdin_mpi.process.guard import no_exit, warn
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.session.plan import samples_of
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

EVALUATION_BATCH = 256
LARGEST_MODEL = 1e9
"""MB."""
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@no_exit()  # also in the user's model
def train(options: RunOptions, transport: Transport) -> dict[str, Any]:
    """Train with ``options`` and return the summary at rank 0; every rank calls it."""
    if options.compute == "timed":  # no gradients are computed
        module, length = all_or_none(transport, lambda: _sizes(options, transport.size))
        timed = DataParallel(module, options, transport=transport)
        for _ in timed.batches(length):
            timed.step()
        return timed.summary
    data_dir = stage(transport, options.data_dir, options.stage, options.timeout, options.quiet)
    local = options.model_copy(update={"data_dir": data_dir})
    faults = check_images(local, transport)
    data, module = all_or_none(transport, lambda: _prepare(local, faults))
    run = DataParallel(module, options, transport=transport, evaluate=_evaluation(options, data))
    dtype = AUTOCAST.get(options.precision)
    for inputs, labels in run.batches(data.train):
        kind = inputs.device.type
        with torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None):
            outputs = module(inputs)
        loss = functional.cross_entropy(outputs.float(), labels) / options.accumulate
        (run.scale(loss) if options.precision == "fp16" else loss).backward()
        run.step(loss)
    return run.summary


def _prepare(
    options: RunOptions, faults: tuple[Fault, ...] | None
) -> tuple[DatasetPair, nn.Module]:
    if options.model.startswith(SIZE_PREFIX):
        raise UserError(
            f"--model {options.model} requires --compute timed. Add --compute timed, or name a "
            "model that can be trained."
        )
    data = load_dataset(
        options.dataset,
        options.data_dir,
        options.download,
        options.image_size,
        options.cache,
        options.augment,
        options.corrupt_images,
        faults,
        options.shuffle_buffer,
    )
    torch.manual_seed(options.seed)
    module = build_model(options.model, data.num_classes, data.in_channels, data.image_size)
    return data, module


def _evaluation(options: RunOptions, data: DatasetPair) -> Measurement:
    def prepare(module: nn.Module) -> None:
        batches = loading.train_batches_for_statistics(
            data.train, options.batch_size, options.bn_batches, options.seed
        )
        device = _device_of(module)
        reestimate_batch_norm(module, (((inputs.to(device),), {}) for inputs, _ in batches))

    def sums(module: nn.Module, part: int, parts: int) -> Sums:
        # During training, a device may not have memory for more than a training batch.
        on_device = is_accelerator(_device_of(module))
        batch_size = options.batch_size if on_device else EVALUATION_BATCH
        return test_sums(module, data, part, parts, batch_size)

    return Measurement(prepare, sums, test_figures)


def test_sums(module: nn.Module, data: DatasetPair, part: int, parts: int, batch_size: int) -> Sums:
    """Return the correct predictions and the cross-entropy, summed over a part of the test data."""
    right, loss, count = 0, 0.0, 0
    device = _device_of(module)
    module.eval()
    with torch.no_grad():
        for batch in loading.test_batches(data.test, batch_size, part=part, parts=parts):
            inputs, labels = (each.to(device) for each in batch)
            outputs = module(inputs)
            loss += functional.cross_entropy(outputs, labels, reduction="sum").item()
            right += int((outputs.argmax(1) == labels).sum())
            count += len(labels)
    return {"right": right, "loss": loss, "count": count}


def test_figures(sums: Sums) -> dict[str, float]:
    """Return the accuracy (0 to 1) and the mean cross-entropy.

    Raises:
        UserError: no image could be read.
    """
    count = sums["count"]
    if not count:
        raise UserError(
            "--corrupt-images skip: no image of the test set can be read. Check --data-dir."
        )
    return {"test_accuracy": sums["right"] / count, "test_loss": sums["loss"] / count}


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _sizes(options: RunOptions, ranks: int) -> tuple[nn.Module, int]:
    """Return a module with the model's number of parameters, and the length of an epoch."""
    if options.model.startswith(SIZE_PREFIX):
        servers = options.servers if find_algorithm(options.algorithm).has_servers else 0
        length = samples_of(options, None, ranks - servers)
        if length is None:
            raise UserError(
                f"--model {options.model} requires --samples or --steps, because there is no "
                "data set. Add one of them."
            )
        return module_of_size(options.model), length
    return _sizes_of(
        options.model,
        options.dataset,
        options.data_dir,
        options.download,
        options.image_size,
        options.corrupt_images,
    )


@lru_cache(maxsize=1)  # all ranks of a simulation share the module
def _sizes_of(model: str, *dataset: Any) -> tuple[nn.Module, int]:
    data = describe_set(*dataset)
    with torch.device("meta"):
        module = build_model(model, data.classes, data.channels, data.size)
    return module, data.samples


def module_of_size(name: str) -> nn.Module:
    """Return the module for ``size:MB``, on the device "meta".

    Raises:
        UserError: it is not a size.
    """
    text = name.removeprefix(SIZE_PREFIX)
    try:
        megabytes = float(text)
    except ValueError:
        megabytes = 0.0
    if not 0 < megabytes <= LARGEST_MODEL:
        raise UserError(
            f"--model {name}: expected size:MB with MB above 0 and at most {LARGEST_MODEL:g}, got "
            f"{text!r}; write for example size:94"
        )
    return nn.Linear(round(megabytes * 250_000), 1, bias=False, device="meta")


def simulate(options: SimulateOptions) -> dict[str, Any]:
    """Train on a modelled cluster and return the summary.

    Raises:
        UserError: an unknown algorithm, or a cluster that is too small for the ranks.
    """
    algorithm = find_algorithm(options.algorithm)
    servers = options.servers if algorithm.has_servers else 0
    size = options.workers + servers + options.spares
    check_cluster(options, size)
    start = 0.0
    if options.resume is not None:
        start = float(CheckpointStore(Path(options.resume)).manifest()["moment"])
    silence = options.worker_timeout or None
    cluster = VirtualCluster(size, options.cluster.placed(servers), options.seed, start, silence)
    summaries = cluster.run(lambda transport: train(options, transport))
    warn(check_failures(options, summaries, start))
    return next(filter(None, summaries), {})  # of the rank that was rank 0 at the end
