"""The options of a comparison, and its command line, which includes the options of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.reader import Settings, build, kebab, leaves, option, shown
from aladdin_mpi.options.run import RunOptions, SimulateOptions, TrainOptions

PROG = "aladdin_mpi.compare"
DESCRIPTION = (
    "Compare algorithms with the same model, data, seeds, number of workers and sample budget, "
    "over MPI or in simulations. Options after -- are passed to each run of aladdin_mpi.train or "
    "aladdin_mpi.simulate. Rerun the same command to resume a stopped comparison. Example: "
    "python -m aladdin_mpi.compare --algorithms all --seeds 0 1 2 --workers 8 "
    "--target-accuracy 0.9 --out comparisons/digits -- --dataset digits --epochs 10"
)
SEPARATOR = "--"
ALL = "all"
READ_WITH = frozenset({"read", "out", "target_accuracy", "baseline"})
"""Options that can be combined with ``--read``."""

SET_HERE = {
    "algorithm": "give --algorithms in front of --",
    "seed": "give --seeds in front of --",
    "workers": "give --workers in front of --",
    "run_dir": "give --out in front of --",
    "overwrite": "finished runs are kept, and a new --out begins anew",
    "resume": "the same command resumes what has not finished",
}
"""Options of a run that the comparison sets, and the alternative."""


def set_here(instead: str) -> str:
    """Return the error text for an option that the comparison sets."""
    return f"the comparison sets this for each run; leave it out: {instead}"


_option = partial(option, group="comparison")


def _texts(description: str, unit: str) -> Any:
    """Return a field for a list of texts that may contain commas."""
    more: JsonDict = {"unit": unit, "group": "comparison", "whole": True}
    return Field((), description=description, json_schema_extra=more)


class CompareOptions(BaseModel):
    """The options of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: Literal["virtual", "mpi"] = _option(
        "virtual", "virtual: runs of aladdin_mpi.simulate; mpi: runs of aladdin_mpi.train"
    )
    algorithms: tuple[str, ...] = _option(
        (),
        "algorithms, separated by spaces or commas, or all",
        unit="NAME",
        default_text="all, unless --variants are given",
    )
    variants: tuple[str, ...] = _texts(
        "variants to compare: a label and an algorithm with options, each in quotes, such as "
        '"pi1=aladdin --aladdin-pi 1"',
        "LABEL=ALGORITHM-AND-OPTIONS",
    )
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = _option(
        (0,), "random seeds; each algorithm runs once per seed", unit="SEED"
    )
    workers: int = _option(4, "number of workers per run, without servers", unit="RANKS", ge=1)
    target_accuracy: float | None = _option(
        None,
        "also report the time to this test accuracy, from 0 to 1, by the first evaluation at or "
        "above it",
        unit="ACCURACY",
        gt=0,
        le=1,
    )
    out: Path | None = _option(
        None,
        "folder for the runs and the report",
        unit="FOLDER",
        default_text="comparisons/ENGINE-MODEL-DATASET, or none with --read",
    )
    jobs: int = _option(1, "number of simultaneous simulations", unit="RUNS", ge=1)
    mpirun: str = _option(
        "mpirun -np {ranks}", "command that starts the ranks of a run over MPI", unit="COMMAND"
    )
    baseline: float | None = _option(
        None,
        "throughput of one worker alone, the baseline of speedups",
        unit="SAMPLES/S",
        default_text="calculated for simulations and timed computing, otherwise measured",
        gt=0,
    )
    baseline_steps: int = _option(
        100, "steps of the run that measures one worker alone", unit="STEPS", ge=1
    )
    read: tuple[Path, ...] = _texts(
        "run nothing; compare the finished runs in these folders", "FOLDER"
    )

    @model_validator(mode="after")
    def _check_together(self) -> CompareOptions:
        for wrong, message in (
            (
                self.jobs > 1 and self.engine == "mpi",
                f"--jobs: expected 1 with --engine mpi, where runs side by side would disturb "
                f"each other's times, got {self.jobs}; leave it out",
            ),
            (
                "{ranks}" not in self.mpirun,
                f"--mpirun: expected a command with {{ranks}} in the place of their number, got "
                f"{self.mpirun!r}; write for example --mpirun 'srun -n {{ranks}}'",
            ),
            (not self.seeds, "--seeds: expected at least one, got none; add for example --seeds 0"),
            (
                len(set(self.seeds)) < len(self.seeds),
                f"--seeds: expected different ones, got {shown(self.seeds)}; leave out the "
                "repeated ones",
            ),
        ):
            if wrong:
                raise ValueError(message)
        return self

    @property
    def run_options(self) -> type[RunOptions]:
        """The options of a single run."""
        return SimulateOptions if self.engine == "virtual" else TrainOptions

    @property
    def run_module(self) -> str:
        """The command of a single run."""
        return "aladdin_mpi.simulate" if self.engine == "virtual" else "aladdin_mpi.train"


@dataclass(frozen=True)
class ComparisonRequest:
    """A request to the command."""

    options: CompareOptions
    shared: tuple[str, ...]
    """Options after ``--``, for the command line of every run."""
    words: tuple[str, ...]
    """The full command line without the program's name."""


def read_request(argv: Sequence[str] | None) -> ComparisonRequest:
    """Read a command line; options after ``--`` are not checked yet.

    ``argv`` is the command line without the program's name; None stands for that of the process.
    ``--help`` and ``--version`` print and raise ``SystemExit(0)``.

    Raises:
        UserError: an unknown option, an invalid value, or an option on the wrong side of ``--``.
    """
    words = tuple(sys.argv[1:] if argv is None else argv)
    split = words.index(SEPARATOR) if SEPARATOR in words else len(words)
    own, shared = words[:split], words[split + 1 :]
    _check_sides(own, shared)
    given = reader.read(CompareOptions, own, PROG, DESCRIPTION)
    options = build(CompareOptions, given)
    if options.read:
        others = [s.origin for path, s in given.items() if path[0] not in READ_WITH]
        others += [SEPARATOR] if shared else []
        if others:
            allowed = ", ".join(f"--{kebab(name)}" for name in sorted(READ_WITH - {"read"}))
            raise UserError(
                f"{', '.join(others)}: cannot be given together with --read, which runs nothing; "
                f"leave it out. Beside --read are possible: {allowed}"
            )
    if not set(shared).isdisjoint(reader.ANSWERED_AT_ONCE):
        read_run_words(options, shared)
    return ComparisonRequest(options, shared, words)


def read_run_words(options: CompareOptions, words: Sequence[str]) -> Settings:
    """Return the settings in a run's command line; ``--help`` prints and exits.

    Raises:
        UserError: an option is unknown, or a file cannot be read.
    """
    about = f"The options of each run of {PROG}."
    return reader.read(options.run_options, words, options.run_module, about)


def _check_sides(own: Sequence[str], shared: Sequence[str]) -> None:
    """Refuse options of the runs before ``--``, and those of the comparison after it."""
    here = {leaf.flag for leaf in leaves(CompareOptions).values()}
    runs = {
        leaf.flag for model in (SimulateOptions, TrainOptions) for leaf in leaves(model).values()
    }
    for words, wrong, side, other in (
        (own, runs - here, "behind", "in front of"),
        (shared, here - runs, "in front of", "behind"),
    ):
        for word in words:
            flag = word.partition("=")[0]
            instead = SET_HERE.get(flag[2:].replace("-", "_"))
            if flag in wrong and instead is not None:
                raise UserError(f"{flag}: {set_here(instead)}")
            if flag in wrong:
                raise UserError(
                    f"{flag}: expected {side} the separating --, got it {other} it; write "
                    f"{PROG} OPTIONS-OF-THE-COMPARISON -- OPTIONS-OF-EACH-RUN"
                )
