"""The options of the probe, which describes or measures a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.cluster import FASTEST_GBIT, FASTEST_GBYTE, LONGEST_US, Host
from aladdin_mpi.options.fields import extra, kebab, option
from aladdin_mpi.options.general import Factor, Precision, Worker
from aladdin_mpi.options.settings import Setting, Settings, build
from aladdin_mpi.probing.description import EXAMPLE, described

PROG = "aladdin_mpi.probe"
ABOUT = (
    "Write a cluster file, with hosts, network and step time, for aladdin_mpi.simulate --cluster. "
    "These are described by options, without MPI, or measured on the cluster itself: mpirun -np N "
    "python -m aladdin_mpi.probe --model NAME --batch-size N."
)
OUTPUT, DESCRIPTION, MEASURING = "output", "description, without MPI", "measurement, under mpirun"
_output = partial(option, group=OUTPUT)
_described = partial(option, group=DESCRIPTION)
_measured = partial(option, group=MEASURING)
LONGEST_STEP = 1e5
"""Longest step, in seconds."""
MOST_HOSTS = 1_000_000
Gbit = Annotated[float, Field(gt=0, le=FASTEST_GBIT)]


class ProbeOptions(BaseModel):
    """Options of the probe."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # -- output
    out: Path = _output(Path("cluster.toml"), "file to write", unit="FILE")
    overwrite: bool = _output(False, "replace an existing file")

    # -- description
    describe: str | None = _described(
        None, f'description in words, such as "{EXAMPLE}, one node 3x slower"', unit="TEXT"
    )
    nodes: int | None = _described(None, "number of hosts", unit="HOSTS", ge=1, le=MOST_HOSTS)
    gpus_per_node: int | None = _described(
        None,
        "number of workers per host",
        unit="WORKERS",
        default_text="1 in a description",
        ge=1,
        le=MOST_HOSTS,
    )
    bandwidth_gbit: float | None = _described(
        None,
        "bandwidth of each host's link in each direction",
        unit="GBIT/S",
        gt=0,
        le=FASTEST_GBIT,
    )
    links: dict[Host, Gbit] = _described(
        {}, "bandwidth of single hosts, counted from 0, such as 0=1", unit="HOST=GBIT/S"
    )
    latency_us: float | None = _described(
        None, "one-way latency between hosts", unit="MICROSECONDS", ge=0, le=LONGEST_US
    )
    local_bandwidth_gbit: float | None = _described(
        None, "bandwidth within a host", unit="GBIT/S", gt=0, le=FASTEST_GBIT
    )
    local_latency_us: float | None = _described(
        None, "latency within a host", unit="MICROSECONDS", ge=0, le=LONGEST_US
    )
    memory_gbyte: float | None = _described(
        None, "memory bandwidth of one process", unit="GBYTE/S", gt=0, le=FASTEST_GBYTE
    )
    step_seconds: float | None = _described(
        None,
        "step time of a worker without slowdown",
        unit="SECONDS",
        gt=0,
        le=LONGEST_STEP,
    )
    jitter: float | None = _described(
        None, "standard deviation of the logarithm of step times", unit="FRACTION", ge=0, le=10
    )
    slowdown: dict[Worker, Factor] = _described(
        {}, "slowdown factors of workers, counted from 0, such as 0=10", unit="WORKER=FACTOR"
    )
    node_slowdown: dict[Host, Factor] = _described(
        {},
        "slowdown factors of hosts, counted from 0, such as 0=3",
        unit="HOST=FACTOR",
    )

    # -- measuring
    model: str = _measured(
        "digits",
        "model to measure: built-in, or package.module:function",
    )
    dataset: str = _measured(
        "digits",
        "data set that determines the shape of inputs, such as cifar10",
        details="also imagenet or synthetic:3x32x32:10:10000; the values are random",
    )
    batch_size: int = _measured(32, "batch size per worker", unit="SAMPLES", ge=1)
    image_size: int | None = _measured(
        None, "side length of images", unit="PIXELS", default_text="that of the data set", ge=1
    )
    precision: Precision = _measured("fp32", "precision of forward and backward (autocast)")
    device: Literal["auto", "cpu", "gpu", "cuda", "xpu"] = _measured(
        "auto", "device of the workers"
    )
    seconds: float = _measured(
        60.0, "time limit of the measurement, excluding startup", unit="SECONDS", ge=1, le=3600
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
        UserError: an option is unknown, a value is invalid, or a description cannot be parsed.
    """
    given = reader.read(ProbeOptions, argv, PROG, ABOUT)
    describes = bool(_of_group(DESCRIPTION, given))
    if describes:
        for name, setting in _of_group(MEASURING, given).items():
            raise UserError(
                f"{setting.origin} cannot be combined with a description of the cluster. Leave "
                f"--{kebab(name)} out, or measure without a description."
            )
        if (text := given.get(("describe",))) is not None:
            words = described(str(text.value))
            given = {(name,): setting for name, setting in words.items()} | given
    options = build(ProbeOptions, given)
    if describes and options.nodes is None:
        raise UserError(
            "--nodes: the number of hosts is missing. Add for example --nodes 16, or --describe "
            '"16 nodes x 4 GPUs".'
        )
    return options, describes


def _of_group(group: str, given: Settings) -> dict[str, Setting]:
    fields = ProbeOptions.model_fields
    return {name: s for (name, *_), s in given.items() if extra(fields[name])["group"] == group}
