"""Unreadable images: reported once, then replaced or skipped; without skipping, the run ends."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from aladdin_mpi.data import datasets, images, loading
from aladdin_mpi.data.datasets import load_dataset
from aladdin_mpi.data.imagefolder import Fault
from aladdin_mpi.data.images import ImageArrays, ImageFiles
from aladdin_mpi.data.loading import BatchSource
from aladdin_mpi.data.sampler import ShardedStream
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import SimulateOptions, parse
from aladdin_mpi.run import trainer
from aladdin_mpi.run.trainer import simulate
from tests.commands import summary, train

CORRUPT = ("train/cat/2.png", "train/cat/3.png", "train/dog/5.png", "test/cat/0.png")
STAND_INS = {2: 4, 3: 4, 11: 0}
"""Indices of training images; the last is followed by the first."""
COUNT = 6
"""Number of images per class in each split."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "cache"))


def folder(root: Path, side: int) -> Path:
    """Write two classes of squares, four of them truncated, empty, missing and not an image."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(COUNT):
                pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{i}.png")
    first = (root / CORRUPT[0]).read_bytes()
    (root / CORRUPT[0]).write_bytes(first[: len(first) // 2])
    (root / CORRUPT[1]).write_bytes(b"")
    (root / CORRUPT[2]).unlink()
    (root / CORRUPT[2]).symlink_to("nowhere")
    (root / CORRUPT[3]).write_bytes(b"not an image")
    return root


def load(root: Path, cache: str = "off", faults: tuple[Fault, ...] | None = None) -> Any:
    return load_dataset("imagefolder", root, False, 16, cache, "auto", "skip", faults)


def taken(dataset: Any, root: Path) -> set[str]:
    """Return the images that are recorded as skipped."""
    noted = [*dataset.skipped.known, *dataset.skipped.take()]
    return {Path(path).relative_to(root).as_posix() for path, _ in noted}


def epoch_of(dataset: Any, loader_workers: int = 0) -> torch.Tensor:
    """Return one augmented epoch, with its labels as an additional row of pixels."""
    stream = ShardedStream(len(dataset), 0, 1, seed=4)
    source = BatchSource(dataset, stream, 4, loader_workers)
    batches = [source.next_batch() for _ in range(len(dataset) // 4)]
    source.close()
    return torch.cat([torch.cat([x.flatten(1), y[:, None]], 1) for x, y in batches])


# -- skipped ------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("side", [8, 80], ids=["small", "large"])
def test_unreadable_training_image_is_replaced_by_next_image(tmp_path: Path, side: int) -> None:
    """The samples do not depend on the loading method or on a previous check."""
    root = folder(tmp_path / "set", side)
    files = load(root).train
    assert isinstance(files, ImageFiles) and len(files) == 2 * COUNT
    for index in range(len(files)):
        image, label = files[index]
        expected, its_label = files[STAND_INS.get(index, index)]
        assert torch.equal(image, expected) and label == its_label
    assert taken(files, root) == set(CORRUPT[:3])

    epoch = epoch_of(files)
    assert len(epoch) == 2 * COUNT and taken(files, root) == set(CORRUPT[:3])
    assert torch.equal(epoch_of(files, loader_workers=2), epoch)
    assert taken(files, root) == set(CORRUPT[:3]), "loader processes tell what they have met"
    known = load(root, faults=tuple(Fault(0, index, "broken") for index in STAND_INS)).train
    assert torch.equal(epoch_of(known), epoch) and taken(known, root) == set(CORRUPT[:3])
    if side == 8:
        for _ in "made, then read again":
            held = load(root, cache="on")
            assert isinstance(held.train, ImageArrays) and len(held.test) == 2 * COUNT - 1
            assert torch.equal(epoch_of(held.train), epoch) and taken(held.train, root) == {
                *CORRUPT
            }
            datasets._load_imagefolder.cache_clear()


def test_evaluation_leaves_out_unreadable_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", 80)
    data = load(root).test
    result = list(loading.test_batches(data, 1))
    assert taken(data, root) == {CORRUPT[3]} and len(result) == 2 * COUNT - 1
    for index, (image, label) in zip(range(1, 2 * COUNT), result, strict=True):
        expected, its_label = data[index]
        assert torch.equal(image[0], expected) and label.item() == its_label


def test_folder_without_readable_images_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder(tmp_path / "set", 80)
    data = load(root)
    for path in [*root.glob("test/*/*"), *root.glob("train/dog/*")]:
        path.unlink()
    assert not list(loading.test_batches(data.test, 4))
    with pytest.raises(UserError, match=r"--corrupt-images skip: .*\btest set\b"):
        trainer.test_figures({"right": 0, "loss": 0.0, "count": 0})
    monkeypatch.setattr(images, "MOST_IN_A_ROW", 6)
    with pytest.raises(UserError, match=r"--corrupt-images skip: .*\b6\b.*train/dog/0\.png"):
        data.train[COUNT]
    everything = tuple(Fault(1, index, "broken") for index in range(2 * COUNT))
    with pytest.raises(UserError, match=r"--corrupt-images skip: .*/test\b.*\b12\b"):
        load(folder(tmp_path / "other", 80), faults=everything)


def test_lack_of_file_handles_marks_no_image_as_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = load(folder(tmp_path / "set", 80)).train

    def fails(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("PIL.Image.open", fails)
    with pytest.raises(UserError, match=r"\.png: .*Too many open files.*ulimit -n"):
        data[0]
    assert data.skipped.take() == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("loader_workers", [0, 1])
def test_unreadable_image_is_one_line_error_without_skipping(
    tmp_path: Path, loader_workers: int
) -> None:
    data = load_dataset("imagefolder", folder(tmp_path / "set", 80), cache="off").train
    with pytest.raises(UserError) as caught:
        epoch_of(data, loader_workers)
    assert re.fullmatch(r"/.*\.png: .*--corrupt-images skip", str(caught.value))


# -- complete runs ------------------------------------------------------------------------------

WORDS = (
    "--dataset imagefolder --image-size 16 --augment trivialaugment --model mlp --batch-size 4 "
    "--lr-schedule constant --checkpoint-every 24 --workers 2 --quiet"
)


def simulated(root: Path, run_dir: Path, more: str) -> dict[str, Any]:
    datasets._load_imagefolder.cache_clear()
    words = [*WORDS.split(), "--data-dir", str(root), "--run-dir", str(run_dir), *more.split()]
    return simulate(parse(SimulateOptions, words, "simulate", ""))


@pytest.mark.long
def test_check_images_names_all_unreadable_images(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", 80)
    with pytest.raises(UserError) as caught:
        simulated(root, tmp_path / "run", "--samples 24 --check-images --loader-workers 1")
    head, *lines = str(caught.value).splitlines()
    assert re.search(r"--check-images: 4\b.*\b24\b.*--corrupt-images skip", head)
    named = [Path(line.split(": ")[0].strip()).relative_to(root).as_posix() for line in lines]
    assert named == list(CORRUPT)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_resumed_run_reports_no_unreadable_image_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run also equals an uninterrupted one, and one with checked images."""
    root = folder(tmp_path / "set", 80)
    result = simulated(root, tmp_path / "whole", "--samples 48 --corrupt-images skip")
    assert (result["images_skipped"], result["samples"]) == (4, 48)
    assert result["skipped"] == sorted(str(root / name) for name in CORRUPT)
    log = capsys.readouterr().err
    assert all(log.count(str(root / name)) == 1 for name in CORRUPT)

    simulated(root, tmp_path / "parts", "--samples 24 --corrupt-images skip")
    capsys.readouterr()
    words = ["--resume", str(tmp_path / "parts"), "--samples", "48", "--check-images"]
    datasets._load_imagefolder.cache_clear()
    again = simulate(parse(SimulateOptions, words, "simulate", ""))
    assert again["skipped"] == result["skipped"]
    assert str(root) not in capsys.readouterr().err

    looked = simulated(
        root, tmp_path / "looked", "--samples 48 --corrupt-images skip --check-images"
    )
    assert looked["skipped"] == result["skipped"]
    whole, *others = (
        torch.load(tmp_path / name / "model.pt") for name in ("whole", "parts", "looked")
    )
    assert all(torch.equal(whole[name], other[name]) for other in others for name in whole)


@pytest.mark.long
def test_unreadable_images_are_reported_once_over_mpi(tmp_path: Path) -> None:
    root = folder(tmp_path / "set", 80)
    options = ["--dataset", "imagefolder", "--data-dir", root, "--image-size", 16, "--model", "mlp"]
    options += ["--batch-size", 4, "--samples", 48, "--loader-workers", 1]
    completed = train(3, tmp_path / "run", *options, "--check-images", "--corrupt-images", "skip")
    assert all(completed.stderr.count(str(root / name)) == 1 for name in CORRUPT)
    assert re.search(r"\b24 images\b", completed.stdout)
    assert summary(tmp_path / "run")["images_skipped"] == len(CORRUPT)
