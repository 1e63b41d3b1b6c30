"""Checkpoints on disk: whatever bears the name of one is whole, whenever rank 0 dies."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from aladdin_mpi.run.checkpoint import MANIFEST, CheckpointStore


class DiedError(Exception):
    """Stands for a death of the process."""


def write(store: CheckpointStore, samples: int) -> None:
    store.begin(samples)
    entry = store.write(samples, 0, {"values": torch.ones(3)})
    store.commit(samples, [entry], {})


def die_half_way(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    raise DiedError


@pytest.mark.parametrize("second", [200, 100], ids=["older", "the same"])
def test_a_death_during_a_removal_leaves_no_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    store = CheckpointStore(tmp_path)
    write(store, 100)
    with monkeypatch.context() as patch, pytest.raises(DiedError):
        patch.setattr(shutil, "rmtree", die_half_way)
        write(store, second)
    for folder in store.folder.glob("samples-*"):
        assert (folder / MANIFEST).is_file()
    write(store, 300)
    assert [path.name for path in store.folder.iterdir()] == ["samples-000000000300"]
