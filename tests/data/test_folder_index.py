"""The files of a folder are found once, and again when something has changed."""

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
    """As if nothing had changed for an hour."""
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
    done: list[Path] = []
    walk = imagefolder._walk

    def watched(root: Path, wanted: object) -> object:
        done.append(root)
        return walk(root, wanted)  # type: ignore[arg-type]

    monkeypatch.setattr(imagefolder, "_walk", watched)
    return done


FOUND = ["a/deeper/y.jpg", "a/x.jpg", "b/1.jpg", "b/2.jpg"]


def test_they_are_found_once(root: Path, walks: list[Path]) -> None:
    for _ in range(3):
        assert files_below(root, is_wanted) == FOUND
    assert walks == [root]


def test_who_waits_for_another_rank_does_not_look_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.npz")
    looks, compare = [], imagefolder._is_current

    def watched(*args: Any) -> bool:
        looks.append(args)
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
    assert len(looks) == 1
    (root / "a/new.jpg").touch()  # who asks afterwards does look
    assert "a/new.jpg" in files_below(root, is_wanted)
    assert len(looks) == 2


def test_another_hosts_look_is_not_this_hosts(root: Path, tmp_path: Path) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.npz")
    later = time.time_ns() + 3600 * 10**9
    os.utime(index, ns=(later, later))
    (root / "c").mkdir()  # as on a disk of another host
    (root / "c/new.jpg").touch()
    assert "c/new.jpg" in files_below(root, is_wanted)


@pytest.mark.parametrize("place", ["a/new.jpg", "a/deeper/new.jpg", "c/new.jpg"])
def test_a_new_file_is_found(root: Path, walks: list[Path], place: str) -> None:
    files_below(root, is_wanted)
    (root / place).parent.mkdir(exist_ok=True)
    (root / place).touch()
    assert files_below(root, is_wanted) == sorted([*FOUND, place])
    assert len(walks) == 2


def test_one_that_has_gone_is_missed(root: Path, walks: list[Path]) -> None:
    files_below(root, is_wanted)
    (root / "b/1.jpg").unlink()
    assert files_below(root, is_wanted) == [name for name in FOUND if name != "b/1.jpg"]
    (root / "a/deeper/y.jpg").unlink()
    (root / "a/deeper").rmdir()
    assert files_below(root, is_wanted) == ["a/x.jpg", "b/2.jpg"]


def test_what_has_just_changed_is_not_trusted(root: Path, walks: list[Path]) -> None:
    now = time.time_ns()
    os.utime(root / "a", ns=(now, now))
    for _ in range(2):
        assert files_below(root, is_wanted) == FOUND
    assert len(walks) == 2


def test_names_of_any_bytes(root: Path) -> None:
    odd = os.fsdecode(b"a/\xff\xfe.jpg")
    (root / odd).touch()
    settle(root)
    for _ in range(2):
        assert files_below(root, is_wanted) == sorted([*FOUND, odd])


def test_without_a_cache_it_works_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert files_below(root, is_wanted) == FOUND


def test_a_damaged_index_is_made_again(root: Path, tmp_path: Path, walks: list[Path]) -> None:
    files_below(root, is_wanted)
    (index,) = (tmp_path / "cache").glob("folder-*.npz")
    index.write_bytes(index.read_bytes()[:40])
    assert files_below(root, is_wanted) == FOUND
    assert files_below(root, is_wanted) == FOUND
    assert len(walks) == 2
