"""The runs of a comparison, all checked before the first is started."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aladdin_mpi.comparison.figures import RunFigures, read_figures
from aladdin_mpi.comparison.options import (
    ALL,
    SEPARATOR,
    SET_HERE,
    CompareOptions,
    ComparisonRequest,
    read_run_words,
    set_here,
)
from aladdin_mpi.comparison.scripts import resolved_options
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.options import reader
from aladdin_mpi.options import run as run_options
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.options.checks import check_ranks
from aladdin_mpi.options.general import AUTO
from aladdin_mpi.options.run import (
    CONFIG_NAME,
    SUMMARY,
    RunOptions,
    SimulateOptions,
    TrainOptions,
    differences,
    unused,
)
from aladdin_mpi.options.settings import Settings, build, did_you_mean
from aladdin_mpi.options.toml_file import to_toml
from aladdin_mpi.process.files import write_whole

LOG = "output.log"
OPTIONS = "options.toml"
"""The options that a run was started with, before those that depend on its data or devices."""
RUNS = "runs"
NOT_COMPARED = {"download", "log_every", "overwrite", "progress", "quiet", "resume", "run_dir"} | {
    "timeout"
}
"""Options in which a stored run may differ: they change neither result nor time."""
NOT_RESUMED = ["--resume", "none", "--no-allow-resize"]
RESUMED = ["--resume", AUTO, "--no-overwrite"]
"""Options of a script that starts from the beginning, and of a resumed one."""
_AFTER_SEPARATOR = "after --: "
_VARIANT = re.compile(r"([A-Za-z0-9][\w.+-]*)=(.*)", re.DOTALL | re.ASCII)


@dataclass(frozen=True)
class PlanEntry:
    """A row of the table: an algorithm, possibly with additional options."""

    label: str
    algorithm: str
    words: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """The prefix of errors about its options."""
        return f"--variants {self.label}: "


@dataclass(frozen=True, eq=False)
class Run:
    """A single run of a comparison.

    Attributes:
        words: its options, without those that depend on the state of its folder.
        options: the options that it has according to ``words`` and the script.
        script: the user's script that it runs, if any.
        script_arguments: the script's command line.
    """

    entry: PlanEntry
    seed: int
    folder: Path
    words: tuple[str, ...]
    options: RunOptions
    ranks: int
    script: Path | None = None
    script_arguments: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name in messages."""
        return f"{self.entry.label}, seed {self.seed}"

    @property
    def log(self) -> Path:
        """The file with the run's output."""
        return self.folder / LOG

    @property
    def finished(self) -> bool:
        """Whether the run is complete."""
        return (self.folder / SUMMARY).is_file()

    @property
    def resumes(self) -> bool:
        """Whether it continues from a checkpoint. A simulated script cannot."""
        may_resume = self.script is None or isinstance(self.options, TrainOptions)
        return may_resume and CheckpointStore(self.folder).exists

    def start_words(self) -> list[str]:
        """Return the words that start the run, or resume it from its last checkpoint."""
        again = ["--overwrite"] if (self.folder / CONFIG_NAME).exists() else []
        # Absolute, since a script may change its current folder.
        folder = str(self.folder.absolute())
        words = [*self.words, "--run-dir", folder]
        if self.script is not None:
            # A script has all its options again if it is resumed.
            how = RESUMED if self.resumes else [*NOT_RESUMED, *again]
            return [str(self.script), *words, *how, SEPARATOR, *self.script_arguments]
        return ["--resume", folder] if self.resumes else [*words, *again]

    def write_options(self, only_set: bool = False) -> None:
        """Write the options with which the run starts, or ``only_set`` ones, to a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / OPTIONS, to_toml(self.options, only_set))


def plan(request: ComparisonRequest, out: Path) -> list[Run]:
    """Return the runs, ordered by seed, so that an unfinished comparison has all algorithms.

    Raises:
        UserError: an unknown algorithm, an invalid option, or a stored run with other options.
    """
    options = request.options
    lines = entries(options)
    shared = _check_words(options, request.shared, _AFTER_SEPARATOR)
    own = {entry: _check_words(options, entry.words, entry.origin) for entry in lines}
    built = {entry: _options(request, entry) for entry in lines}
    runs = [
        _run(request, entry, seed, built[entry], out) for seed in options.seeds for entry in lines
    ]
    _check_used(runs, shared, _AFTER_SEPARATOR)
    for run in runs:
        _check_used([run], own[run.entry], run.entry.origin)
        _check_stored(run)
    return runs


def entries(options: CompareOptions) -> list[PlanEntry]:
    """Return the algorithms and variants to compare; UserError if one is invalid."""
    names = options.algorithms or (() if options.variants else (ALL,))
    if ALL in names:
        names = tuple(ALGORITHMS)
    for name in names:
        _check_name("--algorithms", name, [*ALGORITHMS, ALL])
    by_label = {name: PlanEntry(name, name) for name in names}
    for text in options.variants:
        entry = _variant(text)
        if entry.label in by_label:
            raise UserError(
                f"--variants: expected a unique label for each, got {entry.label!r} twice; "
                "choose another"
            )
        by_label[entry.label] = entry
    return list(by_label.values())


def _variant(text: str) -> PlanEntry:
    match = _VARIANT.fullmatch(text.strip())
    try:
        words = shlex.split(match[2]) if match else []
    except ValueError:  # a quotation mark is missing
        words = []
    if match is None or not words:
        raise UserError(
            "--variants: expected LABEL=ALGORITHM OPTIONS in quotes, the label of letters, digits "
            f"and . _ + -, got {text!r}; write for example 'pi1=aladdin --aladdin-pi 1'"
        )
    _check_name(f"--variants {match[1]}", words[0], list(ALGORITHMS))
    return PlanEntry(match[1], words[0], tuple(words[1:]))


def _check_name(origin: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise UserError(
            f"{origin}: expected one of {', '.join(sorted(known))}, got {name!r}; "
            f"{did_you_mean(name, known)}".rstrip("; ")
        )


def _check_used(runs: Sequence[Run], given: Settings, where: str) -> None:
    """Refuse an option that has no effect on any of these runs."""
    flags = [unused(run.options, given) for run in runs]
    for flag, remedy in flags[0].items():
        if all(flag in each for each in flags):
            raise UserError(f"{where}{flag} has no effect {remedy}")


def _check_words(options: CompareOptions, words: Sequence[str], where: str) -> Settings:
    """Return the settings in these words; refuse invalid ones, and those the comparison sets."""
    try:
        given = read_run_words(options, words)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    for path, setting in given.items():
        instead = SET_HERE.get(path[0])
        # A file of options may be that of a run; the comparison overrides its settings.
        typed = setting.origin.startswith("--")
        if instead and (typed or (path[0] == "resume" and setting.value is not None)):
            raise UserError(f"{where}{setting.origin}: {set_here(instead)}")
    return given


def _words(request: ComparisonRequest, entry: PlanEntry, seed: int) -> list[str]:
    words = [*request.shared, *entry.words, "--algorithm", entry.algorithm, "--seed", str(seed)]
    if request.options.engine == "virtual":
        words += ["--workers", str(request.options.workers)]
    return words


def _options(request: ComparisonRequest, entry: PlanEntry) -> RunOptions:
    """Return the options of an entry's runs, with the first seed."""
    options = request.options
    words = _words(request, entry, options.seeds[0])
    words += [] if options.script is None else NOT_RESUMED
    try:
        built = resolved_options(options, reader.read(options.run_options, words, "", ""))
        ranks_of(entry.algorithm, built, options.workers)
    except UserError as error:
        where = entry.origin if entry.words else ""
        raise UserError(f"{where}{error}") from None
    return built


def _run(
    request: ComparisonRequest, entry: PlanEntry, seed: int, options: RunOptions, out: Path
) -> Run:
    compared = request.options
    return Run(
        entry,
        seed,
        out / RUNS / entry.label / f"seed-{seed}",
        tuple(_words(request, entry, seed)),
        options.model_copy(update={"seed": seed}),
        ranks_of(entry.algorithm, options, compared.workers),
        compared.script,
        compared.script_arguments,
    )


def ranks_of(name: str, options: RunOptions, workers: int) -> int:
    """Return the number of ranks of a run with this number of workers.

    Raises:
        UserError: the algorithm or an option does not support it.
    """
    algorithm = find_algorithm(name)
    servers = options.servers if algorithm.has_servers else 0
    check_ranks(algorithm, workers + servers, options.servers)
    run_options.check_workers(options, workers)
    if isinstance(options, SimulateOptions):
        run_options.check_cluster(options, workers + servers)
    return workers + servers


def changes_of(run: Run) -> list[str]:
    """Return the options in which the run differs from the one stored in its folder, if any."""
    # Comparisons by earlier versions have no OPTIONS.
    name = next((name for name in (OPTIONS, CONFIG_NAME) if (run.folder / name).is_file()), None)
    if name is None:
        return []
    stored = stored_options(run.folder, type(run.options), name)
    return differences(_comparable(stored), _comparable(run.options))


def _check_stored(run: Run) -> None:
    """Refuse a folder with another run, naming the differences."""
    changes = changes_of(run)
    if changes:
        raise UserError(
            f"--out: {run.folder} holds a run with different options (its value first): "
            f"{'; '.join(changes[:8])}. Choose another --out, use the old options, or remove that "
            "folder."
        )


def stored_options(folder: Path, model: type[RunOptions], name: str = CONFIG_NAME) -> RunOptions:
    """Return the options in a file of a run's folder."""
    return build(model, reader.read(model, ["--config", str(folder / name)], "", ""))


def _comparable(options: RunOptions) -> dict[str, object]:
    """Return the options that two runs must share to be the same run."""
    facts = options.model_dump(mode="json", exclude=NOT_COMPARED)
    # This default is equal to the value that older runs have stored.
    if options.wire == "auto" and find_algorithm(options.algorithm).auto_wire == "fp32":
        facts["wire"] = "fp32"
    return facts


# -- finished runs ---------------------------------------------------------------------------
EQUAL = ("engine", "workers", "model", "dataset", "samples", "version")
"""Facts of the summary that should be the same in all runs."""
UNLABELLED = ("checkpoint_every", "eval_every", "log_every", "data_dir", "seed", "algorithm")
"""Options that do not distinguish two rows of the table."""


@dataclass(frozen=True)
class ReadRun:
    """A finished run in a folder."""

    figures: RunFigures
    options: RunOptions


def read_runs(folders: Sequence[Path]) -> list[ReadRun]:
    """Return the runs in these folders; those that differ only in the seed share a label.

    Raises:
        UserError: a folder has no finished run, or is named twice.
    """
    places = [folder.resolve() for folder in folders]
    for folder in folders:
        if places.count(folder.resolve()) > 1:
            raise UserError(
                f"--read: expected different folders, got {folder} twice; leave one out"
            )
        missing = [name for name in (CONFIG_NAME, SUMMARY) if not (folder / name).is_file()]
        if missing:
            raise UserError(
                f"--read: expected the folder of a finished run, got {str(folder)!r}, which has "
                f"no {' and no '.join(missing)}; name another, or complete the run with --resume "
                "first"
            )
    runs = [_read(folder) for folder in folders]
    labels = _labels([_facts(run) for run in runs])
    return [
        ReadRun(replace(run.figures, label=label), run.options)
        for run, label in zip(runs, labels, strict=True)
    ]


def _read(folder: Path) -> ReadRun:
    figures = read_figures(folder, "")
    model = SimulateOptions if figures.summary.get("engine") == "virtual" else TrainOptions
    return ReadRun(figures, stored_options(folder, model))


def _facts(run: ReadRun) -> dict[str, Any]:
    """Return the facts shared by the runs of a row: options and number of workers."""
    facts = {name: v for name, v in _comparable(run.options).items() if name not in UNLABELLED}
    about = {name: run.figures.summary.get(name) for name in ("algorithm", "engine", "workers")}
    return facts | about


def _labels(facts: Sequence[dict[str, Any]]) -> list[str]:
    """Return labels: the algorithm's name and, if it occurs with several options, these."""
    labels = []
    for own in facts:
        others = [other for other in facts if other["algorithm"] == own["algorithm"]]
        # A line is "aladdin.pi: 4 and 2", with this run's value first.
        lines = [line for other in others for line in differences(own, other)]
        differing = dict.fromkeys(line.split(" and ")[0].replace(": ", " ") for line in lines)
        parts = [part for part in differing if not part.endswith(" absent")]
        name = own["algorithm"]
        labels.append(", ".join([name, *(part.removeprefix(f"{name}.") for part in parts)]))
    return labels


def unequal(runs: Sequence[RunFigures]) -> list[str]:
    """Return a note for each fact that should be equal in a fair comparison but differs."""
    notes = []
    for name in EQUAL:
        values = {json.dumps(run.summary.get(name)) for run in runs}
        if len(values) > 1:
            notes.append(f"The runs differ in {name}: {', '.join(sorted(values))}.")
    seeds: dict[str, list[int]] = {}
    for run in runs:
        seeds.setdefault(run.label, []).append(run.summary["seed"])
    if len({tuple(sorted(each)) for each in seeds.values()}) > 1:
        each = (f"{label}: {', '.join(map(str, sorted(own)))}" for label, own in seeds.items())
        notes.append(f"The seeds differ: {'; '.join(each)}.")
    return notes
