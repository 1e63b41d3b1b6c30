"""The options of training and simulation: general options and those of the algorithms.

Also which options may differ between ranks, and which may change when a run is resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, PositiveFloat, PositiveInt, create_model, model_validator

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS, load_plugins
from aladdin_mpi.options.cluster import Cluster, cluster_option
from aladdin_mpi.options.fields import FieldPath, dotted, kebab, nested, submodel
from aladdin_mpi.options.general import (
    AUTO,
    LENGTHS,
    GeneralOptions,
    computing_option,
    run_option,
)
from aladdin_mpi.options.reader import Argv, read, renamed_flags
from aladdin_mpi.options.settings import Setting, Settings, build, overlay
from aladdin_mpi.options.toml_file import read_toml

load_plugins()


class _WithTopics(GeneralOptions):
    TOPICS: ClassVar = {each.name: kebab(each.group) for each in ALGORITHMS.values()}
    """Headings of the algorithms' options in ``--help``, by algorithm."""


if TYPE_CHECKING:
    RunOptions = GeneralOptions
else:
    # A field for each algorithm with options.
    _own = {each.group: each.options for each in ALGORITHMS.values() if each.options}
    RunOptions = create_model(
        "RunOptions",
        __base__=_WithTopics,
        __module__=__name__,
        **{group: (_own[group], nested(_own[group])) for group in sorted(_own)},
    )


class TrainOptions(RunOptions):
    """Options of training over MPI."""

    @model_validator(mode="after")
    def _check_compute_time(self) -> TrainOptions:
        if self.compute == "timed" and self.compute_time is None:
            raise ValueError(
                "--compute timed requires --compute-time. Add for example --compute-time 0.1."
            )
        if self.compute == "real" and self.compute_time is not None:
            raise ValueError(
                "--compute-time requires --compute timed. Add --compute timed, or leave "
                "--compute-time out."
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
"""Fields on computing that a cluster file may contain in addition to the network's."""


class SimulateOptions(RunOptions):
    """Options of a simulation."""

    compute_time: PositiveFloat = computing_option(
        0.1, "simulated time of one step of a worker", "SECONDS", common=True
    )
    workers: PositiveInt = run_option(
        8, "number of workers, in addition to the servers", "RANKS", common=True
    )
    cluster: Cluster = nested(Cluster, prefix=False, file=True, outer=MEASURED)
    ranks_per_host: PositiveInt | None = cluster_option(
        None,
        "maximum number of ranks per host; implies --placement block",
        "RANKS",
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
                f"--ranks-per-host requires block placement, not {self.cluster.placement}. Leave "
                "out --placement or --ranks-per-host."
            )
        named = len(self.cluster.worker_hosts)
        if named and named != self.workers:
            raise ValueError(
                f"--worker-hosts: expected one host for each of {self.workers} workers, got "
                f"{named} hosts; name as many, or add --worker-hosts none"
            )
        try:
            check_workers(self, self.workers)
        except UserError as error:
            raise ValueError(str(error)) from None
        return self


def check_workers(options: RunOptions, workers: int) -> None:
    """Check the options that depend on the number of workers.

    Raises:
        UserError: an option names a worker that does not exist, or requires more workers.
    """
    if workers < options.min_workers:
        raise UserError(
            f"--min-workers: expected at most the number of workers, {workers}, got "
            f"{options.min_workers}; start more workers, or lower it"
        )
    for worker in options.slowdown:
        if worker >= workers:
            raise UserError(
                f"--slowdown: expected workers from 0 to {workers - 1}, got worker {worker}; "
                "name another or start more workers"
            )


def check_cluster(options: SimulateOptions, ranks: int) -> None:
    """Check that ``ranks``, workers and servers together, fit the simulated cluster.

    Raises:
        UserError: they do not fit the hosts, or an option names one that does not exist.
    """
    cluster, room = options.cluster, options.ranks_per_host
    if room is not None and cluster.hosts * room < ranks:
        raise UserError(
            f"--ranks-per-host: expected places for {ranks} ranks, got {cluster.hosts} hosts "
            f"with {room} each; use --ranks-per-host {-(-ranks // cluster.hosts)} or --hosts "
            f"{-(-ranks // room)}"
        )
    named = {
        "--failures": list(cluster.failures),
        "--pauses": [pause[0] for pause in cluster.pauses],
    }
    for flag, those in named.items():
        for rank in those:
            if rank >= ranks:
                raise UserError(
                    f"{flag}: expected ranks from 0 to {ranks - 1}, got rank {rank}; "
                    "name another or simulate more workers"
                )


# -- agreement --------------------------------------------------------------------------
LOCAL_FIELDS = frozenset(
    {
        "bind_cores",
        "cache",
        "data_dir",
        "device",
        "download",
        "join",
        "loader_start_method",
        "loader_workers",
        "overwrite",
        "progress",
        "quiet",
        "resume",
        "run_dir",
        "stage",
        "timeout",
    }
)
"""Options that may differ between ranks, since the result does not depend on them."""


def agreed(options: BaseModel) -> dict[str, Any]:
    """Return the options that all ranks must share, all but ``LOCAL_FIELDS``, as JSON types."""
    return options.model_dump(mode="json", exclude=set(LOCAL_FIELDS))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line such as ``"aladdin.pi: 4 and 2"`` for each difference.

    ``a`` and ``b`` are results of :func:`agreed`.
    """
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    return [
        f"{dotted(path)}: {flat_a.get(path, 'absent')} and {flat_b.get(path, 'absent')}"
        for path in sorted(flat_a.keys() | flat_b.keys())
        if flat_a.get(path, "absent") != flat_b.get(path, "absent")
    ]


def _flat(
    table: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*path, name))
        else:
            yield (*path, name), value


# -- resuming -----------------------------------------------------------------------------
SUMMARY = "summary.json"
"""File of the results in a run folder."""
CONFIG_NAME = "config.toml"
"""File of the complete configuration in a run folder."""
RESUME_FIELDS = (LOCAL_FIELDS - {"run_dir", "overwrite"}) | {
    *LENGTHS,
    "allow_resize",
    "check_images",
    "checkpoint_every",
    "corrupt_images",
    "evaluate_on",
    "log_every",
    "min_workers",
    "model_format",
    "spares",
    "worker_timeout",
}
"""Options that may be passed with ``--resume``."""
RESIZE_FIELDS = frozenset({"cluster", "island", "ranks_per_host", "servers", "slowdown", "workers"})
"""Further options that may be passed with ``--resume --allow-resize``."""
NOT_KEPT = frozenset({"allow_resize", "join", "overwrite", "run_dir"})
"""Stored options that concern only the command that wrote them."""

Options = TypeVar("Options", bound=RunOptions)


class RunRequest(Generic[Options]):
    """The run that a user requests.

    Attributes:
        model: the model of its options.
        given: the user's settings.
        settings: ``given``, over the settings of the run that ``--resume`` names if ``follows``;
            but not with ``--resume auto``, on which all ranks have to agree.

    Raises:
        UserError: there is no run to resume, or it cannot be resumed with these settings.
    """

    def __init__(self, model: type[Options], given: Settings, follows: bool = True) -> None:
        self.model = model
        self.given = given = _joining(given)
        resume = given.get(("resume",))
        is_path = resume is not None and isinstance(resume.value, (str, Path))
        if follows and resume is not None and is_path and resume.value != AUTO:
            self.settings = resumed_settings(model, given, Path(resume.value))
        else:
            self.settings = given

    def setting(self, name: str) -> Any:
        """Return the unchecked value of a field, or its default."""
        setting = self.settings.get((name,))
        return self.model.model_fields[name].default if setting is None else setting.value

    @cached_property
    def options(self) -> Options:
        """The validated options.

        Raises:
            UserError: a value is invalid.
        """
        return build(self.model, self.settings)


def _joining(given: Settings) -> Settings:
    """Return settings in which ``--join`` is also ``--resume --allow-resize``.

    Raises:
        UserError: they contain ``--resume`` too.
    """
    join, resume = given.get(("join",)), given.get(("resume",))
    if join is None or join.value is None:
        return given
    if resume is not None and resume.value is not None:
        raise UserError("--join cannot be combined with --resume. Leave one out.")
    own: Settings = {("resume",): join, ("allow_resize",): Setting(True, join.origin)}
    return {**given, **own}


def read_request(
    model: type[Options], argv: Argv, prog: str, description: str, follows: bool = True
) -> RunRequest[Options]:
    """Return the run that a command line requests; see :func:`.reader.read`.

    Raises:
        UserError: an option or a key of a TOML file is unknown, or there is no run to resume.
    """
    return RunRequest(model, read(model, argv, prog, description), follows)


def parse(model: type[Options], argv: Argv, prog: str, description: str) -> Options:
    """Return the options of a command line.

    Raises:
        UserError: as :func:`read_request`, or a value is invalid.
    """
    return read_request(model, argv, prog, description).options


def resumed_settings(model: type[BaseModel], given: Settings, run_dir: Path) -> Settings:
    """Return the configuration stored in ``run_dir``, overridden by ``given``.

    Raises:
        UserError: ``run_dir`` contains no configuration, or ``given`` an option that a resumed
            run cannot change.
    """
    resizes = given.get(("allow_resize",))
    changeable = RESUME_FIELDS | (RESIZE_FIELDS if resizes and resizes.value else frozenset())
    refused = {path: s.origin for path, s in given.items() if path[0] not in changeable}
    if refused:
        allowed = ", ".join(f"--{kebab(name)}" for name in sorted(RESUME_FIELDS - {"resume"}))
        resize = "Add --allow-resize, l" if {path[0] for path in refused} <= RESIZE_FIELDS else "L"
        raise UserError(
            f"{', '.join(refused.values())} cannot be combined with --resume, which uses the "
            f"configuration of the run in {run_dir}. {resize}eave it out, or start a new run. "
            f"Options allowed with --resume: {allowed}"
        )
    if not (run_dir / CONFIG_NAME).is_file():
        flag = given[("resume",)].origin if ("resume",) in given else "--resume"
        raise UserError(
            f"{flag}: expected the folder of a run, got {str(run_dir)!r}, which has no "
            f"{CONFIG_NAME}; check the path"
        )
    stored = read_toml(model, run_dir / CONFIG_NAME, "--resume")
    kept = {path: s for path, s in stored.items() if path[0] not in NOT_KEPT}
    place = Setting(run_dir, "--resume")
    return overlay(model, kept, given | {("run_dir",): place})


# -- options without effect -----------------------------------------------------------------
COMPRESSIONS = ("dgc", "powersgd")
"""Values of ``--compression`` with further options."""
GROUPS = {name for name, info in RunOptions.model_fields.items() if submodel(info)}
"""Fields of RunOptions that contain the options of an algorithm or of a compression."""


BETWEEN_HOSTS = [("cluster", name) for name in ("bandwidth_gbit", "latency_us", "links")]
"""Settings of the links that one simulated host does not use."""


def check_failures(
    options: SimulateOptions, results: Sequence[object], start: float = 0.0
) -> list[str]:
    """Return a warning if a simulation, which began at ``start``, ended before ranks failed.

    The result of a rank that failed is None.

    Raises:
        UserError: every rank has failed.
    """
    if all(each is None for each in results):
        raise UserError(
            f"--failures: all {len(results)} ranks fail before the end of the run. Leave some out."
        )
    late = ",".join(
        f"{rank}={time:g}"
        for rank, time in options.cluster.failures.items()
        if time > start and results[rank] is not None
    )
    return [f"--failures {late}: the run ended before. Choose earlier times."] if late else []


def unused(options: RunOptions, given: Settings) -> dict[str, str]:
    """Return the options on the command line that have no effect, with a remedy for each.

    They are not errors, because runs of several algorithms may share a command line, as in a job
    array. Options in a file are ignored here, since the file of a run contains all of them.

    Args:
        options: the run's options.
        given: the user's settings.
    """
    remedies = {s.origin: _remedy(options, path) for path, s in given.items()}
    return {flag: remedy for flag, remedy in remedies.items() if remedy and flag.startswith("--")}


def _remedy(options: RunOptions, path: FieldPath) -> str:
    """Return when the option has no effect, and a remedy; empty if it has one."""
    algorithm = ALGORITHMS.get(options.algorithm)  # an unknown one is refused later, on all ranks
    with_algorithm = f"with --algorithm {options.algorithm}. Leave it out."
    name = path[0]
    if name in COMPRESSIONS:
        remedy = f"without --compression {name}. Add --compression {name}, or leave it out."
        return remedy if name != options.compression else ""
    if name in GROUPS:
        return with_algorithm if algorithm is None or name != algorithm.group else ""
    if name == "servers" and algorithm is not None and not algorithm.has_servers:
        return with_algorithm
    if name == "wire" and algorithm is not None and algorithm.has_fixed_format:
        return with_algorithm if options.wire == "fp32" else ""  # others are refused
    if name in ("momentum", "nesterov") and options.optimizer != "sgd":
        return f"with --optimizer {options.optimizer}. Use --optimizer-options, or leave it out."
    if name == "nesterov" and algorithm is not None and algorithm.is_nesterov:
        return f"with --algorithm {options.algorithm}, which always uses it. Leave it out."
    if name == "lr_decay" and options.lr_schedule != "step":
        return f"with --lr-schedule {options.lr_schedule}. Use --lr-schedule step, or leave it out."
    is_one_host = isinstance(options, SimulateOptions) and options.cluster.hosts == 1
    if path in BETWEEN_HOSTS and is_one_host:
        return "with one host. Add --hosts N, or leave it out."
    return ""


def warnings(options: RunOptions, given: Settings) -> list[str]:
    """Return a warning for each option without effect, and for each with its former spelling."""
    renamed = renamed_flags(type(options), given).items()
    return [
        *(f"{flag} has no effect {remedy}" for flag, remedy in unused(options, given).items()),
        *(f"{former} has been renamed. Use {flag}." for former, flag in renamed),
    ]
