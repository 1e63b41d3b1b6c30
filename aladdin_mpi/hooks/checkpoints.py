"""Checkpoints: written between a run's segments, read when it is resumed; complete or absent.

Every rank writes its part into a folder with a temporary name. Rank 0 then adds a manifest with all
sizes and digests, and gives the folder its final name. A folder with that name is therefore
complete, even if the job is killed at any time.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import zip_longest
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from aladdin_mpi.control.exchange import (
    all_or_none,
    attempt_all,
    broadcast,
    gather,
    receive_object,
    refuse,
    send_object,
)
from aladdin_mpi.control.tags import Tag
from aladdin_mpi.data.sampler import Period
from aladdin_mpi.errors import DISK_FULL, TransportError, UserError, system_error
from aladdin_mpi.flat.lanes import LaneReplica
from aladdin_mpi.flat.replica import describe_state
from aladdin_mpi.flat.state import MergedState
from aladdin_mpi.optimizers.script_access import IMPLEMENTATION
from aladdin_mpi.optimizers.sgd import LearningRate
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.fields import with_current_names
from aladdin_mpi.options.run import (
    RESIZE_FIELDS,
    RESUME_FIELDS,
    RunOptions,
    SimulateOptions,
    agreed,
    differences,
)
from aladdin_mpi.process import files, guard
from aladdin_mpi.process.files import check_own_folder, remove_tree, shown, write_whole
from aladdin_mpi.session.context import Context, collect_model, give_buffers, versions
from aladdin_mpi.session.coordinator import Coordinator, RunHook, SegmentEnd
from aladdin_mpi.session.islands import Islands
from aladdin_mpi.session.plan import Origin, Plan
from aladdin_mpi.session.resizing import merge_lanes, report_resize, taken
from aladdin_mpi.session.session import Session
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.worker.role import Role

FORMAT = "aladdin_mpi checkpoint 1"
MANIFEST = "manifest.json"
FOLDER = "checkpoint"
NUMBER = r"(\d{12}|[1-9]\d{12,})"
NAMES = re.compile(f"samples-{NUMBER}")
"""Names of checkpoints; other files and folders are never touched."""
UNFINISHED = re.compile(f"writing-(over-samples-)?{NUMBER}")
"""Names of checkpoints that are being written or removed."""
RESIZED = ("ranks: ", "option.servers: ", "option.workers: ")
"""Prefixes of differences that result from another number of ranks."""
KINDS: dict[str, type | tuple[type, ...]] = {
    "samples": int,
    "parts": list,
    "ranks": int,
    "option": dict,
    "moment": (int, float),
}
"""Keys of every manifest, and their types."""

MISFITS = AttributeError, LookupError, RuntimeError, TypeError, UnpicklingError, ValueError
"""Errors of restoring a state that another version has written."""


class CheckpointStore:
    """The checkpoints in a run's folder; only the last one is kept."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.folder = run_dir / FOLDER

    def _temporary(self, samples: int) -> Path:
        return self.folder / f"writing-{samples:012d}"

    # -- writing ------------------------------------------------------------------------------
    def begin(self, samples: int) -> None:
        """Create the temporary folder at rank 0, before any rank writes, and remove leftovers.

        Raises:
            UserError: it cannot be written; :meth:`write` and :meth:`commit` raise this too.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own_folder(self.folder)
            for leftover in self._named(UNFINISHED):
                remove_tree(leftover)
            self._temporary(samples).mkdir()

    def write(self, samples: int, rank: int, state: dict[str, Any]) -> dict[str, Any]:
        """Write a rank's part and return its entry for the manifest."""
        path = self._temporary(samples) / f"rank-{rank}.pt"
        with self._writing():
            with path.open("xb") as file:  # never through a link
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            return {"file": path.name, "bytes": path.stat().st_size, "sha256": _digest(path)}

    def commit(
        self, samples: int, entries: list[dict[str, Any] | None], about: dict[str, Any]
    ) -> None:
        """Make the checkpoint valid at rank 0, after all ranks have written, and drop older ones.

        ``entries`` are by rank, None for a failed rank.
        """
        temporary, final = self._temporary(samples), self.folder / f"samples-{samples:012d}"
        manifest = {"format": FORMAT, "samples": samples, "parts": entries, **about}
        with self._writing():
            write_whole(temporary / MANIFEST, files.written(manifest, indent=1))
            if os.path.lexists(final):
                self._remove(final)
            temporary.rename(final)
            _sync_folder(self.folder)
            for older in self.all():
                if older != final:
                    self._remove(older)

    def discard(self, samples: int) -> None:
        """Remove an incomplete checkpoint at rank 0, when no rank writes any more."""
        shutil.rmtree(self._temporary(samples), ignore_errors=True)

    def _remove(self, checkpoint: Path) -> None:
        """Rename and then remove a checkpoint, so that a failure leaves no incomplete one."""
        doomed = self.folder / f"writing-over-{checkpoint.name}"
        checkpoint.rename(doomed)
        remove_tree(doomed)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            reason = system_error(error)
            if reason is None:
                raise
            kept = next(reversed(self.all()), None)
            last = f"the last one, {kept.name}, is kept" if kept else "no earlier one exists"
            is_full = reason.errno in DISK_FULL
            remedy = "Free space for two checkpoints" if is_full else "Make the folder writable"
            raise UserError(
                f"checkpoint: cannot write it to {self.folder} ({reason.strerror}); {last}. "
                f"{remedy}"
            ) from error

    # -- reading ------------------------------------------------------------------------------
    def manifest(self) -> dict[str, Any]:
        """Return the last checkpoint's manifest. Raises UserError like :meth:`load`."""
        return _read_manifest(self._last())

    def load(
        self, rank: int, about: dict[str, Any], resizes: bool = False
    ) -> dict[str, Any] | None:
        """Return a rank's part of this run's last checkpoint; None if the rank had failed before.

        ``about`` must agree with the manifest; with ``resizes``, except for the number of ranks
        and the options that depend on it.

        Raises:
            UserError: no checkpoint, a damaged one, or one of another run.
        """
        folder = self._last()
        manifest, here = _read_manifest(folder), files.read(files.written(about))
        if resizes:
            manifest, here = _without_ranks(manifest), _without_ranks(here)
        _check_model(folder, manifest, here)
        if "optimizer" in here:
            _shorten_optimizers(manifest, here)
        # Options of later versions had their defaults.
        stored = {name: manifest[name] for name in here if name in manifest}
        changes = differences(stored, _as_in(manifest, here))
        if changes:
            resize = ""
            if all(line.startswith(RESIZED) for line in changes):
                resize = ", or add --allow-resize to continue with a different number of workers"
            raise UserError(
                f"--resume: the checkpoint {folder} belongs to a different run (the checkpoint's "
                f"value first): {'; '.join(changes[:5])}{_other_versions(manifest)}. Resume it "
                f"with the options, optimizer and data that it was started with{resize}."
            )
        return self.part(rank)

    def part(self, rank: int) -> dict[str, Any] | None:
        """Return a rank's part of the last checkpoint; None if the rank had failed before.

        Raises:
            UserError: no checkpoint, or a damaged one.
        """
        folder = self._last()
        entry = _read_manifest(folder)["parts"][rank]
        if entry is None:
            return None
        path = folder / entry["file"]
        if not path.is_file():
            fault = "is missing"
        elif (size := path.stat().st_size) != entry["bytes"]:
            fault = f"is truncated or has been changed: expected {entry['bytes']} bytes, got {size}"
        elif _digest(path) != entry["sha256"]:
            fault = "is damaged: its SHA-256 is not that of the manifest"
        else:
            with _named_versions(folder):
                state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
                return state
        raise UserError(f"--resume: {path} {fault}. Use another copy of the run folder.")

    def explaining(self) -> AbstractContextManager[None]:
        """Return a context that names the versions if the state of another cannot be restored."""
        return _named_versions(self._last())

    def all(self) -> list[Path]:
        """Return the complete checkpoints, the oldest first: named folders with a manifest."""
        complete = [folder for folder in self._named(NAMES) if (folder / MANIFEST).is_file()]
        return sorted(complete, key=lambda folder: int(folder.name.rpartition("-")[2]))

    def _named(self, names: re.Pattern[str]) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if names.fullmatch(path.name)]

    @property
    def exists(self) -> bool:
        """Whether a complete checkpoint exists."""
        return bool(self.all())

    def _last(self) -> Path:
        checkpoints = self.all()
        if not checkpoints:
            raise UserError(
                f"--resume: {self.folder} contains no checkpoint, because the run ended before "
                "its first one. Start it again with --overwrite."
            )
        return checkpoints[-1]


def _check_model(folder: Path, manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Check that this run has the checkpoint's model; earlier versions have not described it."""
    before, now = manifest.pop("model", None), here.pop("model", None)
    if before is None or now is None:
        return
    for was, new in zip_longest(before, now, fillvalue="absent"):
        if was != new:
            raise UserError(
                f"--resume: the model is not that of the checkpoint {folder}: the first parameter "
                f"or buffer that differs was {was!r}, and is {new!r}. Resume with the model that "
                "the run was started with, or start a new run in another folder."
            )


def _shorten_optimizers(manifest: dict[str, Any], here: dict[str, Any]) -> None:
    """Reduce the descriptions of two optimizers to the settings that only one of them has."""
    pair = str(manifest.get("optimizer")), str(here.get("optimizer"))
    first, second = (
        [
            part
            for part in re.split(r"[,;:] (?![^(]*\))", each)  # not in parentheses
            if part.split(" ")[0] not in IMPLEMENTATION  # in checkpoints of earlier versions
        ]
        for each in pair
    )
    only_first = [each for each in first if each not in second]
    only_second = [each for each in second if each not in first]
    if only_first or only_second:
        manifest["optimizer"] = ", ".join(only_first) or "absent"
        here["optimizer"] = ", ".join(only_second) or "absent"
    elif len(first) == len(second):
        manifest["optimizer"] = here["optimizer"]


@contextmanager
def _named_versions(folder: Path) -> Iterator[None]:
    """Name the versions that wrote a checkpoint if others cannot restore it."""
    try:
        yield
    except MISFITS as error:
        others = _other_versions(_read_manifest(folder))
        if not others or isinstance(error, TransportError):
            raise
        raise UserError(
            f"--resume: the checkpoint {folder} cannot be restored ({type(error).__name__}: "
            f"{error}){others}. Resume with the versions that wrote it."
        ) from error


def _other_versions(manifest: Mapping[str, Any]) -> str:
    """Return a clause on the versions that wrote a checkpoint, if they are not the present ones."""
    wrote, here = manifest.get("version"), versions()
    if wrote == here:
        return ""
    names = [" ".join(item) for item in (wrote or {}).items() if item not in here.items()]
    now = [f"{name} {here[name]}" for name in here if (wrote or {}).get(name) != here[name]]
    by = ", ".join(names) or "an earlier version of aladdin_mpi"
    return f"; it was written with {by}, and this is {', '.join(now)}"


def _without_ranks(about: dict[str, Any]) -> dict[str, Any]:
    option = {k: v for k, v in about["option"].items() if k not in RESIZE_FIELDS}
    return {**{k: v for k, v in about.items() if k != "ranks"}, "option": option}


def _as_in(written: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """Return ``here`` without the keys that are missing in ``written``."""
    return {
        name: _as_in(written[name], value) if isinstance(value, dict) else value
        for name, value in here.items()
        if name in written
    }


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = files.read(path.read_text())
        name = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--resume: {folder} is not a checkpoint of aladdin_mpi: {path.name} cannot be read "
            f"({error!r}). Name the folder of a run."
        ) from error
    if name != FORMAT:
        raise UserError(
            f"--resume: {folder} has the format {name!r}, expected {FORMAT!r}; resume with the "
            "version of aladdin_mpi that wrote it"
        )
    if fault := _fault(manifest):
        raise UserError(
            f"--resume: {path} is damaged: {fault}. Use another copy of the run folder."
        )
    manifest["option"] = with_current_names(SimulateOptions, manifest["option"])
    return manifest


def _fault(manifest: dict[str, Any]) -> str:
    """Return a description of a manifest's fault; empty if it has none."""
    for name, kind in KINDS.items():
        if not isinstance(manifest.get(name), kind):
            return f"it has no {name}"
    parts = manifest["parts"]
    if len(parts) != manifest["ranks"]:
        return f"expected the parts of {manifest['ranks']} ranks, got {len(parts)}"
    for rank, part in enumerate(parts):
        is_whole = isinstance(part, dict) and {"file", "bytes", "sha256"} <= part.keys()
        if part is not None and not is_whole:
            return f"its entry for rank {rank} says no file, bytes and sha256"
    return ""


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_origin(transport: Transport, options: RunOptions, algorithm: Algorithm) -> Origin:
    """Return the origin of the run; every rank calls it, and rank 0 reads the checkpoint.

    Raises:
        UserError, RefusedError: no checkpoint to resume, or an unreadable one.
    """
    servers = options.servers if algorithm.has_servers else 0
    if options.resume is None:
        workers = transport.size - options.spares - servers
        return Origin(workers, servers, begun=(servers, workers))
    store = CheckpointStore(Path(options.resume))
    stored = all_or_none(transport, lambda: store.manifest() if transport.rank == 0 else {})
    names = ("ranks", "option", "past", "schedule_step", "begun", "islands", "lanes")
    manifest = broadcast(transport, {name: stored.get(name) for name in names})
    if algorithm.has_servers:
        servers = int(manifest["option"]["servers"])
    workers = manifest["ranks"] - servers
    past = tuple(Period(tuple(taken)) for taken in manifest["past"] or ())  # older: no past
    begun: Sequence[int] = manifest["begun"] or (servers, workers)
    islands = manifest["islands"] or (), manifest["lanes"] or 1
    return Origin(workers, servers, past, manifest["schedule_step"], (begun[0], begun[1]), *islands)


def identity(options: RunOptions) -> dict[str, Any]:
    """Return the options that must not change when a run is resumed."""
    return {name: value for name, value in agreed(options).items() if name not in RESUME_FIELDS}


class Checkpoints(RunHook):
    """A hook that saves the run after each segment; every rank writes its part.

    ``optimizer`` describes the optimizer, and ``length`` is that of the data in samples, None if
    they have none. Both must be the same when the run is resumed.
    """

    def __init__(
        self, context: Context, plan: Plan, optimizer: str, length: int | None, folder: Path
    ) -> None:
        self._transport = transport = context.transport
        self._store = CheckpointStore(folder)
        self._about = {
            "ranks": transport.size,
            "engine": transport.engine,
            "option": identity(context.options),
            "optimizer": optimizer,
            "data": {"samples": length},
            "model": describe_state(context.module),
            "divided by FSDP": context.is_sharded,
        }
        self._islands = context.islands.as_json()
        self._plan = plan
        self._saved: int | None = None

    def on_settled(self, end: SegmentEnd, run: Coordinator | None) -> None:
        """Save the run unless it has not advanced, or is closed, possibly in the middle of a step.

        If the checkpoint cannot be written, training continues, and the next one is attempted.

        Raises:
            UserError: the run ends, and a rank cannot write its part; raised at rank 0.
            RefusedError: the same, on the other ranks.
        """
        if end.drawn == self._saved or end.closed_by is not None:
            return
        state = end.state()
        doubts = gather(self._transport, end.doubt(state))
        doubt = broadcast(self._transport, next(filter(None, doubts), ""))
        problem = "" if doubt else self._write(end, state)
        if problem and end.ends_run:
            refuse(
                self._transport,
                f"{problem}, then resume with --resume {shown(self._store.run_dir)}",
            )
        if run is not None and doubt:
            run.ledger.checkpoint_skipped(end.drawn, doubt)
        elif run is not None and problem:
            guard.warn(
                [f"{problem}. Training continues; the next checkpoint is written as planned."]
            )
        if not problem:
            self._saved = end.drawn

    def _write(self, end: SegmentEnd, state: dict[str, Any]) -> str:
        """Write a checkpoint; return on every rank the reason if it cannot be written."""
        transport, store, drawn = self._transport, self._store, end.drawn
        origin = end.origin.as_json(self._plan.schedule_step) | self._islands
        about = {**self._about, "version": versions(), "moment": end.moment, **origin}
        entries: list[dict[str, Any] | None] = []

        def first(step: Callable[[], None]) -> str:
            return attempt_all(transport, lambda: step() if transport.rank == 0 else None)[1]

        problem = first(lambda: store.begin(drawn))
        if not problem:
            entry, problem = attempt_all(
                transport, lambda: store.write(drawn, transport.rank, state)
            )
        if not problem:
            entries = gather(transport, entry)
            problem = first(lambda: store.commit(drawn, entries, about))
        if problem and transport.rank == 0:  # when every rank has tried
            store.discard(drawn)
        return problem

    # -- resuming ---------------------------------------------------------------------------
    def resume(self, session: Session, lr: LearningRate) -> None:
        """Restore the last checkpoint, on every rank.

        Raises:
            UserError: the checkpoint does not fit this run, or is damaged; raised at rank 0.
            RefusedError: the same, on the other ranks.
        """
        context, origin = session.context, session.origin
        may_differ = context.options.allow_resize
        same = (origin.workers, origin.servers) == (context.workers, context.servers)
        if same and not _are_same(origin.ranks, context.islands):
            all_or_none(self._transport, lambda: _refuse_islands(context, origin.ranks))
            same = False
        if not same and (may_differ or origin.fits(context.servers, context.workers)):
            with session.uncounted(), self._store.explaining():
                self._resize(session, lr)
        else:
            state = all_or_none(self._transport, lambda: self._load(may_differ))
            with self._store.explaining():
                session.restore(state)
            with session.uncounted():
                _restore_failed(session, state is None)
        self._saved = session.began_at

    def _load(self, resizes: bool) -> dict[str, Any] | None:
        state = self._store.load(self._transport.rank, self._about, resizes)
        if state is not None and state["drawn"] > self._plan.total:
            raise UserError(
                f"--resume: expected a length of at least the {state['drawn']} samples already "
                f"trained on, got {self._plan.total}; increase --epochs, --samples or --steps, "
                "or leave them out"
            )
        return state

    def _resize(self, session: Session, lr: LearningRate) -> None:
        """Restore a checkpoint with other numbers of workers and servers."""
        context, origin, transport = session.context, session.origin, self._transport
        first = transport.rank == 0
        state = all_or_none(transport, lambda: self._load(resizes=True) if first else None)
        former = origin.ranks
        merged, of_all = merge_lanes(self._store.part, former, context, session.role)
        if state is not None:
            granted = former.divided(state["keeper"].get("granted", ()))
            of_all.granted = granted[origin.servers :]
        past = (*origin.past, Period(tuple(broadcast(transport, taken(of_all)))))
        begun = context.servers, context.workers
        now = Origin(context.workers, context.servers, past, origin.schedule_step, begun)
        session.resize(state, merged, now, of_all)
        all_or_none(transport, lambda: self._restore_local(session, former))
        if first and not context.options.quiet:
            report_resize(context.algorithm, origin, now, lr, context.islands.size)

    def _restore_local(self, session: Session, former: Islands) -> None:
        """Restore the local state of the worker of this number; another only gets buffers."""
        context, rank = session.context, self._transport.rank
        if context.is_server:
            return
        island, place = context.islands.number(rank), context.island.index(rank)

        def part(members: Sequence[int]) -> dict[str, Any] | None:
            return self._store.part(members[place % len(members)])

        mine = part(former.members[island]) if island < len(former.members) else None
        if mine is not None:
            session.local.load_state_dict(mine["local"])
        elif (other := next(filter(None, map(part, former.members)), None)) is not None:
            session.local.share_buffers(other["local"])


def _are_same(former: Islands, now: Islands) -> bool:
    """Return whether the same ranks form islands, with the same lanes."""
    islands = [[*map(list, each.members)] for each in (former, now)]
    return islands[0] == islands[1] and (now.size == 1 or former.lanes == now.lanes)


def _refuse_islands(context: Context, former: Islands) -> None:
    """Refuse a checkpoint whose parts belong to other places in islands, unless it is resized."""
    if not context.options.allow_resize:
        raise UserError(
            f"--resume: the islands of the checkpoint had the ranks {_listed(former)}, and those "
            f"of this run have {_listed(context.islands)}. Start the ranks in the same order on "
            "the hosts, or add --allow-resize."
        )


def _listed(islands: Islands) -> str:
    return " and ".join(", ".join(map(str, island)) for island in islands.members)


def _restore_failed(session: Session, is_new: bool) -> None:
    """Give the global model to workers that had failed when the checkpoint was written."""
    context, role, replica = session.context, session.role, session.context.whole
    new = broadcast(context.transport, gather(context.transport, is_new))
    common: dict[str, Any] = broadcast(context.transport, role.common())
    if is_new:
        role.join(common)
    give_buffers(context, is_new)
    if not any(new) or not context.is_real:
        return
    mine = replica.parameters.clone()
    collect_model(context, role, without=[rank for rank, was_lost in enumerate(new) if was_lost])
    if not is_new:
        replica.parameters.copy_(mine)
    elif isinstance(context.replica, LaneReplica):
        context.replica.refresh()
    if context.algorithm.all_reduces is not None:
        _share_state(context, role, new)


def _share_state(context: Context, role: Role, new: Sequence[bool]) -> None:
    """Give new ranks what is equal on all workers, such as momentum, from the first of the others.

    Without it, their models would differ from then on.
    """
    transport, islands = context.transport, context.islands
    for lane in range(islands.lanes):
        workers = islands.workers(lane)
        first = next(rank for rank in workers if not new[rank])
        for rank in workers:
            if not new[rank]:
                continue
            if transport.rank == first:
                state = {k: each for k, each in role.state_dict().items() if k != "parameters"}
                transport.wait(*send_object(transport, state, rank, Tag.STATE))
            elif transport.rank == rank:
                state = receive_object(transport, first, Tag.STATE)
                model = context.replica.parameters.clone()
                role.resize(MergedState(model, state))
