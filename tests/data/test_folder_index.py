"""A folder's files are listed once, and again after a change."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from aladdin_mpi.data import imagefolder
from aladdin_mpi.data.host_cache import one_at_a_time
from aladdin_mpi.data.imagefolder import files_below

PAST = time.time_ns() - 3600 * 10**9


def is_wanted(name: str) -> bool:
    return name.endswith(".jpg")


def settle(root: Path) -> None:
    """Make the folder look unchanged for an hour."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, ns=(PAST, PAST))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "cache"))
    for name in ("b/2.jpg", "b/1.jpg", "a/x.jpg", "a/deeper/y.jpg", "a/notes.txt", "loose.jpg"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    settle(tmp_path / "root")
    return tmp_path / "root"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    walked: list[Path] = []
    walk = imagefolder._walk

    def watched(root: Path, wanted: object) -> object:
        walked.append(root)
        return walk(root, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(imagefolder, "_walk", watched)
    return walked


FOUND = ["a/deeper/y.jpg", "a/x.jpg", "b/1.jpg", "b/2.jpg"]


def test_folder_index_scans_unchanged_folder_once(root: Path, walks: list[Path]) -> None:
    for _ in range(3):
        assert files_below(root, is_wanted) == FOUND
    assert walks == [root]


def test_folder_index_is_checked_once_by_concurrent_ranks(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.json")
    checks, compare = [], imagefolder._is_current

    def watched(*args: Any) -> bool:
        checks.append(args)
        return compare(*args)

    asked = threading.Semaphore(0)

    def telling(path: Path) -> AbstractContextManager[None]:
        asked.release()
        return one_at_a_time(path)

    monkeypatch.setattr(imagefolder, "_is_current", watched)
    monkeypatch.setattr(imagefolder, "one_at_a_time", telling)
    with ThreadPoolExecutor(3) as ranks:
        with one_at_a_time(index):
            waiting = [ranks.submit(files_below, root, is_wanted) for _ in range(3)]
            for _ in waiting:
                asked.acquire(timeout=60)
        assert [each.result() for each in waiting] == [FOUND] * 3
    assert len(checks) == 1
    (root / "a/new.jpg").touch()  # a later call checks again
    assert "a/new.jpg" in files_below(root, is_wanted)
    assert len(checks) == 2


def test_folder_index_written_by_other_host_is_checked_again(root: Path, tmp_path: Path) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.json")
    later = time.time_ns() + 3600 * 10**9
    os.utime(index, ns=(later, later))
    (root / "c").mkdir()  # as on another host's disk
    (root / "c/new.jpg").touch()
    assert "c/new.jpg" in files_below(root, is_wanted)


@pytest.mark.parametrize("place", ["a/new.jpg", "a/deeper/new.jpg", "c/new.jpg"])
def test_folder_index_finds_new_file(root: Path, walks: list[Path], place: str) -> None:
    files_below(root, is_wanted)
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).touch()
    assert files_below(root, is_wanted) == sorted([*FOUND, place])
    assert len(walks) == 2


def test_folder_index_drops_removed_file(root: Path, walks: list[Path]) -> None:
    files_below(root, is_wanted)
    (root / "b/1.jpg").unlink()
    assert files_below(root, is_wanted) == [name for name in FOUND if name != "b/1.jpg"]
    (root / "a/deeper/y.jpg").unlink()
    (root / "a/deeper").rmdir()
    assert files_below(root, is_wanted) == ["a/x.jpg", "b/2.jpg"]


def test_folder_index_does_not_trust_recently_changed_folder(root: Path, walks: list[Path]) -> None:
    now = time.time_ns()
    os.utime(root / "a", ns=(now, now))
    for _ in range(2):
        assert files_below(root, is_wanted) == FOUND
    assert len(walks) == 2


def test_folder_index_keeps_file_names_of_any_bytes(root: Path) -> None:
    odd = os.fsdecode(b"a/\xff\xfe.jpg")
    (root / odd).touch()
    settle(root)
    for _ in range(2):
        assert files_below(root, is_wanted) == sorted([*FOUND, odd])


def test_folder_index_works_without_cache(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert files_below(root, is_wanted) == FOUND


def test_damaged_folder_index_is_rebuilt(root: Path, tmp_path: Path, walks: list[Path]) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.json")
    index.write_bytes(index.read_bytes()[:40])
    assert files_below(root, is_wanted) == FOUND
    assert files_below(root, is_wanted) == FOUND
    assert len(walks) == 2
