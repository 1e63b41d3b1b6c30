"""Training outlives a full disk, except at its end; the last checkpoint stays unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor, nn

from aladdin_mpi.hooks.recorder import Metrics, read_metrics
from aladdin_mpi.process import guard
from aladdin_mpi.run.data_parallel import DataParallel
from tests import loop_lab
from tests.commands import (
    EPOCH,
    checkpoint,
    leftovers,
    metrics,
    refusal,
    rises,
    simulate,
    summary,
    train,
    training,
)
from tests.messages import check_names
from tests.run.jobs import checkpoints, samples_so_far, wait_until


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


def _fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def test_training_continues_while_the_disk_is_full(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint is due every 6 steps, and a line of metrics with every step."""
    assert _mount(disk, 2_000_000, "remount")
    run_dir, filler, taken = disk / "run", disk / "filler", []

    def step(run: DataParallel, model: nn.Module, inputs: Tensor, labels: Tensor) -> None:
        loop_lab.plain(run, model, inputs, labels)
        taken.append(len(labels))
        if len(taken) == 8:
            taken_parts.extend(_parts(run_dir))
            _fill(filler)
        if len(taken) == 20:
            assert checkpoint(run_dir).name == "samples-000000000024"
            assert _parts(run_dir) == taken_parts
            filler.unlink()

    taken_parts: list[bytes] = []
    loop_lab.train(run_dir, "bsp", step, samples=144, checkpoint_every=24, log_every=4)
    printed = capsys.readouterr().err
    assert printed.count("cannot write it to") == 2, printed
    assert "No space left on device" in printed
    assert checkpoint(run_dir).name == "samples-000000000144"
    lines = metrics(run_dir, "train")
    assert rises(lines)
    assert lines[-1]["samples"] == 144
    assert {48, 60, 72} <= {line["samples"] for line in lines}  # while the disk was full
    assert not leftovers(run_dir)


@pytest.mark.long
def test_job_outlives_a_disk_that_is_full_for_a_while(disk: Path) -> None:
    """Evaluations and checkpoints are due all the time; the next attempts succeed."""
    run_dir, filler = disk / "run", disk / "filler"
    plan = ["--epochs", 12, "--checkpoint-every", 320, "--eval-every", 0.5, "--log-every", 160]
    with training(3, run_dir, *plan, "--slowdown", "0=3", "--device", "cpu") as job:
        wait_until(job, lambda: checkpoints(run_dir))
        _fill(filler)
        wait_until(job, lambda: "cannot write it to" in job.so_far().stderr)
        kept = checkpoints(run_dir)
        assert len(kept) == 1
        lines = samples_so_far(run_dir)
        filler.unlink()
        wait_until(job, lambda: checkpoints(run_dir) not in ([], kept))
        wait_until(job, lambda: samples_so_far(run_dir) > lines)
        completed = job.wait(120)
    assert completed.returncode == 0, repr(completed)
    assert "Traceback" not in completed.stderr, repr(completed)
    check_names(completed.stderr, "No space left on device", kept[0].name, "Training continues")
    assert summary(run_dir)["samples"] == 12 * EPOCH
    assert rises(metrics(run_dir, "train"))
    assert [line["samples"] for line in metrics(run_dir, "eval")][-1] == 12 * EPOCH
    assert not leftovers(run_dir)


@pytest.mark.parametrize("frees_before", ["line", "close"])
def test_metrics_are_completed_when_space_is_free(
    disk: Path, capsys: pytest.CaptureFixture[str], frees_before: str
) -> None:
    assert _mount(disk, 2_000_000, "remount")
    recorder = Metrics(disk)
    recorder.open(0)
    _fill(disk / "filler")
    for samples in range(40):
        recorder.append("train", {"samples": samples, "a long name" * 40: 1.0})
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert len(read_metrics(disk)) < 40
    (disk / "filler").unlink()
    if frees_before == "line":
        recorder.append("train", {"samples": 40})
        assert len(metrics(disk)) == 41
    recorder.close()
    assert [line["samples"] for line in metrics(disk)[:40]] == list(range(40))
    assert not leftovers(disk)


@pytest.mark.parametrize("continues", [True, False])
def test_error_of_tensorboard_is_that_of_the_next_line(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, continues: bool
) -> None:
    ended: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", guard._end_in_thread)
    monkeypatch.setattr(guard, "end_job", ended.append)
    assert _mount(disk, 2_000_000, "remount")
    recorder = Metrics(disk)
    recorder.open(0)
    _fill(disk / "filler")
    board = recorder._board
    with suppress(OSError):  # whichever thread is first
        for value in range(10_000):
            board.add_scalar("a figure", value, value)
        board.flush()
    (disk / "filler").unlink()
    if continues:
        recorder.append("train", {"samples": 40, "a": 1.0})
    recorder.close()
    assert not ended
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert len(read_metrics(disk)) == int(continues)


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


def test_resume_refuses_a_read_only_run_folder(disk: Path) -> None:
    run_dir = disk / "run"
    simulate(run_dir, "--workers", 1, "--samples", 64)
    assert _mount(disk, 50_000_000, "remount", "ro")
    completed = simulate(None, "--resume", run_dir, "--samples", 128, check=False)
    check_names(refusal(completed), "--resume", str(run_dir), "read-only")
