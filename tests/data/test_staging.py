"""Staging of data on a host's disk: one complete copy per host, or an error."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from aladdin_mpi.data.host_cache import index_dir
from aladdin_mpi.data.preparation import UNFINISHED, DiskCopy, place, stage
from aladdin_mpi.errors import RefusedError, UserError
from aladdin_mpi.transport.virtual.engine import VirtualTransport
from tests.commands import refusal, summary, train
from tests.launch import Completed, needs
from tests.run_program import run_program
from tests.virtual_lab import lab, run


def copy(source: Path, target: Path) -> int:
    """Copy the data and return the number of copied bytes."""
    one = DiskCopy(source, target)
    one.make()
    assert one.copied == one.needed
    return one.copied


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


def test_staging_copies_data_once(data: Path, tmp_path: Path) -> None:
    target = place(data, tmp_path / "disk")
    assert copy(data, target) == 1000 * sum(range(20))
    assert files(target) == files(data)
    assert index_dir(target / "train") == target.with_name(f"{target.name}.index")
    assert copy(data, target) == 0


def test_staging_copies_changed_and_missing_files_again(data: Path, tmp_path: Path) -> None:
    target = place(data, tmp_path / "disk")
    copy(data, target)
    (target / "train/0/3.bin").unlink()
    (target / "train/1/4.bin").write_bytes(b"half")
    (data / "train/2/5.bin").write_bytes(b"x" * 5000)  # same length as before
    os.utime(data / "train/2/5.bin", (10**9, 10**9))
    assert copy(data, target) == 3000 + 4000 + 5000
    assert files(target) == files(data)


def test_staging_removes_files_deleted_from_data(data: Path, tmp_path: Path) -> None:
    target = place(data, tmp_path / "disk")
    (data / "train/empty").mkdir()
    (data / "train/extra").mkdir()
    (data / "train/extra/20.bin").touch()
    copy(data, target)
    assert (target / "train/empty").is_dir()  # is counted as a class
    shutil.rmtree(data / "train/extra")
    (data / "train/1/7.bin").unlink()
    copy(data, target)
    assert files(target) == files(data)
    assert not (target / "train/extra").exists()


def test_interrupted_copy_is_not_used(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = place(data, tmp_path / "disk")
    progress = DiskCopy._progress

    def broken(self: DiskCopy) -> None:
        progress(self)
        if self.copied:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(DiskCopy, "_progress", broken)
    with pytest.raises(UserError, match=r"--stage .*disk: .*Input/output error"):
        copy(data, target)
    partial = [path for path in target.rglob("*") if path.name.endswith(UNFINISHED)]
    assert partial and not any(path.with_suffix("").exists() for path in partial)
    monkeypatch.undo()
    copy(data, target)
    assert files(target) == files(data)


def test_staging_names_file_that_changes_during_copy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = DiskCopy._prepare

    def late(self: DiskCopy, *args: Any) -> None:
        prepare(self, *args)
        (data / "train/1/7.bin").write_bytes(b"shorter")

    monkeypatch.setattr(DiskCopy, "_prepare", late)
    with pytest.raises(UserError, match=r"--stage .*7\.bin"):
        copy(data, place(data, tmp_path / "disk"))


def test_stopped_copy_leaves_no_files(data: Path, tmp_path: Path) -> None:
    one = DiskCopy(data, place(data, tmp_path / "disk"))
    one.is_stopped = True
    with pytest.raises(UserError, match="stopped"):
        one.make()
    assert not files(one.target)


def test_staging_requires_free_disk_space(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(total=10**9, free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    copy(data, place(data, tmp_path / "disk"))
    full.free = 20_100_000  # a fiftieth of the disk is kept free
    with pytest.raises(UserError, match=r"--stage .*: .*\b0\.00019 GB\b.*\b0\.0001\b"):
        copy(data, place(data, tmp_path / "other"))
    assert not list((tmp_path / "other").rglob("*.bin"))


def test_staging_separates_folders_of_same_name(tmp_path: Path) -> None:
    one, other = tmp_path / "a/images", tmp_path / "b/images"
    assert place(one, tmp_path).name != place(other, tmp_path).name
    assert place(one, tmp_path) == place(tmp_path / "a/../a/images", tmp_path)


def test_staging_follows_links(data: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(data)
    target = place(tmp_path / "linked", tmp_path / "disk")
    copy(tmp_path / "linked", target)
    assert files(target) == files(data)


def test_staging_names_dangling_link(data: Path, tmp_path: Path) -> None:
    (data / "train/0/gone.bin").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"--data-dir .*: .*gone\.bin"):
        copy(data, tmp_path / "disk/data")


def test_staging_rejects_target_within_data(data: Path) -> None:
    with pytest.raises(UserError, match=r"--stage .*: .*--data-dir"):
        copy(data, place(data, data / "disk"))


def test_staging_rejects_empty_data_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"--data-dir .*empty: .*--stage"):
        copy(tmp_path / "empty", tmp_path / "disk/empty")


def images(tmp_path: Path) -> Path:
    for split, count in (("train", 12), ("test", 6)):
        for number in range(count):
            path = tmp_path / f"images/{split}/{number % 2}/{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((8, 8, 3), 100 * (number % 2), dtype=np.uint8)).save(path)
    return tmp_path / "images"


def test_one_rank_per_host_copies_data(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(transport: VirtualTransport) -> tuple[int, int, Path | None]:
        disk = tmp_path / f"disk-{transport.host}" if transport.host < 2 else None
        return transport.rank, transport.host, stage(transport, data, disk, 60, quiet=False)

    before = threading.active_count()
    result = run(6, main, lab(3))
    assert {host for _, host, _ in result} == {0, 1, 2}
    for _, host, where in result:
        assert where == (data if host == 2 else place(data, tmp_path / f"disk-{host}"))
        assert where is not None and files(where) == files(data)
    log = capfd.readouterr().err
    assert re.findall(r"copied (\S+) GB .*disk-0/data-\w+.*\b2 hosts", log) == ["0.00038"]
    assert threading.active_count() == before


def test_staging_fails_on_all_ranks_if_one_host_lacks_space(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(total=10**9, free=10**9 if path.name == "disk-0" else 0)

    monkeypatch.setattr(shutil, "disk_usage", usage)

    def main(transport: VirtualTransport) -> str:
        with pytest.raises((UserError, RefusedError)) as raised:
            stage(transport, data, tmp_path / f"disk-{transport.host}", 60, quiet=True)
        return str(raised.value)

    error, *others = run(4, main, lab(2))
    assert re.search(r"^rank \d: --stage .*disk-1: .*\b0\.00019 GB\b.*\b0\b", error)
    assert not any(others)


@pytest.mark.long
@needs("openmpi")
def test_training_reads_staged_copy(tmp_path: Path) -> None:
    words = ["--dataset", "imagefolder", "--data-dir", images(tmp_path), "--model", "resnet20"]
    words += ["--cache", "off", "--samples", 24, "--batch-size", 4, "--stage", tmp_path / "disk"]
    completed = train(3, tmp_path / "run", *words)
    assert len(re.findall(r"aladdin_mpi: copied \S+ GB .*disk/images-", completed.stderr)) == 1
    staged = place(tmp_path / "images", tmp_path / "disk")
    assert files(staged) == files(tmp_path / "images")
    assert summary(tmp_path / "run")["samples"] == 24
    again = train(3, tmp_path / "again", *words)
    assert "copied" not in again.stderr


@needs("openmpi")
def test_stage_option_requires_data_dir(tmp_path: Path) -> None:
    error = refusal(train(2, tmp_path / "run", "--stage", tmp_path / "disk", check=False))
    assert re.search(r"--stage requires --data-dir", error)


SLOW_STAGING = Path(__file__).parent / "programs" / "slow_staging.py"


def slowly(tmp_path: Path, delay: float, timeout: float) -> Completed:
    """Run a training whose copy takes ``delay`` seconds per group of files."""
    words = ["--data-dir", images(tmp_path), "--dataset", "imagefolder", "--model", "resnet20"]
    words += ["--samples", 24, "--batch-size", 4, "--stage", tmp_path / "disk"]
    words += ["--timeout", timeout, "--run-dir", tmp_path / "run"]
    return run_program(SLOW_STAGING, 3, *words, env={"DELAY": str(delay)}, check=False)


@pytest.mark.long
@needs("openmpi")
def test_staging_may_take_longer_than_timeout(tmp_path: Path) -> None:
    completed = slowly(tmp_path, delay=4, timeout=10)  # 18 files, eight at a time
    assert completed.returncode == 0, completed
    seconds = re.search(r"copied .* in (\d+) s", completed.stderr)
    assert seconds is not None and int(seconds[1]) >= 11


@pytest.mark.long
@needs("openmpi")
def test_stalled_staging_ends_job(tmp_path: Path) -> None:
    completed = slowly(tmp_path, delay=60, timeout=1)
    assert re.search(r"--stage .*: .*\b1 s\b", refusal(completed))
    assert completed.seconds < 40
