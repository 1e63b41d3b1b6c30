"""The options of a comparison, and its command line, which also contains those of its runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from aladdin_mpi.comparison.figures import ACCURACY, LOSS, Target
from aladdin_mpi.errors import UserError
from aladdin_mpi.options import reader
from aladdin_mpi.options.fields import kebab, leaves, option, shown
from aladdin_mpi.options.reader import divided
from aladdin_mpi.options.run import RunOptions, SimulateOptions, TrainOptions
from aladdin_mpi.options.settings import LARGEST_WHOLE, Setting, Settings, build

PROG = "aladdin_mpi.compare"
DESCRIPTION = (
    "Compare algorithms with the same model, data, seeds, number of workers and sample budget, "
    "over MPI or in simulation. Options after -- go to each run: those of aladdin_mpi.train or "
    "aladdin_mpi.simulate. To compare them on your script, run python -m aladdin_mpi.compare "
    "SCRIPT.py [options] [-- options of each run [-- arguments of the script]]. Rerun the same "
    "command to resume a comparison. Example: python -m aladdin_mpi.compare --algorithms all "
    "--seeds 0 1 2 --workers 8 --target-accuracy 0.9 --out comparisons/digits -- --dataset digits "
    "--epochs 10"
)
SEPARATOR = "--"
ALL = "all"
READ_WITH = frozenset({"read", "out", "target_accuracy", "target_loss", "baseline"})
"""Options that may be passed with ``--read``."""

SET_HERE = {
    "algorithm": "pass --algorithms before --",
    "seed": "pass --seeds before --",
    "workers": "pass --workers before --",
    "run_dir": "pass --out before --",
    "overwrite": "finished runs are kept; use a new --out to start over",
    "resume": "rerun the same command to resume",
}
"""Options of a run that the comparison sets, with alternatives for the user."""


def set_here(instead: str) -> str:
    """Return the error message for an option that the comparison sets."""
    return f"the comparison sets this for each run; leave it out: {instead}"


_option = partial(option, group="comparison")


def _texts(description: str, unit: str) -> Any:
    """Declare a list of texts that may contain commas."""
    more: JsonDict = {"unit": unit, "group": "comparison", "whole": True}
    return Field((), description=description, json_schema_extra=more)


class CompareOptions(BaseModel):
    """Options of a comparison."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    engine: Literal["virtual", "mpi"] = _option(
        "virtual", "virtual: run aladdin_mpi.simulate; mpi: run aladdin_mpi.train"
    )
    algorithms: tuple[str, ...] = _option(
        (),
        "algorithms to compare; all: all available ones",
        unit="NAME",
        default_text="all, unless --variants are given",
    )
    variants: tuple[str, ...] = _texts(
        "further candidates, each a label and an algorithm with options in quotes, such as "
        '"pi1=aladdin --aladdin-pi 1"',
        "LABEL=ALGORITHM-AND-OPTIONS",
    )
    script: Path | None = _option(
        None,
        "your training script, which each run starts instead of the built-in training; SCRIPT.py "
        "as the first argument is short for it",
        unit="SCRIPT.py",
    )
    script_arguments: tuple[str, ...] = _texts(
        "arguments of the script; those after a second -- are short for it", "ARGUMENT"
    )
    seeds: tuple[Annotated[int, Field(ge=0, le=LARGEST_WHOLE)], ...] = _option(
        (0,), "random seeds; every algorithm runs once with each", unit="SEED"
    )
    workers: int = _option(
        4, "number of workers per run, in addition to the servers", unit="RANKS", ge=1
    )
    target_accuracy: float | None = _option(
        None,
        "target test accuracy from 0 to 1; reports the time to reach it",
        unit="ACCURACY",
        gt=0,
        le=1,
    )
    target_loss: float | None = _option(
        None, "target test loss; reports the time to reach it, and compares losses", unit="LOSS"
    )
    out: Path | None = _option(
        None,
        "folder for the runs and the report",
        unit="FOLDER",
        default_text="comparisons/ENGINE-MODEL-DATASET or ENGINE-SCRIPT; none with --read",
    )
    jobs: int = _option(1, "number of concurrent runs, in simulation", unit="RUNS", ge=1)
    mpirun: str = _option("mpirun -np {ranks}", "launch command of runs over MPI", unit="COMMAND")
    baseline: float | None = _option(
        None,
        "throughput of a single worker, the baseline of speedups",
        unit="SAMPLES/S",
        default_text="computed in simulation or with timed computing, else measured",
        gt=0,
    )
    baseline_steps: int = _option(
        100, "steps of the run that measures a single worker", unit="STEPS", ge=1
    )
    read: tuple[Path, ...] = _texts(
        "folders of finished runs to compare, instead of new runs", "FOLDER"
    )

    @model_validator(mode="after")
    def _check_together(self) -> CompareOptions:
        for wrong, message in (
            (
                self.jobs > 1 and self.engine == "mpi",
                f"--jobs {self.jobs} cannot be combined with --engine mpi, where parallel runs "
                "would disturb each other's times. Leave --jobs out.",
            ),
            (
                "{ranks}" not in self.mpirun,
                "--mpirun: expected a command with {ranks} in the place of their number, got "
                f"{self.mpirun!r}; write for example --mpirun 'srun -n {{ranks}}'",
            ),
            (
                self.target_accuracy is not None and self.target_loss is not None,
                "--target-loss cannot be combined with --target-accuracy. Leave one out.",
            ),
            (
                self.script is None and bool(self.script_arguments),
                "arguments of the script require a script. Pass SCRIPT.py as the first argument, "
                "or leave out what follows the second --.",
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
    def target(self) -> Target | None:
        """The value that runs should reach."""
        if self.target_loss is not None:
            return Target(LOSS, self.target_loss)
        return None if self.target_accuracy is None else Target(ACCURACY, self.target_accuracy)

    @property
    def run_options(self) -> type[RunOptions]:
        """The options' model of a single run."""
        return SimulateOptions if self.engine == "virtual" else TrainOptions

    @property
    def run_module(self) -> str:
        """The command of a single run."""
        return "aladdin_mpi.simulate" if self.engine == "virtual" else "aladdin_mpi.train"


@dataclass(frozen=True)
class ComparisonRequest:
    """A requested comparison."""

    options: CompareOptions
    shared: tuple[str, ...]
    """Arguments after ``--``, passed to every run."""
    words: tuple[str, ...]
    """All arguments, without the program's name."""


def read_request(argv: Sequence[str] | None) -> ComparisonRequest:
    """Return the requested comparison; arguments after ``--`` are not checked yet.

    ``argv`` is the command line without the program's name; ``None``: that of this process.
    ``--help`` and ``--version`` print and raise ``SystemExit(0)``.

    Raises:
        UserError: an option is unknown, on the wrong side of ``--``, or its value is invalid.
    """
    words = tuple(sys.argv[1:] if argv is None else argv)
    script, own, rest = divided(words)
    if script is None:
        own, rest = _split(own)
    shared, arguments = _split(rest)
    _check_sides(own, shared)
    given = reader.read(CompareOptions, own, PROG, DESCRIPTION)
    if script is not None:
        given[("script",)] = Setting(script.absolute(), "SCRIPT.py")
    if arguments:
        given[("script_arguments",)] = Setting(tuple(arguments), "arguments of the script")
    options = build(CompareOptions, given)
    _check_engine(options, given)
    if options.read:
        others = [s.origin for path, s in given.items() if path[0] not in READ_WITH]
        others += [SEPARATOR] if shared else []
        if others:
            allowed = ", ".join(f"--{kebab(name)}" for name in sorted(READ_WITH - {"read"}))
            raise UserError(
                f"{', '.join(others)} cannot be combined with --read, which runs nothing. Leave "
                f"it out. Options allowed with --read: {allowed}"
            )
    if not set(shared).isdisjoint(reader.ANSWERED_AT_ONCE):
        read_run_words(options, shared)
    return ComparisonRequest(options, tuple(shared), words)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after the first ``--``."""
    end = words.index(SEPARATOR) if SEPARATOR in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def read_run_words(options: CompareOptions, words: Sequence[str]) -> Settings:
    """Return the settings of a run's command line, which may contain ``--help``.

    Raises:
        UserError: an option is unknown, or a file cannot be read.
    """
    about = f"The options of each run of {PROG}."
    return reader.read(options.run_options, words, options.run_module, about)


def _check_engine(options: CompareOptions, given: Settings) -> None:
    """Refuse options that have no effect in simulation, except in a file, which may have all."""
    typed = {setting.origin for setting in given.values()}
    for flag in ("--mpirun", "--baseline-steps"):
        if options.engine == "virtual" and flag in typed:
            raise UserError(f"{flag} requires --engine mpi. Add it, or leave {flag} out.")


def _check_sides(own: Sequence[str], shared: Sequence[str]) -> None:
    """Refuse options of the runs before ``--``, and those of the comparison after it."""
    here = {leaf.flag for leaf in leaves(CompareOptions).values()}
    runs = {
        leaf.flag for model in (SimulateOptions, TrainOptions) for leaf in leaves(model).values()
    }
    for words, wrong, side, other in (
        (own, runs - here, "after", "before"),
        (shared, here - runs, "before", "after"),
    ):
        for word in words:
            flag = word.partition("=")[0]
            instead = SET_HERE.get(flag[2:].replace("-", "_"))
            if flag in wrong and instead is not None:
                raise UserError(f"{flag}: {set_here(instead)}")
            if flag in wrong:
                raise UserError(
                    f"{flag}: expected it {side} the separating --, got it {other} it; write "
                    f"{PROG} OPTIONS-OF-THE-COMPARISON -- OPTIONS-OF-EACH-RUN"
                )
