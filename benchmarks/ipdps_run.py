"""One cell of the IPDPS 2021 study in virtual time: its cluster, its options, its speed-up."""

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
"""Workers of a virtual machine; two are on each machine and share its link."""
MACHINES = 3
COARSE_MB = 16.0
"""The largest message without servers: nothing there takes time for each message."""
SSP_BOUND = 10
WHOLE_MODELS = 3
"""Steps more until a run with differences is settled: the first answers are whole models."""
PERIOD = {"ssp": SSP_BOUND + 1}
"""Steps after which an algorithm's traffic repeats itself, where it is not each step."""


class ImageNetShape:
    """As many classes and pixels as ImageNet has, and one image: all that timing asks for."""

    def __len__(self) -> int:
        """One."""
        return 1

    def __getitem__(self, index: int, /) -> Any:
        """Nothing is calculated."""
        raise IndexError(index)


def imagenet_shape() -> Any:
    """For ``--dataset``: sizes the models as ImageNet does."""
    from aladdin_mpi.data.datasets import DatasetPair

    one = ImageNetShape()
    return DatasetPair(one, one, 1000, 3, 224, "imagenet-shape")


class _Layer(nn.Module):
    """A convolution and its batch norm as one layer, of which sharding leaves nothing behind."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        for part, module in enumerate(parts):
            for name, parameter in module.named_parameters():
                self.register_parameter(f"{name}_{part}", nn.Parameter(parameter.detach()))


def resnet50(num_classes: int) -> nn.Module:
    """The sizes of ResNet-50, in the 54 layers that give it its name (4 are shortcuts)."""
    from torchvision.models import resnet50 as build

    whole = build(num_classes=num_classes)
    leaves = [module for module in whole.modules() if list(module.parameters(recurse=False))]
    pairs = list(zip(leaves[:-1:2], leaves[1:-1:2], strict=True))
    return nn.Sequential(*(_Layer(*pair) for pair in pairs), leaves[-1])


@dataclass(frozen=True)
class Run:
    """What is simulated.

    Attributes:
        gbit: of each machine's link.
        stage: see :data:`benchmarks.ipdps_paper.STAGES`; for algorithms without servers
            ``wait-free``.
        per_vm: servers for the workers of a virtual machine: 1, 2 or 4.
        extra: seconds that a step takes besides computing, not hidden by anything.
        factor: on the time of computing.
        coalesce: ``--ssp-coalesce``.
        rounds: steps of each worker until the run is taken to be settled, and then as many that
            are measured; more where an algorithm's traffic repeats itself after more.
        cluster: changed options of the modelled cluster.
        bucket_mb: the largest message; None: the network's.
        single: one server, whatever ``per_vm`` says.
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
        """Names the run in the file of those that are done."""
        parts = (self.network, self.gbit, self.algorithm, self.workers, self.stage, self.per_vm)
        more = (self.extra, self.factor, self.bucket_mb, self.coalesce, self.rounds, self.single)
        return json.dumps([*parts, *more, sorted(self.cluster.items())])

    @property
    def servers(self) -> int:
        """Ratio to the workers as asked for, but none without a layer; one without sharding."""
        if self.single or self.stage == "none":
            return 1
        machines = -(-self.workers // VM)
        return min(machines * self.per_vm, self.workers, NETWORKS[self.network].layers)

    @property
    def hosts(self) -> int:
        """One virtual machine, or two on a machine each, or all three machines."""
        return min(MACHINES, -(-self.workers // VM))

    def options(self, folder: Path, steps: int) -> SimulateOptions:
        """Those of `aladdin_mpi.simulate`."""
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
            # A sum of sparse gradients is not sparse: each worker sends its own.
            values |= {"bsp": {"host_first": self.stage != "dgc", "group": VM}}
            values |= {"ssp": {"bound": SSP_BOUND, "pull": "on-bound", "coalesce": self.coalesce}}
        if self.stage == "dgc":
            values |= {"compression": "dgc", "dgc": {"warmup_epochs": 0}}
        return SimulateOptions.model_validate(values)


def speed_up(run: Run) -> float:
    """Throughput over that of one worker that computes alone, once the run has settled.

    Virtual time: the same for every machine and every call.
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
    """Samples per second between two lines of metrics, ``whole`` samples apart each."""
    moments = {line["samples"]: line["seconds"] for line in reversed(lines)}
    reached = sorted(moments)
    start = next(samples for samples in reached if samples >= first * whole)
    end = next(samples for samples in reached if samples >= last * whole)
    return float((end - start) / (moments[end] - moments[start]))
