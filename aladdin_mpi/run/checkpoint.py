"""Checkpoints: whole or not at all.

Every rank writes its own part into a folder with a temporary name; rank 0 then adds
a manifest with all sizes and digests and gives the folder its name. A folder that
bears the name is therefore complete, whenever the job was killed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi.errors import UserError, system_error
from aladdin_mpi.options.run import RESIZE_FIELDS, differences
from aladdin_mpi.process import files
from aladdin_mpi.process.files import check_own_folder, remove_tree

FORMAT = "aladdin_mpi checkpoint 1"
MANIFEST = "manifest.json"
FOLDER = "checkpoint"
NUMBER = r"(\d{12}|[1-9]\d{12,})"
NAMES = re.compile(f"samples-{NUMBER}")
"""The names of checkpoints. What has another name is somebody else's, and stays as it is."""
UNFINISHED = re.compile(f"writing-(over-samples-)?{NUMBER}")
"""The names of those that are being written, or removed."""
RESIZED = ("ranks: ", "option.servers: ", "option.workers: ")
"""How differences begin that come from other numbers of ranks."""


class CheckpointStore:
    """The checkpoints of a run, of which the last is kept.

    Args:
        run_dir: the run's folder, seen by all ranks.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / FOLDER

    def _temporary(self, samples: int) -> Path:
        return self.folder / f"writing-{samples:012d}"

    def _final(self, samples: int) -> Path:
        return self.folder / f"samples-{samples:012d}"

    def begin(self, samples: int) -> None:
        """At rank 0, before any rank writes: make room, remove what an earlier death left.

        Raises:
            UserError: it cannot be written, as in :meth:`write` and :meth:`commit`.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            check_own_folder(self.folder)
            for leftover in self._named(UNFINISHED):
                remove_tree(leftover)
            self._temporary(samples).mkdir()

    def write(self, samples: int, rank: int, state: dict[str, Any]) -> dict[str, Any]:
        """Write one rank's part; returns its entry for the manifest."""
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
        """At rank 0, after all have written: make the checkpoint valid, drop older ones.

        ``entries`` are by rank, None of a rank that has failed.
        """
        temporary, final = self._temporary(samples), self._final(samples)
        manifest = {"format": FORMAT, "samples": samples, "parts": entries, **about}
        with self._writing():
            with (temporary / MANIFEST).open("x") as file:
                file.write(files.written(manifest, indent=1))
                file.flush()
                os.fsync(file.fileno())
            if os.path.lexists(final):
                self._remove(final)
            temporary.rename(final)
            _sync_folder(self.folder)
            for older in self.all():
                if older != final:
                    self._remove(older)

    def discard(self, samples: int) -> None:
        """At rank 0, when no rank writes any more: remove one that could not be completed."""
        shutil.rmtree(self._temporary(samples), ignore_errors=True)

    def _remove(self, checkpoint: Path) -> None:
        """Remove a checkpoint, which loses its name first: a death leaves no half of one."""
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
            last = f"the last one, {kept.name}, is kept" if kept else "there is none before it"
            raise UserError(
                f"checkpoint: cannot write it to {self.folder} ({reason.strerror}); {last}; make "
                f"room for two of them, then go on with --resume {self.folder.parent}"
            ) from error

    def manifest(self) -> dict[str, Any]:
        """What the last checkpoint says of itself. Raises UserError as :meth:`load`."""
        return _read_manifest(self._last())

    def check(self, about: dict[str, Any], resizes: bool = False) -> None:
        """Check that the last checkpoint is of this run.

        Args:
            about: what must be as in the manifest, such as the number of ranks.
            resizes: but not that number, and what goes with it.

        Raises:
            UserError: there is none, it cannot be read, or it belongs to another run.
        """
        folder = self._last()
        manifest = _read_manifest(folder)
        here = files.read(files.written(about))
        if resizes:
            manifest, here = _without_ranks(manifest), _without_ranks(here)
        # What a later version has added was at its default then.
        found = differences({name: manifest.get(name) for name in here}, _as_in(manifest, here))
        if found:
            resize = ""
            if all(line.startswith(RESIZED) for line in found):
                resize = ", or add --allow-resize to go on with another number of workers"
            raise UserError(
                f"--resume: the checkpoint {folder} belongs to another run than this (the "
                f"checkpoint's value first): {'; '.join(found[:5])}; resume it as it was "
                f"started{resize}"
            )

    def load(
        self, rank: int, about: dict[str, Any], resizes: bool = False
    ) -> dict[str, Any] | None:
        """This rank's part of the last checkpoint; None if the rank had failed by then.

        Args:
            rank: whose part.
            about: see :meth:`check`.
            resizes: see there.

        Raises:
            UserError: as :meth:`check`, or it is damaged.
        """
        self.check(about, resizes)
        return self.part(rank)

    def part(self, rank: int) -> dict[str, Any] | None:
        """A rank's part of the last checkpoint; None if the rank had failed by then.

        Raises:
            UserError: there is none, or it is damaged.
        """
        folder = self._last()
        entry = _read_manifest(folder)["parts"][rank]
        if entry is None:
            return None
        path = folder / entry["file"]
        if not path.is_file():
            raise UserError(f"--resume: {path} is missing; take another copy of the run folder")
        size = path.stat().st_size
        if size != entry["bytes"]:
            raise UserError(
                f"--resume: {path} is truncated or has been changed: expected {entry['bytes']} "
                f"bytes, got {size}; take another copy of the run folder"
            )
        if _digest(path) != entry["sha256"]:
            raise UserError(
                f"--resume: {path} is damaged: its SHA-256 is not that of the manifest; take "
                "another copy of the run folder"
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def all(self) -> list[Path]:
        """The complete checkpoints, the oldest first: folders of that name with a manifest."""
        found = [folder for folder in self._named(NAMES) if (folder / MANIFEST).is_file()]
        return sorted(found, key=lambda folder: int(folder.name.rpartition("-")[2]))

    def _named(self, names: re.Pattern[str]) -> list[Path]:
        """What of the program's own is there under such names."""
        if not self.folder.is_dir():
            return []
        return [path for path in self.folder.iterdir() if names.fullmatch(path.name)]

    @property
    def exists(self) -> bool:
        """Whether there is a complete checkpoint."""
        return bool(self.all())

    def _last(self) -> Path:
        found = self.all()
        if not found:
            raise UserError(
                f"--resume: expected a checkpoint in {self.folder}, found none; the run ended "
                "before its first one: start it again with --overwrite"
            )
        return found[-1]


def _without_ranks(about: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of itself, less the numbers of ranks and what goes with them."""
    option = {k: v for k, v in about["option"].items() if k not in RESIZE_FIELDS}
    return {**{k: v for k, v in about.items() if k != "ranks"}, "option": option}


def _as_in(written: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """``here`` less the keys that were not written."""
    return {
        name: _as_in(written[name], value) if isinstance(value, dict) else value
        for name, value in here.items()
        if name in written
    }


def resumed_moment(run_dir: Path) -> float:
    """The virtual time of a run's last checkpoint. Raises UserError as ``load`` does."""
    store = CheckpointStore(run_dir)
    return float(_read_manifest(store._last())["moment"])


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = files.read(path.read_text())
        found = manifest["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--resume: {folder} is not a checkpoint of aladdin_mpi: {path.name} cannot be read "
            f"({error!r}); give the folder of a run"
        ) from error
    if found != FORMAT:
        raise UserError(
            f"--resume: {folder} has the format {found!r}, expected {FORMAT!r}; resume with the "
            "version of aladdin_mpi that wrote it"
        )
    if fault := _fault(manifest):
        raise UserError(
            f"--resume: {path} is damaged: {fault}; take another copy of the run folder"
        )
    return manifest


def _fault(manifest: dict[str, Any]) -> str:
    """What is missing in a manifest; empty if nothing is."""
    kinds: dict[str, Any] = {
        "samples": int,
        "parts": list,
        "ranks": int,
        "option": dict,
        "moment": (int, float),
    }
    for name, kind in kinds.items():
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
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
