"""The options of each command, composed of the run's own and the algorithms'."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, create_model, model_validator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import command_line
from aladdin_mpi.options.algorithms import ALGORITHMS, load_plugins
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.options.fields import nested, option, submodel
from aladdin_mpi.options.general import LENGTHS, OWN_DATA, CheckpointInterval, GeneralOptions
from aladdin_mpi.options.resume import (
    AUTO,
    CONFIG_NAME,
    RESIZE_FIELDS,
    RESUME_FIELDS,
    agreed,
    differences,
    fingerprint,
    resumed_options,
)
from aladdin_mpi.options.settings import Settings, build, to_toml

__all__ = [
    "AUTO",
    "CONFIG_NAME",
    "LENGTHS",
    "OWN_DATA",
    "RESIZE_FIELDS",
    "RESUME_FIELDS",
    "CheckpointInterval",
    "RunOptions",
    "SimulateOptions",
    "TrainOptions",
    "agreed",
    "check_cluster",
    "check_workers",
    "completed",
    "differences",
    "fingerprint",
    "followed",
    "parse",
    "resumed_options",
    "to_toml",
]

load_plugins()
if TYPE_CHECKING:
    RunOptions = GeneralOptions
else:
    # A field for each algorithm that has options of its own.
    _own = {each.group: each.options for each in ALGORITHMS.values() if each.options}
    RunOptions = create_model(
        "RunOptions",
        __base__=GeneralOptions,
        __module__=__name__,
        **{group: (_own[group], nested(_own[group])) for group in sorted(_own)},
    )


class TrainOptions(RunOptions):
    """The options of training over MPI."""

    @model_validator(mode="after")
    def _check_compute_time(self) -> TrainOptions:
        if self.compute == "timed" and self.compute_time is None:
            raise ValueError(
                "--compute timed: expected the time of a step too, got none; "
                "add for example --compute-time 0.1"
            )
        if self.compute == "real" and self.compute_time is not None:
            raise ValueError(
                "--compute-time: expected only with timed computing, got real computing; "
                "add --compute timed"
            )
        return self


MEASURED = (
    "workers",
    "ranks_per_host",
    "compute_time",
    "jitter",
    "slowdown",
    "forward_share",
    "backward_shape",
)
"""What a cluster's file may say of its computing, beside what it says of its network."""


class SimulateOptions(RunOptions):
    """The options of running in virtual time."""

    compute_time: float = option(
        0.1, "virtual time of one step of a worker", unit="SECONDS", group="computing", gt=0
    )
    workers: int = option(
        8, "workers to simulate; servers come on top", unit="RANKS", group="run", ge=1
    )
    cluster: Cluster = nested(Cluster, prefix=False, file=True, beside=MEASURED)
    ranks_per_host: int | None = option(
        None,
        "room for ranks on each host; places them in blocks (--placement block), evenly",
        unit="RANKS",
        group="cluster",
        ge=1,
    )

    @model_validator(mode="before")
    @classmethod
    def _place_in_blocks(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("ranks_per_host") is not None:
            cluster = values.get("cluster", {})
            if isinstance(cluster, dict):
                return {**values, "cluster": {"placement": "block", **cluster}}
        return values

    @model_validator(mode="after")
    def _check_simulation(self) -> SimulateOptions:
        if self.ranks_per_host is not None and self.cluster.placement != "block":
            raise ValueError(
                f"--ranks-per-host: expected with --placement block, got "
                f"{self.cluster.placement}; leave out --placement or --ranks-per-host"
            )
        named = len(self.cluster.worker_hosts)
        if named and named != self.workers:
            raise ValueError(
                f"--worker-hosts: expected the host of each of {self.workers} workers, got {named} "
                "hosts; name as many, or add --worker-hosts none"
            )
        try:
            check_workers(self, self.workers)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


Options = TypeVar("Options", bound=BaseModel)


def parse(model: type[Options], argv: Sequence[str] | None, prog: str, description: str) -> Options:
    """Return the options that a command line asks for; ``--resume`` is followed.

    ``argv`` is the command line without the program's name; ``None`` takes the
    process's own. ``--help`` and ``--version`` print and raise ``SystemExit(0)``.

    Raises:
        UserError: an option or a key of a TOML file is unknown or its value bad.
    """
    return followed(model, command_line.read(model, argv, prog, description))


def followed(model: type[Options], given: Settings) -> Options:
    """Return the options that the user's settings ask for; ``--resume`` is followed.

    But not ``--resume auto``, on which all ranks have to agree.

    Raises:
        UserError: a value is bad, or there is no run to resume.
    """
    return build(model, completed(model, given))


def completed(model: type[Options], given: Settings) -> Settings:
    """Return the user's settings, over those of the run that ``--resume`` names.

    Raises:
        UserError: there is no run to resume.
    """
    resume = given.get(("resume",))
    if resume is not None and resume.value not in (None, AUTO):
        return resumed_options(model, given, Path(resume.value))
    return given


def check_workers(options: RunOptions, workers: int) -> None:
    """Check the options that speak of single workers, now that their number is known.

    Raises:
        UserError: an option names a worker that does not exist.
    """
    for worker in options.slowdown:
        if worker >= workers:
            raise UserError(
                f"--slowdown: expected workers from 0 to {workers - 1}, got worker {worker}; "
                "name another or start more workers"
            )


def check_cluster(options: SimulateOptions, ranks: int) -> None:
    """Check that ``ranks``, workers and servers together, suit the simulated cluster.

    Raises:
        UserError: they do not fit the hosts, or an option names one that does not exist.
    """
    cluster, room = options.cluster, options.ranks_per_host
    if room is not None and cluster.hosts * room < ranks:
        raise UserError(
            f"--ranks-per-host: expected room for {ranks} ranks, got {cluster.hosts} hosts for "
            f"{room} each; add --ranks-per-host {-(-ranks // cluster.hosts)} or "
            f"--hosts {-(-ranks // room)}"
        )
    named = {"--deaths": list(cluster.deaths), "--pauses": [pause[0] for pause in cluster.pauses]}
    for flag, those in named.items():
        for rank in those:
            if rank >= ranks:
                raise UserError(
                    f"{flag}: expected ranks from 0 to {ranks - 1}, got rank {rank}; "
                    "name another or simulate more workers"
                )


DGC = "dgc"
GROUPS = {name for name, info in RunOptions.model_fields.items() if submodel(info)}
"""The fields of RunOptions that are options of one algorithm, or of a compression."""


def unused(options: RunOptions, given: Settings) -> dict[str, str]:
    """The options on the command line that have no effect on this run, and what to do with each.

    No errors, because runs of several algorithms may share a command line, as in a job array.
    What stands in a file is left alone: that of a run holds all options.

    Args:
        options: of the run.
        given: the user's settings.
    """
    # One that does not exist is refused later, on all ranks at once.
    used = {each.group for name, each in ALGORITHMS.items() if name == options.algorithm}
    if options.compression == DGC:
        used.add(DGC)
    return {
        setting.origin: _remedy(path[0], options)
        for path, setting in given.items()
        if path[0] in GROUPS - used and setting.origin.startswith("--")
    }


def warnings(options: RunOptions, given: Settings) -> list[str]:
    """A line on each of them."""
    return [f"{flag}: has no effect {remedy}" for flag, remedy in unused(options, given).items()]


def _remedy(group: str, options: RunOptions) -> str:
    if group == DGC:
        return f"without --compression {DGC}; add that, or leave it out"
    return f"with --algorithm {options.algorithm}; leave it out"
