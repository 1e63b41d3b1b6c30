"""Simulate one cell of the IPDPS 2021 study: its cluster, its options, its speedup."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.run.trainer import simulate
from benchmarks.ipdps_paper import JITTER, NETWORKS, SERVED
from benchmarks.spread import spread

VM = 4
"""Workers per virtual machine; two virtual machines share each machine's link."""
MACHINES = 3
COARSE_MB = 16.0
"""The largest message without servers, where messages cost no time of their own."""
SSP_BOUND = 10
WHOLE_MODELS = 3
"""Additional steps until a run with differences settles: the first answers are whole models."""
PERIOD = {"ssp": SSP_BOUND + 1}
"""Steps after which an algorithm's traffic repeats, if that is not every step."""


class ImageNetShape:
    """A data set with ImageNet's classes and pixels and a single image, sufficient for timing."""

    def __len__(self) -> int:
        """One."""
        return 1

    def __getitem__(self, index: int, /) -> Any:
        """Raise an error: timed computing never reads a sample."""
        raise IndexError(index)


def imagenet_shape() -> Any:
    """Return the data set for ``--dataset``, which sizes the models as ImageNet does."""
    from aladdin_mpi.data.datasets import DatasetPair

    one = ImageNetShape()
    return DatasetPair(one, one, 1000, 3, 224, "imagenet-shape")


class _Layer(nn.Module):
    """A convolution and its batch norm as one layer, so that sharding keeps them together."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for part, module in enumerate(parts):
            for name, parameter in module.named_parameters():
                self.register_parameter(f"{name}_{part}", nn.Parameter(parameter.detach()))


def resnet50(num_classes: int) -> nn.Module:
    """A model with the sizes of ResNet-50, in its 54 layers (4 are shortcuts)."""
    from torchvision.models import resnet50 as build

    whole = build(num_classes=num_classes)
    leaves = [module for module in whole.modules() if list(module.parameters(recurse=False))]
    pairs = list(zip(leaves[:-1:2], leaves[1:-1:2], strict=True))
    return nn.Sequential(*(_Layer(*pair) for pair in pairs), leaves[-1])


@dataclass(frozen=True)
class Run:
    """A simulated run.

    Attributes:
        gbit: rate of each machine's link.
        stage: see :data:`benchmarks.ipdps_paper.STAGES`; ``wait-free`` for algorithms without
            servers.
        per_vm: servers for the workers of a virtual machine: 1, 2 or 4.
        extra: seconds of a step in addition to computing, not overlapped with anything.
        factor: factor on the computing time.
        coalesce: ``--ssp-coalesce``.
        rounds: steps of each worker until the run counts as settled, and number of measured steps
            after that; more if an algorithm's traffic repeats after more steps.
        cluster: changed options of the modelled cluster.
        bucket_mb: the largest message; None: the network's.
        single: use one server, regardless of ``per_vm``.
    """

    network: str
    gbit: int
    algorithm: str
    workers: int
    stage: str = "wait-free"
    per_vm: int = 1
    extra: float = 0.0
    factor: float = 1.0
    bucket_mb: float | None = None
    coalesce: bool = False
    rounds: int = 8
    cluster: Mapping[str, float] = field(default_factory=dict)
    single: bool = False

    @property
    def key(self) -> str:
        """Return the run's key in the file of finished runs."""
        parts = (self.network, self.gbit, self.algorithm, self.workers, self.stage, self.per_vm)
        more = (self.extra, self.factor, self.bucket_mb, self.coalesce, self.rounds, self.single)
        return json.dumps([*parts, *more, sorted(self.cluster.items())])

    @property
    def servers(self) -> int:
        """Return the number of servers by ratio, at most one per layer; one without sharding."""
        if self.single or self.stage == "none":
            return 1
        machines = -(-self.workers // VM)
        return min(machines * self.per_vm, self.workers, NETWORKS[self.network].layers)

    @property
    def hosts(self) -> int:
        """Return the hosts: one virtual machine, two on one machine each, or all three machines."""
        return min(MACHINES, -(-self.workers // VM))

    def options(self, folder: Path, steps: int) -> SimulateOptions:
        """Return the options of `aladdin_mpi.simulate`."""
        network, served = NETWORKS[self.network], self.algorithm in SERVED
        batch = network.batch
        values: dict[str, Any] = {
            "algorithm": self.algorithm,
            "model": network.model,
            "dataset": "benchmarks.ipdps_run:imagenet_shape",
            "compute": "timed",
            "compute_time": network.seconds * self.factor + self.extra,
            "jitter": JITTER,
            "workers": self.workers,
            "batch_size": batch,
            "samples": self.workers * batch * steps,
            "log_every": self.workers * batch,
            "bucket_mb": self.bucket_mb or (network.bucket_mb if served else COARSE_MB),
            "wait_free": self.stage in ("wait-free", "dgc"),
            "run_dir": folder,
            "overwrite": True,
            "quiet": True,
            "worker_timeout": 0.0,
            "cluster": {
                "hosts": self.hosts,
                "bandwidth_gbit": self.gbit,
                "placement": spread(self.servers if served else 0),
                **self.cluster,
            },
        }
        if served:
            values |= {"servers": self.servers, "sharding": "layer"}
            # A sum of sparse gradients is not sparse, so each worker sends its own.
            values |= {"bsp": {"host_first": self.stage != "dgc", "group": VM}}
            values |= {"ssp": {"bound": SSP_BOUND, "pull": "on-bound", "coalesce": self.coalesce}}
        if self.stage == "dgc":
            values |= {"compression": "dgc", "dgc": {"warmup_epochs": 0}}
        return SimulateOptions.model_validate(values)


def speed_up(run: Run) -> float:
    """Return a settled run's throughput relative to one worker that computes alone.

    The simulated result is the same on every machine and in every call.
    """
    first = max(run.rounds, PERIOD.get(run.algorithm, 1))
    last = 2 * first
    if run.stage == "dgc":
        first, last = first + WHOLE_MODELS, last + WHOLE_MODELS
    with tempfile.TemporaryDirectory(prefix="ipdps-") as folder:
        simulate(run.options(Path(folder), last + 1))
        lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").open()]
    network = NETWORKS[run.network]
    return (
        rate(lines, run.workers * network.batch, first, last)
        * network.seconds
        * run.factor
        / (network.batch)
    )


def rate(lines: Sequence[Mapping[str, Any]], whole: int, first: int, last: int) -> float:
    """Return the samples per second between two metrics lines, each ``whole`` samples apart."""
    moments = {line["samples"]: line["seconds"] for line in reversed(lines)}
    reached = sorted(moments)
    start = next(samples for samples in reached if samples >= first * whole)
    end = next(samples for samples in reached if samples >= last * whole)
    return float((end - start) / (moments[end] - moments[start]))
