"""Resume a run: find its last checkpoint, and take up the state."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from aladdin_mpi.control.exchange import all_or_none, broadcast, gather
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import UserError
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.resume import (
    AUTO,
    CONFIG_NAME,
    RESIZE_FIELDS,
    RESUME_FIELDS,
    SUMMARY,
    resumed_options,
)
from aladdin_mpi.options.run import LENGTHS, OWN_DATA, RunOptions, agreed, differences
from aladdin_mpi.options.settings import Settings, build
from aladdin_mpi.process import console, files
from aladdin_mpi.run.checkpoint import CheckpointStore, LocalState
from aladdin_mpi.run.context import Context, collect_model, make_layout
from aladdin_mpi.run.plan import Origin
from aladdin_mpi.run.resizing import StateAssembly, share, taken, tell
from aladdin_mpi.run.segments import Segments
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role

Options = TypeVar("Options", bound=RunOptions)
Decision = Literal["as asked", "start", "replace", "resume", "complete"]
"""``as asked``: without ``--resume auto``."""


def agree_on_resume(
    transport: Transport, model: type[Options], given: Settings, asked: Options
) -> Options | None:
    """Return the options to run with, as rank 0 decides; None if nothing is left to do.

    Args:
        transport: over all ranks, each of which calls this.
        model: of the options.
        given: the user's settings.
        asked: the options that follow from them.

    Raises:
        UserError, RefusedError: the folder holds another run, or cannot be read.
    """
    first = transport.rank == 0
    mine = all_or_none(transport, lambda: decide(model, given, asked) if first else None)
    decision: Decision = broadcast(transport, mine)
    return all_or_none(transport, lambda: follow(decision, model, given, asked, quiet=not first))


def decide(model: type[Options], given: Settings, asked: Options) -> Decision:
    """What to do with ``--run-dir``.

    Raises:
        UserError: it holds another run.
    """
    folder = asked.run_dir
    if asked.resume != AUTO or folder is None:
        return "as asked"
    if not (folder / CONFIG_NAME).is_file():
        return "start"
    resumed = _resumed(model, given, asked, folder)
    _check_same(folder, resumed, _as_loaded(asked, given, resumed))
    if (folder / SUMMARY).is_file():
        stored = build(model, resumed_options(model, {}, folder))
        return "complete" if _is_complete(folder, stored, resumed) else "resume"
    return "resume" if CheckpointStore(folder).exists else "replace"


def _resumed(model: type[Options], given: Settings, asked: Options, folder: Path) -> Options:
    """The folder's options, and over them what may be given beside ``--resume``."""
    kept = {path: s for path, s in given.items() if path[0] in RESUME_FIELDS}
    resumed = build(model, resumed_options(model, kept, folder))
    update: dict[str, Any] = {"resume": folder}
    if asked.allow_resize:
        names = RESIZE_FIELDS.intersection(model.model_fields)
        update |= {name: getattr(asked, name) for name in names}
    return resumed.model_copy(update=update)


def _as_loaded(asked: Options, given: Settings, there: Options) -> Options:
    """``asked``, with the batch size that a DataLoader will say if the program has said none."""
    if asked.dataset != OWN_DATA or ("batch_size",) in given:
        return asked
    return asked.model_copy(update={"batch_size": there.batch_size})


def _check_same(folder: Path, there: RunOptions, asked: RunOptions) -> None:
    found = differences(_identity(there), _identity(asked))
    if found:
        may = {line.partition(":")[0].partition(".")[0].replace("-", "_") for line in found}
        resize = "add --allow-resize, " if may <= RESIZE_FIELDS else ""
        raise UserError(
            f"--run-dir: expected a new folder or that of the same run, got {str(folder)!r}, which "
            f"holds another run (its value first): {'; '.join(found[:5])}; {resize}give another "
            f"folder, or go on with that run by --resume {folder}"
        )


def _identity(options: RunOptions) -> dict[str, Any]:
    return {name: value for name, value in agreed(options).items() if name not in RESUME_FIELDS}


def _is_complete(folder: Path, stored: RunOptions, wanted: RunOptions) -> bool:
    """Whether a run that has its summary is as long as wanted."""
    if all(getattr(stored, name) == getattr(wanted, name) for name in LENGTHS):
        return True  # also if the program has ended it early
    summary = _summary(folder)
    done = summary["samples"]
    if wanted.samples is not None or not done:
        return bool(done >= (wanted.samples or 1))
    if wanted.steps is not None:
        return bool(summary.get("steps", done / stored.step_size) >= wanted.steps)
    epoch = done / summary["epochs"]
    return bool(done >= round((wanted.epochs or 0) * epoch))


def _summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    try:
        found: dict[str, Any] = files.read(path.read_text(encoding="utf-8"))
        if all(isinstance(found[name], (int, float)) for name in ("samples", "epochs")):
            return found
        why = "no number of samples and epochs"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = repr(error)
    raise UserError(
        f"--resume auto: expected the summary of a run in {path}, got what cannot be read ({why}); "
        "remove it, and the run goes on from its last checkpoint"
    )


def follow(
    decision: Decision,
    model: type[Options],
    given: Settings,
    asked: Options,
    quiet: bool = False,
) -> Options | None:
    """Return the options that carry out a decision; None if nothing is left to do.

    Raises:
        UserError: this rank does not see the folder, or was started with other options.
    """
    folder = asked.run_dir
    if (decision == "as asked") != (asked.resume != AUTO):
        raise UserError("--resume: differs from rank 0; start every rank with the same options")
    if decision == "as asked" or folder is None:
        return asked
    if decision == "resume":
        return _resumed(model, given, asked, folder)
    if decision == "complete":
        if not quiet:
            console.say(
                f"aladdin_mpi: the run in {folder} is complete; nothing is left to do", sys.stdout
            )
        return None
    begins = {"resume": None, "allow_resize": False, "overwrite": decision == "replace"}
    return asked.model_copy(update=begins)


@dataclass(frozen=True)
class Resumption:
    """What takes up a checkpoint.

    Attributes:
        store: where it is.
        origin: who wrote it.
        lr: of the run that goes on.
    """

    context: Context
    role: Role
    local: LocalState
    segments: Segments
    store: CheckpointStore
    origin: Origin
    lr: LearningRate


def go_on(of: Resumption) -> None:
    """Take up the last checkpoint. Every rank calls it.

    Raises:
        UserError, RefusedError: the checkpoint does not fit this run, or is damaged.
    """
    before, now = (of.origin.workers, of.origin.servers), (of.context.workers, of.context.servers)
    servers, workers = of.context.servers, of.context.workers
    resizes = of.context.options.allow_resize or of.origin.fits(servers, workers)
    if resizes and before != now:
        with of.segments.uncounted():
            resize(of)
        return
    may_differ = of.context.options.allow_resize
    state = all_or_none(of.context.transport, lambda: of.segments.load(may_differ))
    of.segments.restore(state)
    with of.segments.uncounted():
        _revive(of.context, of.role, state is None)


def resize(of: Resumption) -> None:
    """From a checkpoint of other numbers of workers and servers."""
    context, origin, transport = of.context, of.origin, of.context.transport
    first = transport.rank == 0
    state = all_or_none(transport, lambda: of.segments.load(resizes=True) if first else None)
    options, algorithm, replica = context.options, context.algorithm, context.replica
    layout = make_layout(options, algorithm, replica, origin.servers, origin.workers)
    parts = StateAssembly(of.store.part, algorithm, origin, layout, of.role, replica.parameters)
    merged = all_or_none(transport, lambda: parts.merged() if first else None)
    if merged is not None and state is not None:
        merged.granted = state["keeper"].get("granted", ())[origin.servers :]
    merged = share(transport, merged)
    past = (*origin.past, Period(taken(merged)))
    begun = context.servers, context.workers
    now = Origin(context.workers, context.servers, past, origin.schedule_step, begun)
    of.segments.resize(state, merged, now)
    all_or_none(transport, lambda: _take_local(of))
    if first and not options.quiet:
        tell(algorithm, origin, now, of.lr)


def _take_local(of: Resumption) -> None:
    """What the former worker of this number had of its own; a new one has buffers alone."""
    if of.context.is_server:
        return
    worker = of.context.transport.rank - of.context.servers
    own = worker < of.origin.workers
    part = of.store.part(of.origin.servers + (worker if own else 0))
    if part is not None and own:
        of.local.load_state_dict(part["local"])
    elif part is not None:
        of.local.share_buffers(part["local"])


def _revive(context: Context, role: Role, is_new: bool) -> None:
    """Give the global model to workers that had failed when the checkpoint was written."""
    transport, replica = context.transport, context.replica
    new = broadcast(transport, gather(transport, is_new))
    common = broadcast(transport, role.common())
    if is_new:
        role.join(common)
    if not any(new) or not context.is_real:
        return
    mine = replica.parameters.clone()
    collect_model(context, role, without=[rank for rank, was_lost in enumerate(new) if was_lost])
    if not is_new:
        replica.parameters.copy_(mine)
