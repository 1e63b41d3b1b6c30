"""Checkpoints on disk are complete, whenever rank 0 fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from aladdin_mpi.hooks.checkpoints import MANIFEST, CheckpointStore


class FailedError(Exception):
    """Stands for a failure of the process."""


def write(store: CheckpointStore, samples: int) -> None:
    store.begin(samples)
    entry = store.write(samples, 0, {"values": torch.ones(3)})
    store.commit(samples, [entry], {"ranks": 1, "option": {}, "moment": 0.0})


def fail_half_way(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    raise FailedError


@pytest.mark.parametrize("second", [200, 100], ids=["older", "the same"])
def test_failure_during_removal_leaves_no_partial_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 100)
    with monkeypatch.context() as patch, pytest.raises(FailedError):
        patch.setattr(shutil, "rmtree", fail_half_way)
        write(store, second)
    for folder in store.folder.glob("samples-*"):
        assert (folder / MANIFEST).is_file()
    write(store, 300)
    assert [path.name for path in store.folder.iterdir()] == ["samples-000000000300"]


def test_foreign_files_in_the_checkpoint_folder_are_kept_and_ignored(tmp_path: Path) -> None:
    """Copies of checkpoints, stray files, and empty folders of any name."""
    store = CheckpointStore(tmp_path)
    write(store, 100)
    (kept,) = store.folder.iterdir()
    shutil.copytree(kept, store.folder / f"{kept.name}.good")
    shutil.copytree(kept, store.folder / "samples-999")
    (store.folder / "samples-000000000900").mkdir()
    (store.folder / "samples-000000000901").write_text("mine")
    (store.folder / "writing-notes.txt").write_text("mine")
    strange = {path.name for path in store.folder.iterdir()} - {kept.name}
    assert store.manifest()["samples"] == 100
    write(store, 200)
    assert store.manifest()["samples"] == 200
    names = {path.name for path in store.folder.iterdir()}
    assert names == strange | {"samples-000000000200"}
    assert (store.folder / f"{kept.name}.good" / MANIFEST).is_file()


@pytest.mark.parametrize("is_folder", [True, False])
def test_partial_checkpoint_is_replaced_by_one_of_the_same_name(
    tmp_path: Path, is_folder: bool
) -> None:
    store = CheckpointStore(tmp_path)
    store.folder.mkdir()
    for name in "samples-000000000100", "writing-000000000050":
        path = store.folder / name
        path.mkdir() if is_folder else path.write_text("")
    assert not store.exists
    write(store, 100)
    assert store.manifest()["samples"] == 100
    assert len(list(store.folder.iterdir())) == 1


def test_checkpoint_with_more_digits_is_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 999_999_999_999)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointStore, "_remove", lambda self, checkpoint: None)
        write(store, 1_000_000_000_000)
    assert store.manifest()["samples"] == 1_000_000_000_000
