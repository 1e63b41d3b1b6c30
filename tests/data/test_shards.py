"""Data in shards: indexing, reading order, distribution to workers, and errors."""

from __future__ import annotations

import errno
import io
import os
import pickle
import re
import tarfile
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from aladdin_mpi.data import shards
from aladdin_mpi.data import shards as shards_module
from aladdin_mpi.data.datasets import load_dataset
from aladdin_mpi.data.feeds import FeedShare, SampleFeed
from aladdin_mpi.data.sampler import Int64Array, Period
from aladdin_mpi.data.shards import ShardImages
from aladdin_mpi.errors import UserError
from tests.commands import summary, train
from tests.launch import needs

SIZES = {"train": (30, 7, 25, 18), "test": (10, 6)}
CLASSES = 3
SIDE = 8
TRAIN = sum(SIZES["train"])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "cache"))
    load_dataset_cache_clear()
    return tmp_path / "cache"


def load_dataset_cache_clear() -> None:
    from aladdin_mpi.data import datasets

    datasets._load_shards.cache_clear()


def picture(number: int) -> bytes:
    """Return an image whose colour determines its class."""
    pixels = np.full((SIDE, SIDE, 3), 40, dtype=np.uint8)
    pixels[..., number % CLASSES] = 220
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write(root: Path, layout: str = "{split}/{shard:06d}.tar") -> Path:
    for split, sizes in SIZES.items():
        number = 0
        for shard, size in enumerate(sizes):
            path = root / layout.format(split=split, shard=shard)
            path.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(path, "w") as archive:
                for _ in range(size):
                    label = number % CLASSES
                    add(archive, f"n0/img_{number:05d}.png", picture(number))
                    if split == "train":
                        add(archive, f"n0/img_{number:05d}.cls", str(label).encode())
                    else:
                        name = f"n0/img_{number:05d}.json"
                        add(archive, name, b'{"label": %d}' % label)
                    number += 1
    return root


def load(root: Path, **options: str | int) -> ShardImages:
    result = load_dataset("shards", root, **options).train  # type: ignore[arg-type]
    assert isinstance(result, ShardImages)
    return result


def share(data: ShardImages, worker: int, workers: int, done: int = 0) -> FeedShare:
    return FeedShare(worker, workers, seed=5, batch_size=4, done=done)


def order_of(data: ShardImages, worker: int, workers: int, count: int, done: int = 0) -> Int64Array:
    source = SampleFeed(data, pairs=True).source(share(data, worker, workers, done))
    return copy(source.stream).take(count)[1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "layout",
    ["{split}/{shard:06d}.tar", "{split}-{shard:06d}.tar", "imagenet-{split}-{shard:06d}.tar"],
)
def test_shard_samples_are_indexed_and_decoded(tmp_path: Path, layout: str) -> None:
    write(tmp_path / "data", layout)
    pair = load_dataset("shards", tmp_path / "data", image_size=SIDE, augment="none")
    assert (len(pair.train), len(pair.test)) == (TRAIN, sum(SIZES["test"]))
    assert (pair.num_classes, pair.in_channels, pair.image_size) == (CLASSES, 3, SIDE)
    for data in (pair.train, pair.test):
        for index in range(len(data)):
            image, label = data[index]
            assert label == index % CLASSES
            assert int(image.mean((1, 2)).argmax()) == label


def test_shard_is_indexed_again_only_after_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "data")
    load(root)
    load_dataset_cache_clear()
    opened: list[object] = []
    whole = tarfile.open

    def watched(*args: object, **how: object) -> object:
        opened.append(args[0])
        return whole(*args, **how)  # type: ignore[call-overload]

    monkeypatch.setattr(tarfile, "open", watched)
    load(root)
    assert not opened
    changed = root / "train" / "000001.tar"
    with whole(changed, "a") as archive:
        add(archive, "n0/new.png", picture(0))
        add(archive, "n0/new.cls", b"0")
    load_dataset_cache_clear()
    assert len(load(root)) == TRAIN + 1
    assert opened == [changed]


def fill(shard: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(shard, "w") as archive:
        for name, content in files.items():
            add(archive, name, content)


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ({"a.cls": b"2", "a.jpg": picture(0), "a.json": b'{"width": 8}'}, 2),
        ({"a.JPEG": picture(0), "a.json": b'{"cls": 1, "text": "x"}'}, 1),
        ({"a.jpg": picture(0), "a.cls": b" 1\n", "a.seg.png": b"", "a.txt": b""}, 1),
        ({"._a.jpg": b"", "a.jpg": picture(0), "._a.cls": b"", "a.cls": b"1", "README": b""}, 1),
    ],
)
def test_shard_index_ignores_other_files_of_a_sample(
    tmp_path: Path, files: dict[str, bytes], label: int
) -> None:
    root = write(tmp_path / "data")
    fill(root / "train/000000.tar", files)
    data = load(root)
    assert len(data) == TRAIN - SIZES["train"][0] + 1
    assert int(data.targets[0]) == label


def test_concurrent_ranks_index_shards_in_different_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / str(number) for number in range(20)]
    seen: list[Path] = []
    monkeypatch.setattr(shards, "_cached", lambda shard, folder: seen.append(shard))
    for _ in range(2):
        shards.indexed(files)
    first, second = seen[:20], seen[20:]
    assert sorted(first) == sorted(second) == sorted(files)
    # With the same order, each rank would only meet shards that another has just started.
    start = second.index(first[0])
    assert second[start:] + second[:start] != first


def test_shard_index_is_stored_next_to_data_if_folder_exists(tmp_path: Path, cache: Path) -> None:
    root = write(tmp_path / "data")
    (tmp_path / "data.index").mkdir()
    assert len(load(root)) == TRAIN
    assert len(list((tmp_path / "data.index").glob("shard-*.npy"))) == 6
    assert not cache.exists()


# -- the order ------------------------------------------------------------------------------
@pytest.mark.parametrize("workers", [1, 3, 4, 7])
def test_shard_reading_order_has_every_sample_once_per_epoch(tmp_path: Path, workers: int) -> None:
    data = load(write(tmp_path / "data"))
    for epoch in range(3):
        order = data.reading_order(epoch, workers, seed=5)
        assert sorted(order.tolist()) == list(range(TRAIN))
    orders = [tuple(data.reading_order(epoch, workers, seed=5)) for epoch in range(3)]
    assert len(set(orders)) == 3
    assert tuple(data.reading_order(0, workers, seed=6)) != orders[0]


def test_worker_reads_each_shard_sequentially(tmp_path: Path) -> None:
    data = load(write(tmp_path / "data"), shuffle_buffer=1)  # no sample is moved
    bounds = np.cumsum([0, *SIZES["train"]])
    touched = []
    for worker in range(2):
        mine = order_of(data, worker, 2, TRAIN // 2)
        where = np.searchsorted(bounds, mine, side="right") - 1
        runs = [where[0], *where[1:][where[1:] != where[:-1]]]
        assert len(runs) == len(set(runs))  # no shard is read twice
        assert all(np.diff(mine)[np.diff(where) == 0] == 1)
        touched.append(set(runs))
    assert len(touched[0] & touched[1]) <= 1  # the sample at their border


def test_shuffle_buffer_bounds_displacement_of_samples(tmp_path: Path) -> None:
    root = write(tmp_path / "data")
    straight, moved = (
        load(root, shuffle_buffer=size).reading_order(0, 1, seed=5).tolist() for size in (1, 10)
    )
    distances = [abs(moved.index(sample) - straight.index(sample)) for sample in range(TRAIN)]
    assert max(distances) <= 10 and sum(distance > 0 for distance in distances) > TRAIN / 2


def test_shard_order_resumes_at_given_position(tmp_path: Path) -> None:
    data = load(write(tmp_path / "data"))
    for worker in range(3):
        whole = order_of(data, worker, 3, 60)
        assert (order_of(data, worker, 3, 40, done=20) == whole[20:]).all()


def test_shard_batches_do_not_depend_on_loader_processes_or_resuming(tmp_path: Path) -> None:
    data = load(write(tmp_path / "data"), image_size=SIDE, shuffle_buffer=10)
    per_worker, seen = 10, []
    for worker in range(2):
        whole = batches(data, per_worker, FeedShare(worker, 2, seed=5, batch_size=4))
        for done, processes in ((0, 1), (0, 2), (12, 0), (12, 2)):
            part = FeedShare(worker, 2, seed=5, batch_size=4, done=done, processes=processes)
            result = batches(data, per_worker - done // 4, part)
            for (inputs, labels), (mine, my_labels) in zip(result, whole[done // 4 :], strict=True):
                assert torch.equal(inputs, mine) and torch.equal(labels, my_labels)
        seen += [len(labels) for _, labels in whole]
    assert sum(seen) == TRAIN  # one epoch, covered by both together


def batches(data: ShardImages, count: int, of: FeedShare) -> list[tuple[Tensor, Tensor]]:
    source = SampleFeed(data, pairs=True).source(of)
    result = [source.next_batch(of.batch_size) for _ in range(count)]
    source.close()
    return result


def test_shards_reject_resized_run(tmp_path: Path) -> None:
    data = load(write(tmp_path / "data"))
    past = FeedShare(0, 2, seed=5, batch_size=4, past=[Period((4, 4, 4))])
    with pytest.raises(UserError, match=r"--allow-resize.*\bshards\b"):
        SampleFeed(data, pairs=True).source(past)


# -- processes ------------------------------------------------------------------------------
def test_shard_images_can_be_pickled(tmp_path: Path) -> None:
    data = load(write(tmp_path / "data"))
    data[0]
    other = pickle.loads(pickle.dumps(data))
    for index in (0, 35, TRAIN - 1):
        assert torch.equal(other[index][0], data[index][0])
    assert [entries.tolist() for entries in other._entries] == [e.tolist() for e in data._entries]


def test_pickled_shard_images_exclude_index(tmp_path: Path) -> None:
    root = write(tmp_path / "data")
    small = len(pickle.dumps(load(root)))
    with tarfile.open(root / "train/000000.tar", "a") as archive:
        for number in range(1000):
            add(archive, f"more_{number}.png", b"")
            add(archive, f"more_{number}.cls", b"1")
    load_dataset_cache_clear()
    grown = len(pickle.dumps(load(root))) - small
    assert grown < 1000 * (8 + 2)  # a label, and hardly any of the index


def test_shard_images_can_be_pickled_without_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="ALADDIN_MPI_CACHE"):
        data = load(write(tmp_path / "data"))
    other = pickle.loads(pickle.dumps(data))
    assert torch.equal(other[35][0], data[35][0])


def test_shard_images_limit_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "MOST_OPEN", 2)
    data = load(write(tmp_path / "data"))
    for index in [0, 31, 40, 70, 1, 79]:
        data[index]
        assert data._file.cache_info().currsize <= 2


# -- unreadable data ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"a.png": picture(0)}, r"\blabel\b.*\ba\b.*cls json"),
        ({"a.cls": b"1"}, r"\bimage\b.*\ba\b.*jpg"),
        ({"a.png": picture(0), "a.cls": b"cat"}, r"a\.cls.*b'cat'"),
        ({"a.png": picture(0), "a.json": b"{}"}, r"a\.json.*b'{}'"),
        ({"a.png": picture(0), "a.json": b'{"label": 1.5}'}, r"a\.json.*1\.5"),
        ({"a.png": picture(0), "a.cls": b"-1"}, r"a\.cls.*b'-1'"),
        ({"README": b""}, "samples.*image.*label"),
    ],
)
def test_load_names_shard_with_invalid_samples(
    tmp_path: Path, files: dict[str, bytes], cause: str
) -> None:
    root = write(tmp_path / "data")
    shard = root / "train" / "000001.tar"
    fill(shard, files)
    with pytest.raises(UserError, match=rf"{re.escape(str(shard))}: .*{cause}"):
        load(root)


def test_load_names_shard_that_is_not_a_tar_file(tmp_path: Path) -> None:
    root = write(tmp_path / "data")
    (root / "train" / "000001.tar").write_bytes(b"no tar file" * 100)
    with pytest.raises(UserError, match=r"000001\.tar: .*\btar file\b"):
        load(root)


def test_load_names_truncated_shard(tmp_path: Path) -> None:
    shard = write(tmp_path / "data") / "train/000001.tar"
    shard.write_bytes(shard.read_bytes()[: 5 * 512 + 100])
    with pytest.raises(UserError, match=r"000001\.tar: .*unexpected end of data"):
        load(tmp_path / "data")


def test_load_names_shard_that_is_a_dangling_link(tmp_path: Path) -> None:
    shard = write(tmp_path / "data") / "train/000001.tar"
    shard.unlink()
    shard.symlink_to("gone")
    with pytest.raises(UserError, match=r"000001\.tar: .*No such file"):
        load(tmp_path / "data")


def test_load_names_test_sample_of_unknown_class(tmp_path: Path) -> None:
    root = write(tmp_path / "data")
    fill(root / "test/000001.tar", {"a.png": picture(0), "a.cls": b"3"})
    with pytest.raises(UserError, match=r"000001\.tar/a\.png: .*\b2\b.*\b3\b"):
        load(root)


def test_load_rejects_missing_shards(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\bshards requires --data-dir\b"):
        load_dataset("shards")
    with pytest.raises(UserError, match=rf"--data-dir {tmp_path}: .*DIR/train"):
        load_dataset("shards", tmp_path)


def damage(root: Path, index: int) -> None:
    data = load(root)
    shard, entry = data._place(index)
    with data._shards[shard].open("r+b") as file:
        file.seek(int(entry["offset"]))
        file.write(b"rubbish" * 3)


def test_unreadable_image_in_shard_is_named_or_skipped(tmp_path: Path) -> None:
    root = write(tmp_path / "data")
    damage(root, 33)
    load_dataset_cache_clear()
    with pytest.raises(UserError, match=r"000001\.tar/n0/img_00033\.png: .*readable"):
        load(root)[33]
    data = load(root, corrupt_images="skip")
    assert torch.equal(data[33][0], data[34][0]) and data[33][1] == data[34][1]
    assert data.skipped is not None
    assert data.skipped.take()[0][0].endswith("000001.tar/n0/img_00033.png")


def test_shard_read_error_counts_as_unreadable_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "data")
    stops, skips = load(root), load(root, corrupt_images="skip")
    first = int(stops._entries[1]["offset"][3])
    read = os.pread

    def broken(handle: int, size: int, offset: int) -> bytes:
        if offset == first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(handle, size, offset)

    monkeypatch.setattr(os, "pread", broken)
    with pytest.raises(UserError, match=r"img_00033\.png: .*Input/output"):
        stops[33]
    assert torch.equal(skips[33][0], skips[34][0])


def test_shuffle_buffer_of_zero_is_rejected() -> None:
    with pytest.raises(UserError, match=r"--shuffle-buffer: .*\b1\b.*\b0\b"):
        load_dataset("shards", shuffle_buffer=0)


# -- complete runs --------------------------------------------------------------------------------
@pytest.mark.long
@needs("openmpi")
def test_training_on_shards_reaches_accuracy(tmp_path: Path, cache: Path) -> None:
    root = write(tmp_path / "data")
    words = ["--dataset", "shards", "--data-dir", root, "--model", "resnet20", "--image-size", SIDE]
    words += ["--augment", "none", "--epochs", 4, "--batch-size", 8, "--bn-batches", 5]
    words += ["--lr", 0.02, "--shuffle-buffer", 20]
    env = {"ALADDIN_MPI_CACHE": str(cache)}
    train(3, tmp_path / "run", *words, "--loader-workers", 1, env=env)
    run_summary = summary(tmp_path / "run")
    assert run_summary["samples"] == 4 * TRAIN
    assert run_summary["test_accuracy"] > 0.6  # chance is 0.33


@pytest.mark.long
@needs("openmpi")
def test_resumed_run_on_shards_matches_uninterrupted_run(tmp_path: Path, cache: Path) -> None:
    root = write(tmp_path / "data")
    damage(root, 33)
    words = ["--dataset", "shards", "--data-dir", root, "--model", "resnet20", "--image-size", SIDE]
    words += ["--algorithm", "ar-sgd", "--batch-size", 4, "--bn-batches", 1, "--shuffle-buffer", 20]
    words += ["--corrupt-images", "skip", "--lr-schedule", "constant", "--warmup-epochs", 0]
    env = {"ALADDIN_MPI_CACHE": str(cache)}
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(2, whole, *words, "--epochs", 2, env=env)
    train(2, broken, *words, "--samples", 56, "--loader-workers", 1, env=env)
    train(2, None, "--resume", broken, "--epochs", 2, "--loader-workers", 0, env=env)
    first, second = summary(whole), summary(broken)
    assert second["samples"] == 2 * TRAIN
    assert second["test_loss"] == first["test_loss"]
    assert (
        second["skipped"] == first["skipped"] == [str(root / "train/000001.tar/n0/img_00033.png")]
    )
