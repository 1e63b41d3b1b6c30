"""The options of the probe, for described and for measured clusters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.cluster import FASTEST_GBIT, FASTEST_GBYTE, LONGEST_US, Host
from aladdin_mpi.options.general import Factor, Precision, Worker
from aladdin_mpi.options.reader import Setting, Settings, build, extra, kebab, option
from aladdin_mpi.probing.description import EXAMPLE, described

PROG = "aladdin_mpi.probe"
ABOUT = (
    "Write a cluster file for aladdin_mpi.simulate --cluster, with hosts, network and step time. "
    "Describe the cluster (without MPI), or measure it on the cluster itself: "
    "mpirun -np N python -m aladdin_mpi.probe --model NAME --batch-size N."
)
OUTPUT, DESCRIPTION, MEASURING = "output", "a description, without MPI", "measuring, under mpirun"
_output = partial(option, group=OUTPUT)
_described = partial(option, group=DESCRIPTION)
_measured = partial(option, group=MEASURING)
LONGEST_STEP = 1e5
"""Seconds."""
MOST_HOSTS = 1_000_000
Gbit = Annotated[float, Field(gt=0, le=FASTEST_GBIT)]


class ProbeOptions(BaseModel):
    """The command's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # -- output
    out: Path = _output(Path("cluster.toml"), "output file", unit="FILE")
    overwrite: bool = _output(False, "overwrite an existing file")

    # -- description
    describe: str | None = _described(
        None, f'description in words, such as "{EXAMPLE}, one node 3x slower"', unit="TEXT"
    )
    nodes: int | None = _described(None, "number of hosts", unit="HOSTS", ge=1, le=MOST_HOSTS)
    gpus_per_node: int | None = _described(
        None,
        "number of workers per host",
        unit="WORKERS",
        default_text="1 for a described cluster",
        ge=1,
        le=MOST_HOSTS,
    )
    bandwidth_gbit: float | None = _described(
        None, "bandwidth of a host's link, each way", unit="GBIT/S", gt=0, le=FASTEST_GBIT
    )
    links: dict[Host, Gbit] = _described(
        {}, "bandwidth of single hosts' links, counted from 0", unit="HOST=GBIT/S"
    )
    latency_us: float | None = _described(
        None, "latency between two hosts", unit="MICROSECONDS", ge=0, le=LONGEST_US
    )
    local_bandwidth_gbit: float | None = _described(
        None, "bandwidth inside a host", unit="GBIT/S", gt=0, le=FASTEST_GBIT
    )
    local_latency_us: float | None = _described(
        None, "latency inside a host", unit="MICROSECONDS", ge=0, le=LONGEST_US
    )
    memory_gbyte: float | None = _described(
        None, "memory bandwidth of one process", unit="GBYTE/S", gt=0, le=FASTEST_GBYTE
    )
    step_seconds: float | None = _described(
        None,
        "time of a step of a worker without slowdown",
        unit="SECONDS",
        gt=0,
        le=LONGEST_STEP,
    )
    jitter: float | None = _described(
        None, "relative standard deviation of the time of a step", unit="FRACTION", ge=0, le=10
    )
    slowdown: dict[Worker, Factor] = _described(
        {}, "slowdown factors of workers, counted from 0", unit="WORKER=FACTOR"
    )
    node_slowdown: dict[Host, Factor] = _described(
        {}, "slowdown factors of all workers of a host, counted from 0", unit="HOST=FACTOR"
    )

    # -- measuring
    model: str = _measured(
        "digits",
        "model to time, as for aladdin_mpi.train: a name, or package.module:function",
    )
    dataset: str = _measured(
        "digits",
        "dataset with the shape of the model's input, such as cifar10, imagenet or "
        "synthetic:3x32x32:10:10000; the values are random",
    )
    batch_size: int = _measured(32, "batch size of one worker", unit="SAMPLES", ge=1)
    image_size: int | None = _measured(
        None, "image size (side)", unit="PIXELS", default_text="that of the dataset", ge=1
    )
    precision: Precision = _measured("fp32", "precision of the forward and backward pass")
    device: Literal["auto", "cpu", "gpu", "cuda", "xpu"] = _measured(
        "auto", "device of the workers"
    )
    seconds: float = _measured(
        60.0, "time budget, without the start", unit="SECONDS", ge=1, le=3600
    )

    @model_validator(mode="after")
    def _check_named(self) -> ProbeOptions:
        if self.nodes is None:
            return self
        workers = self.nodes * (self.gpus_per_node or 1)
        for flag, named, count, what in (
            ("--links", self.links, self.nodes, "hosts"),
            ("--node-slowdown", self.node_slowdown, self.nodes, "hosts"),
            ("--slowdown", self.slowdown, workers, "workers"),
        ):
            if named and max(named) >= count:
                raise ValueError(
                    f"{flag}: expected {what} from 0 to {count - 1}, got {max(named)}; name another"
                )
        return self


def read(argv: Sequence[str] | None) -> tuple[ProbeOptions, bool]:
    """Return the options, and whether they describe a cluster; ``--help`` prints and exits.

    Raises:
        UserError: an unknown option, an invalid value, or a description that is not understood.
    """
    given = reader.read(ProbeOptions, argv, PROG, ABOUT)
    describes = bool(_of_group(DESCRIPTION, given))
    if describes:
        for name, setting in _of_group(MEASURING, given).items():
            raise UserError(
                f"{setting.origin}: expected only where a cluster is measured, got it beside a "
                f"description; leave --{kebab(name)} out, or measure without one"
            )
        if (text := given.get(("describe",))) is not None:
            words = described(str(text.value))
            given = {(name,): setting for name, setting in words.items()} | given
    options = build(ProbeOptions, given)
    if describes and options.nodes is None:
        raise UserError(
            "--nodes: expected the number of hosts, got none; add for example --nodes 16, or "
            '--describe "16 nodes x 4 GPUs"'
        )
    return options, describes


def _of_group(group: str, given: Settings) -> dict[str, Setting]:
    fields = ProbeOptions.model_fields
    return {name: s for (name, *_), s in given.items() if extra(fields[name])["group"] == group}
