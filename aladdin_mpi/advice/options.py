"""The adviser's options: a cluster, a model and a target."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.fields import option
from aladdin_mpi.options.general import SIZE_PREFIX
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.options.settings import Setting, Settings, build
from aladdin_mpi.options.toml_file import parse_part, read_part
from aladdin_mpi.probing.cluster_file import described_sections, rendered
from aladdin_mpi.probing.description import EXAMPLE
from aladdin_mpi.probing.options import read as read_description

FIELDS = {
    "bandwidth": "cluster.bandwidth_gbit",
    "latency": "cluster.latency_us",
    "step": "compute_time",
}
"""Names of ``--what-if`` changes, and the options of a simulation that they set."""
KNOWN = (*FIELDS, "servers", "workers", "slowdown")


@dataclass(frozen=True)
class Change:
    """A change of the cluster or the run.

    Attributes:
        text: as on the command line.
        fields: fields of a simulation's options by dotted names.
        servers: new number of servers; None if unchanged.
        workers: new number of workers, with as many per host; None if unchanged.
    """

    text: str
    fields: dict[str, Any]
    servers: int | None = None
    workers: int | None = None


def parse_change(text: str, base: SimulateOptions) -> Change:
    """Parse one change of ``--what-if``.

    Raises:
        UserError: an unknown name, or an invalid value.
    """
    name, separator, value = text.partition("=")
    if not separator or name not in KNOWN:
        raise UserError(
            f"--what-if: expected NAME=VALUE with one of {' '.join(KNOWN)}, got {text!r}; write "
            "for example bandwidth=100"
        )
    if name == "slowdown":
        worker, _, factor = value.partition("=")
        slow = int(_number(text, worker, whole=True, least=0))
        if slow >= base.workers:
            raise UserError(
                f"--what-if {text}: expected a worker from 0 to {base.workers - 1}, got {slow}; "
                "name another"
            )
        return Change(text, {"slowdown": {**base.slowdown, slow: _number(text, factor, least=1)}})
    if name in ("servers", "workers"):
        return Change(text, {}, **{name: int(_number(text, value, whole=True, least=1))})
    return Change(text, {FIELDS[name]: _number(text, value, 0 if name == "latency" else 1e-9)})


def _number(text: str, value: str, least: float, whole: bool = False) -> float:
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = float("nan")
    if not least <= number < float("inf"):
        what = "a whole number" if whole else "a number"
        raise UserError(
            f"--what-if {text}: expected {what} of {least:g} or more, got {value!r}; write for "
            "example bandwidth=100 servers=4 slowdown=0=10"
        )
    return number


def grown(base: SimulateOptions, workers: int) -> dict[str, Any]:
    """Return the fields of a cluster with another number of workers, with as many per host.

    Links of single hosts and slowdown factors of single workers are kept if these still exist.
    """
    cluster = base.cluster
    on_host = -(-base.workers // cluster.hosts)
    hosts = -(-workers // on_host)
    return {
        "workers": workers,
        "cluster.hosts": hosts,
        "cluster.worker_hosts": (),
        "cluster.links": {host: rate for host, rate in cluster.links.items() if host < hosts},
        "slowdown": {worker: f for worker, f in base.slowdown.items() if worker < workers},
    }


PROG = "aladdin_mpi.advise"
ABOUT = (
    "Recommend an algorithm and its options for a cluster, described by a file of "
    "aladdin_mpi.probe or in words, from timed simulations of every algorithm."
)
_option = partial(option, group="advice")
_pilot = partial(option, group="pilot")
SECONDS, LONGER = 240.0, 450.0
LARGE = 256
"""Number of workers above which :data:`LONGER` is the default time."""


class AdviseOptions(BaseModel):
    """The command's options."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cluster: Path | None = _option(None, "cluster file written by aladdin_mpi.probe", unit="FILE")
    describe: str | None = _option(
        None, f'description of the cluster instead, such as "{EXAMPLE}"', unit="TEXT"
    )
    model: str = _option(
        "resnet50",
        "model to train: a name, package.module:function, or size:MB, the size of its parameters",
    )
    dataset: str = _option("imagenet", "dataset, which determines the shape of the model's input")
    batch_size: int = _option(
        32,
        "batch size of one worker, for which the cluster's step time holds",
        unit="SAMPLES",
        ge=1,
    )
    target: Literal["accuracy", "time"] = _option(
        "accuracy",
        "ranking criterion: accuracy (throughput times sample efficiency) or time (throughput)",
    )
    gpu_memory: float | None = _option(
        None,
        "memory of a GPU without the model's activations; candidates that need more are left out, "
        "by what was measured with SGD",
        unit="GB",
        gt=0,
    )
    algorithms: tuple[str, ...] = _option(
        (), "algorithms to try, separated by commas or spaces", unit="NAME", default_text="all"
    )
    what_if: tuple[str, ...] = _option(
        (),
        "changes to try one by one with the recommendation, separated by spaces: bandwidth=GBIT/S "
        "latency=MICROSECONDS step=SECONDS servers=N workers=N slowdown=WORKER=FACTOR",
        unit="NAME=VALUE",
    )
    seconds: float | None = _option(
        None,
        "time budget; candidates for which it does not suffice are listed",
        unit="SECONDS",
        gt=0,
        default_text=f"{SECONDS:g}, or {LONGER:g} with more than {LARGE} workers",
    )
    jobs: int | None = _option(
        None, "number of simultaneous simulations", default_text="number of cores", ge=1
    )
    seed: int = _option(0, "random seed of all simulations", ge=0)
    out: Path | None = _option(
        None, "folder for advice.md, advice.json and advice.png", unit="FOLDER"
    )
    overwrite: bool = _option(False, "overwrite existing advice in --out")
    quiet: bool = _option(False, "do not show progress")

    pilot: int | None = _pilot(
        None,
        "measure sample efficiency by simulated training of --model on --dataset with this many "
        "steps, instead of using the table of measured runs",
        unit="STEPS",
        ge=20,
    )
    data_dir: Path | None = _pilot(None, "folder of the dataset, if it requires one", unit="FOLDER")
    lr: float | None = _pilot(
        None,
        "learning rate of one worker, in the measurement and in the printed commands",
        unit="RATE",
        gt=0,
        default_text="that of aladdin_mpi.train",
    )

    @property
    def is_size(self) -> bool:
        """Whether only the size of the model is known."""
        return self.model.startswith(SIZE_PREFIX)

    @model_validator(mode="after")
    def _check_trainable(self) -> AdviseOptions:
        for name in ("pilot", "lr"):
            if self.is_size and getattr(self, name) is not None:
                raise ValueError(
                    f"--{name} requires a model that can be trained, not {self.model}. Name one "
                    f"with --model, or leave --{name} out."
                )
        return self


@dataclass(frozen=True)
class AdviceRequest:
    """A request to the adviser, with the cluster as settings of simulations.

    Attributes:
        cluster: settings of :class:`SimulateOptions`, including the numbers of workers and hosts.
        source: origin of the cluster: a file or an option.
    """

    options: AdviseOptions
    cluster: Settings
    source: str
    changes: tuple[Change, ...]

    @property
    def jobs(self) -> int:
        """The number of simultaneous simulations."""
        return self.options.jobs or len(os.sched_getaffinity(0))

    def seconds(self, workers: int) -> float:
        """Return the time budget for this number of workers."""
        return self.options.seconds or (LONGER if workers > LARGE else SECONDS)

    def simulated(self, more: Mapping[str, Any]) -> SimulateOptions:
        """Return options of a simulation on the cluster; ``more`` has dotted names of fields."""
        return build(SimulateOptions, self.cluster | _settings(more))

    def on(self, changed: Mapping[str, Any]) -> AdviceRequest:
        """Return the request with some fields of the cluster changed."""
        return replace(self, cluster=self.cluster | _settings(changed))


def _settings(fields: Mapping[str, Any]) -> Settings:
    return {tuple(name.split(".")): Setting(value, name) for name, value in fields.items()}


def read(argv: Sequence[str] | None) -> AdviceRequest:
    """Read the command line; ``--help`` prints and exits.

    Raises:
        UserError: an unknown option, an invalid value, or no valid cluster.
    """
    options = build(AdviseOptions, reader.read(AdviseOptions, argv, PROG, ABOUT))
    settings, source = _cluster(options)
    request = AdviceRequest(options, settings, source, ())
    base = request.simulated({"compute": "timed"})
    if base.workers < 2:
        raise UserError(
            f"{source}: expected at least 2 workers, got {base.workers}; describe a cluster with "
            "more"
        )
    if ("compute_time",) not in settings:
        raise UserError(
            f'{source}: the time of a step is missing. Add compute-time to the file, or "step '
            '0.2 s" to the description.'
        )
    return replace(request, changes=tuple(parse_change(text, base) for text in options.what_if))


def _cluster(options: AdviseOptions) -> tuple[Settings, str]:
    if (options.cluster is None) == (options.describe is None):
        got = "none" if options.cluster is None else "both"
        raise UserError(
            f"--cluster and --describe: expected exactly one of them, got {got}; pass a file of "
            f'aladdin_mpi.probe, or for example --describe "{EXAMPLE}"'
        )
    if options.cluster is not None:
        settings = read_part(SimulateOptions, "cluster", options.cluster, "--cluster")
        return settings, str(options.cluster)
    described, _ = read_description(["--describe", str(options.describe)])
    text = rendered("Described.", described_sections(described))
    return parse_part(SimulateOptions, "cluster", text, "--describe"), "--describe"
