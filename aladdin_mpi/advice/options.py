"""What the adviser is asked: a cluster, a model, and what counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.reader import Setting, Settings, build, option, parse_part, read_part
from aladdin_mpi.options.run import SimulateOptions
from aladdin_mpi.probing import described_cluster
from aladdin_mpi.probing.cluster_file import rendered
from aladdin_mpi.probing.description import EXAMPLE
from aladdin_mpi.probing.options import read as read_description

KNOWN = "bandwidth latency step servers workers slowdown"


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


def changes(asked: Sequence[str], base: SimulateOptions) -> tuple[Change, ...]:
    """What ``--what-if`` asks for.

    Raises:
        UserError: one is not known, or its value bad.
    """
    return tuple(_change(text, base) for text in asked)


def _change(text: str, base: SimulateOptions) -> Change:
    name, found, value = text.partition("=")
    if not found or name not in KNOWN.split():
        raise UserError(
            f"--what-if: expected NAME=VALUE with one of {KNOWN}, got {text!r}; write for example "
            "bandwidth=100"
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
        count = int(_number(text, value, whole=True, least=1))
        return Change(text, {}, **{name: count})
    number = _number(text, value, least=0 if name == "latency" else 1e-9)
    field = {
        "bandwidth": "cluster.bandwidth_gbit",
        "latency": "cluster.latency_us",
        "step": "compute_time",
    }[name]
    return Change(text, {field: number})


def _number(text: str, value: str, least: float, whole: bool = False) -> float:
    kind: Callable[[str], float] = int if whole else float
    try:
        number = kind(value)
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
ADVICE, PILOT = "advice", "pilot"
BY_TABLE = "table"
SECONDS, LONGER = 240.0, 450.0
LARGE = 256
"""Workers from which :data:`LONGER` is the time."""


class AdviseOptions(BaseModel):
    """What the adviser is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    cluster: Path | None = option(
        None, "the cluster: a file that aladdin_mpi.probe has written", unit="FILE", group=ADVICE
    )
    describe: str | None = option(
        None,
        f'the cluster in words instead, such as "{EXAMPLE}"',
        unit="TEXT",
        group=ADVICE,
    )
    model: str = option(
        "resnet50",
        "model to be trained: a name, package.module:function, or size:MB by its parameters alone",
        group=ADVICE,
    )
    dataset: str = option("imagenet", "data set, for the shape of the model's input", group=ADVICE)
    batch_size: int = option(
        32,
        "batch of one worker's step, as the cluster's time of a step has it",
        unit="SAMPLES",
        group=ADVICE,
        ge=1,
    )
    target: Literal["accuracy", "time"] = option(
        "accuracy",
        "what is best: accuracy: samples per second, weighted by what a sample teaches with the "
        "algorithm; time: samples per second alone",
        group=ADVICE,
    )
    algorithms: tuple[str, ...] = option(
        (),
        "only these; several, apart by commas or spaces",
        unit="NAME",
        group=ADVICE,
        default_text="all",
    )
    what_if: tuple[str, ...] = option(
        (),
        "changes, each of which is tried by itself on what is recommended: bandwidth=GBIT/S "
        "latency=MICROSECONDS step=SECONDS servers=N workers=N slowdown=WORKER=FACTOR; several, "
        "apart by spaces",
        unit="NAME=VALUE",
        group=ADVICE,
    )
    seconds: float | None = option(
        None,
        "time for it; what is not known by then is told",
        unit="SECONDS",
        group=ADVICE,
        gt=0,
        default_text=f"{SECONDS:g}, with more than {LARGE} workers {LONGER:g}",
    )
    jobs: int | None = option(
        None, "virtual runs at a time", group=ADVICE, default_text="one for each core", ge=1
    )
    seed: int = option(0, "seed of all virtual runs", group=ADVICE, ge=0)
    out: Path | None = option(
        None,
        "write advice.md, advice.json and advice.png to this folder too",
        unit="FOLDER",
        group=ADVICE,
    )
    overwrite: bool = option(False, "replace them if they are there", group=ADVICE)
    quiet: bool = option(False, "show no progress", group=ADVICE)

    pilot: int | None = option(
        None,
        "find out what a sample teaches by so many steps of virtual training with real gradients, "
        "of --model on --dataset, instead of from the table of measured runs",
        unit="STEPS",
        group=PILOT,
        ge=20,
    )
    data_dir: Path | None = option(
        None, "folder of the data set, for those that need one", unit="FOLDER", group=PILOT
    )
    lr: float | None = option(
        None,
        "learning rate of one worker",
        unit="RATE",
        group=PILOT,
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
    """By their names, with dots for fields within."""
    return {tuple(name.split(".")): Setting(value, name) for name, value in fields.items()}


def read(argv: Sequence[str] | None) -> AdviceRequest:
    """What was typed; ``--help`` prints and exits.

    Raises:
        UserError: an option is unknown or its value bad, or there is no sound cluster.
    """
    options = build(AdviseOptions, reader.read(AdviseOptions, argv, PROG, ABOUT))
    settings, source = _cluster(options)
    request = AdviceRequest(options, settings, source, ())
    base = request.simulated({"compute": "timed"})
    if base.workers < 2:
        raise UserError(
            f"{source}: expected at least 2 workers, got {base.workers}; there is nothing to choose"
        )
    if ("compute_time",) not in settings:
        raise UserError(
            f"{source}: expected the time of a step, got none; add compute-time to the file, or "
            '"step 0.2 s" to the description'
        )
    return replace(request, changes=changes(options.what_if, base))


def _cluster(options: AdviseOptions) -> tuple[Settings, str]:
    if (options.cluster is None) == (options.describe is None):
        got = "none" if options.cluster is None else "both"
        raise UserError(
            f"--cluster and --describe: expected one of them, got {got}; give a file of "
            f'aladdin_mpi.probe, or for example --describe "{EXAMPLE}"'
        )
    if options.cluster is not None:
        return (
            read_part(SimulateOptions, "cluster", options.cluster, "--cluster"),
            str(options.cluster),
        )
    described, _ = read_description(["--describe", str(options.describe)])
    text = rendered("Described.", described_cluster.sections(described))
    return parse_part(SimulateOptions, "cluster", text, "--describe"), "--describe"
