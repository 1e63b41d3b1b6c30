"""Data copied to a host's own disk: once, whole, and with a word where that cannot be."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from aladdin_mpi.data.staging import UNFINISHED, copy, listed, place
from aladdin_mpi.errors import UserError
from tests.commands import refusal, summary, train
from tests.launch import needs


def files(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for number in range(20):
        path = root / f"train/{number % 3}/{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number]) * 1000 * number)
    return root


def test_all_is_copied_once(data: Path, tmp_path: Path) -> None:
    target = place(data, tmp_path / "disk")
    assert copy(data, target) == 1000 * sum(range(20))
    assert files(target) == files(data)
    assert copy(data, target) == 0


def test_what_has_changed_or_is_missing_is_copied_again(data: Path, tmp_path: Path) -> None:
    target = place(data, tmp_path / "disk")
    copy(data, target)
    (target / "train/0/3.bin").unlink()
    (target / "train/1/4.bin").write_bytes(b"half")
    (data / "train/2/5.bin").write_bytes(b"x" * 5000)  # as long as before
    os.utime(data / "train/2/5.bin", (10**9, 10**9))
    assert copy(data, target) == 3000 + 4000 + 5000
    assert files(target) == files(data)


def test_an_interrupted_copy_is_not_used(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = place(data, tmp_path / "disk")
    whole = shutil.copyfile

    def broken(source: Path, to: Path) -> None:
        whole(source, to)
        if source.name == "7.bin":
            to.write_bytes(b"half")
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "copyfile", broken)
    with pytest.raises(UserError, match=r"--stage .*disk: cannot copy the data there .*error"):
        copy(data, target)
    assert (target / f"train/1/7.bin{UNFINISHED}").exists()
    assert not (target / "train/1/7.bin").exists()
    monkeypatch.undo()
    copy(data, target)
    assert files(target) == files(data)


def test_there_has_to_be_room(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=10**9, free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    copy(data, place(data, tmp_path / "disk"))
    full.free = 20_100_000  # of which a fiftieth of the disk is left alone
    with pytest.raises(UserError, match=r"--stage .*: expected 0.0 GB free, got 0.0"):
        copy(data, place(data, tmp_path / "other"))
    assert not list((tmp_path / "other").rglob("*.bin"))


def test_folders_of_one_name_lie_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "a/images", tmp_path / "b/images"
    assert place(one, tmp_path).name != place(other, tmp_path).name
    assert place(one, tmp_path) == place(tmp_path / "a/../a/images", tmp_path)


def test_links_are_followed(data: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(data)
    assert {file.name for file in listed(tmp_path / "linked")} == set(files(data))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--data-dir .*empty: expected files to copy by --stage"):
        copy(tmp_path / "empty", tmp_path / "disk/empty")


@needs("openmpi")
def test_training_reads_the_copy(tmp_path: Path) -> None:
    for split, count in (("train", 12), ("test", 6)):
        for number in range(count):
            path = tmp_path / f"images/{split}/{number % 2}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), 100 * (number % 2), dtype=np.uint8)).save(path)
    words = ["--dataset", "imagefolder", "--data-dir", tmp_path / "images", "--model", "resnet20"]
    words += ["--cache", "off", "--samples", 24, "--batch-size", 4, "--stage", tmp_path / "disk"]
    done = train(3, tmp_path / "run", *words)
    assert len(re.findall(r"aladdin_mpi: copied 0.00 GB to .*disk/images-", done.stderr)) == 1
    (staged,) = (path for path in (tmp_path / "disk").iterdir() if path.is_dir())
    assert files(staged) == files(tmp_path / "images")
    assert summary(tmp_path / "run")["samples"] == 24
    again = train(3, tmp_path / "again", *words)
    assert "copied" not in again.stderr


@needs("openmpi")
def test_it_is_asked_for_with_data(tmp_path: Path) -> None:
    error = refusal(train(2, tmp_path / "run", "--stage", tmp_path / "disk", check=False))
    assert "disk: expected with --data-dir, got it without" in error
