"""Files are written atomically: they are complete or absent."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from aladdin_mpi.comparison import folder as comparison_folder
from aladdin_mpi.comparison.options import read_request
from aladdin_mpi.comparison.runner import Child
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import CheckpointStore
from aladdin_mpi.hooks.recorder import METRICS, Metrics
from aladdin_mpi.options.run import SUMMARY
from aladdin_mpi.process import files
from aladdin_mpi.process.files import append, write_new, write_whole, written_whole
from aladdin_mpi.run import run_folder
from aladdin_mpi.run.trained_model import FILE
from tests.commands import refusal, simulate


def test_failed_write_keeps_previous_content_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, "before")
    with pytest.raises(ZeroDivisionError), written_whole(path) as temporary:
        temporary.write_text("half")
        assert path.read_text() == "before"
        assert temporary.suffix == ".json"
        print(1 / 0)
    assert path.read_text() == "before"
    write_whole(path, b"after")
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


# -- links in a folder that other users can write to ---------------------------------------
SHORT = ("--workers", 2, "--samples", 64, "--checkpoint-every", 32, "--eval-every", 0.02)


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """Return a file elsewhere that a link points to."""
    path = tmp_path / "foreign"
    path.write_text("kept")
    return path


def test_write_whole_replaces_link(tmp_path: Path, foreign: Path) -> None:
    link = tmp_path / "summary.json"
    link.symlink_to(foreign)
    write_whole(link, "after")
    assert foreign.read_text() == "kept"
    assert not link.is_symlink()
    assert link.read_text() == "after"


@pytest.mark.parametrize(
    "write", [lambda path: write_whole(path, "after"), lambda path: write_new(path, "after")]
)
def test_write_rejects_link_at_temporary_name(
    tmp_path: Path, foreign: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr(files, "uuid4", lambda: type("Drawn", (), {"hex": "7"}))
    for name in (".summary.7.tmp", ".summary.7.tmp.json"):
        (tmp_path / name).symlink_to(foreign)
    with pytest.raises(FileExistsError):
        write(tmp_path / "summary.json")
    assert foreign.read_text() == "kept"


def test_append_rejects_link(tmp_path: Path, foreign: Path) -> None:
    (tmp_path / "log").symlink_to(foreign)
    with pytest.raises(UserError, match=r"/log: .*symbolic link"):
        append(tmp_path / "log", "more")
    metrics = Metrics(tmp_path)
    metrics.open(0)
    metrics.path.unlink()
    metrics.path.symlink_to(foreign)
    with pytest.raises(UserError, match=METRICS):
        metrics.append("train", {"samples": 1})
    assert foreign.read_text() == "kept"


def test_lock_and_log_files_reject_links(tmp_path: Path, foreign: Path) -> None:
    (tmp_path / run_folder.NAME).symlink_to(foreign)
    with pytest.raises(UserError, match=rf"{re.escape(run_folder.NAME)}: .*symbolic link"):
        run_folder.take(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / comparison_folder.LOCK).symlink_to(foreign)
    request = read_request(["--out", str(out), "--algorithms", "asp"])
    with pytest.raises(UserError, match=rf"{re.escape(comparison_folder.LOCK)}: .*symbolic link"):
        comparison_folder.claimed(out, request).__enter__()
    (out / "log.txt").symlink_to(foreign)
    with pytest.raises(UserError, match=r"/log\.txt: .*symbolic link"):
        Child(["true"], out / "log.txt", 0)
    assert foreign.read_text() == "kept"


def test_checkpoint_store_does_not_follow_links(tmp_path: Path, foreign: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    store = CheckpointStore(tmp_path / "run")
    store.folder.mkdir(parents=True)
    for name in ("writing-000000000001", "samples-000000000064"):
        (store.folder / name).symlink_to(elsewhere)
    store.begin(64)
    part = store.folder / "writing-000000000064" / "rank-1.pt"
    part.symlink_to(foreign)
    with pytest.raises(UserError, match=rf"^checkpoint: .*{store.folder} .*File exists"):
        store.write(64, 1, {})
    part.unlink()
    store.commit(64, [store.write(64, 0, {})], {})
    assert [path.name for path in store.folder.iterdir()] == ["samples-000000000064"]
    assert not store.folder.joinpath("samples-000000000064").is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["kept"]
    assert foreign.read_text() == "kept"


@pytest.mark.parametrize("name", ["checkpoint", "tensorboard"])
def test_run_rejects_subfolder_that_is_a_link(tmp_path: Path, name: str) -> None:
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    (elsewhere / "samples-1").mkdir(parents=True)
    (elsewhere / "events.1").touch()
    run.mkdir()
    (run / name).symlink_to(elsewhere)
    completed = simulate(run, *SHORT, "--overwrite", check=False)
    assert f"/{name}: " in refusal(completed)
    assert sorted(path.name for path in elsewhere.iterdir()) == ["events.1", "samples-1"]


def test_run_replaces_links_by_its_own_files(tmp_path: Path, foreign: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    names = (FILE, SUMMARY, METRICS, "config.toml", "curves.png")
    for name in names:
        (run / name).symlink_to(tmp_path / "not there")
    simulate(run, *SHORT)
    assert not (tmp_path / "not there").exists()
    for name in names:
        (run / name).unlink()
        (run / name).symlink_to(foreign)
    simulate(run, *SHORT, "--overwrite")
    assert foreign.read_text() == "kept"
    assert not any((run / name).is_symlink() for name in names)
