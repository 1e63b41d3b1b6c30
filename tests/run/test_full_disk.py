"""A full disk ends the run with an error, and the last checkpoint stays unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import checkpoint, refusal, train


def _mount(folder: Path, size: int, *more: str) -> bool:
    words = ["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *more]), "disk", str(folder)]
    return subprocess.run(words, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a folder on a small file system."""
    if os.geteuid() != 0 or not _mount(tmp_path, 50_000_000):
        pytest.skip("a small file system needs root and the right to mount")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def _parts(run_dir: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(checkpoint(run_dir).iterdir())]


def test_full_disk_ends_the_run_and_keeps_the_last_checkpoint(disk: Path) -> None:
    run_dir = disk / "run"
    train(3, run_dir, "--epochs", 1, "--device", "cpu", "--quiet")
    last, before = checkpoint(run_dir), _parts(run_dir)
    used = shutil.disk_usage(disk).used
    assert _mount(disk, used + sum(map(len, before)) // 2, "remount")  # half of another checkpoint

    completed = train(3, None, "--resume", run_dir, "--epochs", 3, check=False)
    message = refusal(completed)
    assert completed.returncode == 2, repr(completed)
    assert "No space left on device" in message
    assert last.name in message
    assert f"--resume {run_dir}" in message
    assert [path.name for path in last.parent.iterdir()] == [last.name]
    assert _parts(run_dir) == before
