"""What the adviser is asked: a cluster, a model, and what counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.reader import Setting, Settings, build, option, parse_part, read_part
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing.cluster_file import described_sections, rendered
from aladdin_mpi.probing.description import EXAMPLE
from aladdin_mpi.probing.options import read as read_description

FIELDS = {
    "bandwidth": "cluster.bandwidth_gbit",
    "latency": "cluster.latency_us",
    "step": "compute_time",
}
"""Names of changes, and the fields of a simulation's options that they set."""
KNOWN = (*FIELDS, "servers", "workers", "slowdown")


@dataclass(frozen=True)
class Change:
    """One change.

    Attributes:
        text: as it was asked for.
        fields: of a simulation's options, with dots for those within.
        servers: their number; None: as it is.
        workers: likewise; the hosts grow with them.
    """

    text: str
    fields: dict[str, Any]
    servers: int | None = None
    workers: int | None = None


def parse_change(text: str, base: SimulateOptions) -> Change:
    """What a word of ``--what-if`` asks for.

    Raises:
        UserError: it is not known, or its value bad.
    """
    name, found, value = text.partition("=")
    if not found or name not in KNOWN:
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
    """Fields of a cluster with so many workers, as many on each host, and no host of its own kind.

    Links and slow-downs of single hosts and workers stay, as far as there still are such.
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
    "Recommend what to run on a cluster: timed virtual runs of every algorithm, and of the options "
    "that matter, on the cluster that a file of aladdin_mpi.probe describes."
)
_option = partial(option, group="advice")
_pilot = partial(option, group="pilot")
SECONDS, LONGER = 240.0, 450.0
LARGE = 256
"""Workers from which :data:`LONGER` is the time."""


class AdviseOptions(BaseModel):
    """What the adviser is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cluster: Path | None = _option(
        None, "the cluster: a file that aladdin_mpi.probe has written", unit="FILE"
    )
    describe: str | None = _option(
        None, f'the cluster in words instead, such as "{EXAMPLE}"', unit="TEXT"
    )
    model: str = _option(
        "resnet50",
        "model to be trained: a name, package.module:function, or size:MB by its parameters alone",
    )
    dataset: str = _option("imagenet", "data set, for the shape of the model's input")
    batch_size: int = _option(
        32,
        "batch of one worker's step, as the cluster's time of a step has it",
        unit="SAMPLES",
        ge=1,
    )
    target: Literal["accuracy", "time"] = _option(
        "accuracy",
        "what is best: accuracy: samples per second, weighted by what a sample teaches with the "
        "algorithm; time: samples per second alone",
    )
    algorithms: tuple[str, ...] = _option(
        (), "only these; several, apart by commas or spaces", unit="NAME", default_text="all"
    )
    what_if: tuple[str, ...] = _option(
        (),
        "changes, each of which is tried by itself on what is recommended: bandwidth=GBIT/S "
        "latency=MICROSECONDS step=SECONDS servers=N workers=N slowdown=WORKER=FACTOR; several, "
        "apart by spaces",
        unit="NAME=VALUE",
    )
    seconds: float | None = _option(
        None,
        "time for it; what is not known by then is told",
        unit="SECONDS",
        gt=0,
        default_text=f"{SECONDS:g}, with more than {LARGE} workers {LONGER:g}",
    )
    jobs: int | None = _option(
        None, "virtual runs at a time", default_text="one for each core", ge=1
    )
    seed: int = _option(0, "seed of all virtual runs", ge=0)
    out: Path | None = _option(
        None, "write advice.md, advice.json and advice.png to this folder too", unit="FOLDER"
    )
    overwrite: bool = _option(False, "replace them if they are there")
    quiet: bool = _option(False, "show no progress")

    pilot: int | None = _pilot(
        None,
        "find out what a sample teaches by so many steps of virtual training with real gradients, "
        "of --model on --dataset, instead of from the table of measured runs",
        unit="STEPS",
        ge=20,
    )
    data_dir: Path | None = _pilot(
        None, "folder of the data set, for those that need one", unit="FOLDER"
    )
    lr: float | None = _pilot(
        None,
        "learning rate of one worker",
        unit="RATE",
        gt=0,
        default_text="that of aladdin_mpi.train",
    )


@dataclass(frozen=True)
class AdviceRequest:
    """What is asked, with the cluster as settings of simulations.

    Attributes:
        cluster: of :class:`SimulateOptions`; among them the number of workers and hosts.
        source: where the cluster is from, in words.
    """

    options: AdviseOptions
    cluster: Settings
    source: str
    changes: tuple[Change, ...]

    @property
    def jobs(self) -> int:
        """Virtual runs at a time."""
        return self.options.jobs or len(os.sched_getaffinity(0))

    def seconds(self, workers: int) -> float:
        """The time for it, with so many workers."""
        return self.options.seconds or (LONGER if workers > LARGE else SECONDS)

    def simulated(self, more: Mapping[str, Any]) -> SimulateOptions:
        """Options of a virtual run on the cluster; ``more`` by the names of its fields."""
        return build(SimulateOptions, self.cluster | _settings(more))

    def on(self, changed: Mapping[str, Any]) -> AdviceRequest:
        """The same on a cluster of which some fields are others."""
        return replace(self, cluster=self.cluster | _settings(changed))


def _settings(fields: Mapping[str, Any]) -> Settings:
    return {tuple(name.split(".")): Setting(value, name) for name, value in fields.items()}


def read(argv: Sequence[str] | None) -> AdviceRequest:
    """What was typed; ``--help`` prints and exits.

    Raises:
        UserError: an option is unknown or its value bad, or there is no valid cluster.
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
