"""The decision whether to start, resume or skip a run, from the state of its folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal, TypeVar

from aladdin_mpi.control.exchange import all_or_none, broadcast
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore, identity
from aladdin_mpi.options.general import AUTO, LENGTHS, OWN_DATA
from aladdin_mpi.options.run import (
    CONFIG_NAME,
    RESIZE_FIELDS,
    RESUME_FIELDS,
    SUMMARY,
    RunOptions,
    RunRequest,
    differences,
    resumed_settings,
)
from aladdin_mpi.options.settings import build
from aladdin_mpi.process import console, files
from aladdin_mpi.run import handover
from aladdin_mpi.transport.base import Transport

Options = TypeVar("Options", bound=RunOptions)
Decision = Literal["as requested", "start", "replace", "resume", "complete"]
""""as requested" stands for a run without ``--resume auto``."""


def agree_on_resume(transport: Transport, request: RunRequest[Options]) -> Options | None:
    """Return the options to run with, as rank 0 decides; None if the run is complete.

    Args:
        transport: over all ranks, each of which calls this.
        request: of this rank.

    Raises:
        UserError, RefusedError: the folder holds another run, or cannot be read.
    """
    first = transport.rank == 0
    if request.options.join is not None:
        all_or_none(transport, lambda: _join(transport, request.options) if first else None)
    mine = all_or_none(transport, lambda: decide(request) if first else None)
    decision: Decision = broadcast(transport, mine)
    return all_or_none(transport, lambda: follow(decision, request, quiet=not first))


def _join(transport: Transport, options: RunOptions) -> None:
    """Wait for a run that another job trains.

    Raises:
        UserError: see :func:`.handover.receive`.
    """
    assert options.join is not None
    handover.receive(options.join, transport.size, options.timeout, options.quiet)


def decide(request: RunRequest[Options]) -> Decision:
    """Decide what to do with the folder in ``--run-dir``.

    Raises:
        UserError: it holds another run.
    """
    requested = request.options
    folder = requested.run_dir
    if requested.join is not None and (requested.join / SUMMARY).is_file():
        return "complete"
    if requested.resume != AUTO or folder is None:
        return "as requested"
    if not (folder / CONFIG_NAME).is_file():
        return "start"
    resumed = _resumed(request, folder)
    # Not known yet: the batch size of the DataLoader, and the size of buckets, by device.
    unknown = ["bucket_mb", *(["batch_size"] if requested.dataset == OWN_DATA else [])]
    later = {name: getattr(resumed, name) for name in unknown if (name,) not in request.given}
    requested = requested.model_copy(update=later)
    _check_same(folder, resumed, requested)
    if (folder / SUMMARY).is_file():
        stored = build(request.model, resumed_settings(request.model, {}, folder))
        return "complete" if _is_complete(folder, stored, resumed) else "resume"
    return "resume" if CheckpointStore(folder).exists else "replace"


def _resumed(request: RunRequest[Options], folder: Path) -> Options:
    """Return the folder's options, overridden by those that may be combined with ``--resume``."""
    model, requested = request.model, request.options
    kept = {path: s for path, s in request.given.items() if path[0] in RESUME_FIELDS}
    update: dict[str, Any] = {"resume": folder}
    if requested.allow_resize:
        names = RESIZE_FIELDS.intersection(model.model_fields)
        update |= {name: getattr(requested, name) for name in names}
    return build(model, resumed_settings(model, kept, folder)).model_copy(update=update)


def _check_same(folder: Path, stored: RunOptions, requested: RunOptions) -> None:
    changes = differences(identity(stored), identity(requested))
    if changes:
        names = {line.partition(":")[0].partition(".")[0].replace("-", "_") for line in changes}
        resize = "add --allow-resize, " if names <= RESIZE_FIELDS else ""
        raise UserError(
            f"--run-dir: expected a new folder or that of the same run, got {str(folder)!r}, "
            f"which holds another run (its value first): {'; '.join(changes[:5])}; {resize}use "
            f"another folder, or resume that run with --resume {folder}"
        )


def _is_complete(folder: Path, stored: RunOptions, wanted: RunOptions) -> bool:
    """Return whether a run with a summary has the requested length."""
    if all(getattr(stored, name) == getattr(wanted, name) for name in LENGTHS):
        return True  # also if the program has ended it early
    summary = _summary(folder)
    samples = summary["samples"]
    if wanted.samples is not None or not samples:
        return bool(samples >= (wanted.samples or 1))
    if wanted.steps is not None:
        return bool(summary.get("steps", samples / stored.step_size) >= wanted.steps)
    epoch = samples / summary["epochs"]
    return bool(samples >= round((wanted.epochs or 0) * epoch))


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    try:
        summary: dict[str, Any] = files.read(path.read_text(encoding="utf-8"))
        if all(isinstance(summary[name], (int, float)) for name in ("samples", "epochs")):
            return summary
        why = "no number of samples and epochs"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = repr(error)
    raise UserError(
        f"--resume auto: the summary in {path} cannot be read ({why}). Remove it, and the run "
        "resumes from its last checkpoint."
    )


def follow(decision: Decision, request: RunRequest[Options], quiet: bool = False) -> Options | None:
    """Return the options that carry out a decision; None if the run is complete.

    Raises:
        UserError: this rank does not see the folder, or was started with other options.
    """
    requested = request.options
    folder = requested.run_dir
    if requested.join is not None:
        requested, folder = requested.model_copy(update={"join": None}), requested.join
    elif (decision == "as requested") != (requested.resume != AUTO):
        raise UserError("--resume: differs from rank 0. Start every rank with the same options.")
    if decision == "as requested" or folder is None:
        return requested
    if decision == "resume":
        return _resumed(request, folder)
    if decision == "complete":
        if not quiet:
            console.say(f"aladdin_mpi: the run in {folder} is complete", sys.stdout)
        return None
    begins = {"resume": None, "allow_resize": False, "overwrite": decision == "replace"}
    return requested.model_copy(update=begins)
