"""Batches: augmentation, resuming and loader processes."""

from __future__ import annotations

import random
from copy import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, TensorDataset

from aladdin_mpi.data import loading
from aladdin_mpi.data.augment import Normalisation, SmallImages, crop_and_flip, random_box
from aladdin_mpi.data.datasets import MapDataset, load_dataset, with_augmentation
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.data.loading import BatchSource
from aladdin_mpi.data.models import build_model
from aladdin_mpi.data.sampler import AUGMENTATION, ShardedStream, sample_keys
from aladdin_mpi.errors import UserError

PLAIN = Normalisation((0.0,) * 3, (1.0,) * 3)


class RandomNoise(Dataset):
    """A user's data set whose training view draws from the global generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = [torch.rand(()).item(), random.random(), np.random.random()]
        return torch.tensor(noise) + index, index


def arrays(count: int = 20, pad: int = 4, flip: bool = True) -> ImageArrays:
    images = torch.randint(1, 256, (count, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    recipe = SmallImages(PLAIN, pad, flip)
    return ImageArrays(images.to(torch.uint8), torch.arange(count), recipe)


def large_files(root: Path, augment: str) -> MapDataset:
    draw = np.random.default_rng(0)
    for i in range(20):
        pixels = draw.integers(0, 256, (70 + i, 80, 3), dtype=np.uint8)
        path = root / "train" / "c" / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    (root / "train").rename(root / "both")
    for split in ("train", "test"):
        (root / split).symlink_to(root / "both")
    return load_dataset("imagefolder", root, image_size=16, augment=augment).train


@pytest.fixture(params=["arrays", "arrays by policy", "large files", "large by policy", "user's"])
def dataset(request: pytest.FixtureRequest, tmp_path: Path) -> MapDataset:
    augment = "trivialaugment" if request.param.endswith("by policy") else "auto"
    if request.param.startswith("arrays"):
        return with_augmentation(arrays(), augment)
    return large_files(tmp_path, augment) if request.param.startswith("large") else RandomNoise()


def source(
    dataset: MapDataset, worker: int = 0, workers: int = 1, loader_workers: int = 0
) -> BatchSource:
    stream = ShardedStream(len(dataset), worker, workers, seed=9)
    return BatchSource(dataset, stream, batch_size=4, loader_workers=loader_workers)


def epoch_of(
    dataset: MapDataset, epoch: int, workers: int, loader_workers: int = 0
) -> list[torch.Tensor]:
    """Return every sample of one epoch as the workers receive it, by index."""
    seen: dict[int, torch.Tensor] = {}
    for worker in range(workers):
        one = source(dataset, worker, workers, loader_workers)
        one.stream.position = epoch * one.stream.shard_size
        _, indices = copy(one.stream).take(one.stream.shard_size)
        inputs, _ = one.next_batch(len(indices))
        one.close()
        seen.update(zip(indices.tolist(), inputs, strict=True))
    assert sorted(seen) == list(range(len(dataset)))
    return [seen[i] for i in range(len(dataset))]


# -- augmentation -------------------------------------------------------------------------------


def test_augmentation_does_not_depend_on_the_number_of_workers(dataset: MapDataset) -> None:
    alone = epoch_of(dataset, 1, 1)
    for workers in (2, 3):
        shared = epoch_of(dataset, 1, workers)
        assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    other = epoch_of(dataset, 2, 1)
    assert sum(torch.equal(a, b) for a, b in zip(alone, other, strict=True)) < 5


@pytest.mark.timeout(60)
def test_augmentation_does_not_depend_on_loader_processes(dataset: MapDataset) -> None:
    alone = epoch_of(dataset, 0, 1)
    loaded = epoch_of(dataset, 0, 1, loader_workers=2)
    assert all(torch.equal(a, b) for a, b in zip(alone, loaded, strict=True))


def test_crops_shift_by_at_most_the_padding() -> None:
    images = arrays(200).images[:]
    keys = sample_keys(0, AUGMENTATION, 0, np.arange(200))
    shifts, mirrors = set(), 0
    for image, result in zip(images, crop_and_flip(images, keys, 4, True), strict=True):
        padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
        windows = padded.unfold(1, 32, 1).unfold(2, 32, 1)
        outcome = [
            (windows == view[:, None, None]).all(-1).all(-1).all(0)
            for view in (result, result.flip(2))
        ]
        assert sum(int(each.sum()) for each in outcome) == 1
        mirrors += bool(outcome[1].any())
        shifts.add(tuple((outcome[0] | outcome[1]).nonzero()[0].tolist()))
    assert {y for y, _ in shifts} == {x for _, x in shifts} == set(range(9))
    assert 70 < mirrors < 130


def test_normalisation_follows_its_formula() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
    out = Normalisation((0.4,), (0.5,))(pixels)
    assert torch.allclose(out.flatten(), torch.tensor([-0.8, -0.4, 1.2]), atol=1e-6)


@pytest.mark.parametrize(("width", "height"), [(100, 80), (1, 500), (500, 1), (1, 1)])
def test_random_box_lies_inside_image(width: int, height: int) -> None:
    draw = random.Random(0)
    for _ in range(200):
        left, top, right, bottom = random_box(width, height, draw)
        assert 0 <= left < right <= width and 0 <= top < bottom <= height


def test_loading_leaves_global_generators_unchanged() -> None:
    data = RandomNoise()
    for draw in (lambda: torch.rand(3).tolist(), random.random, np.random.random):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        first = draw()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        source(data).next_batch()
        assert draw() == first


# -- order and resuming -------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_batches_of_any_size_follow_sample_stream(dataset: MapDataset, loader_workers: int) -> None:
    whole, _ = source(dataset).next_batch(30)
    parts = source(dataset, loader_workers=loader_workers)
    position = 0
    for count in (4, 3, 4, 1, 9, 4):
        inputs, labels = parts.next_batch(count)
        assert torch.equal(inputs, whole[position : position + count])
        assert labels.dtype == torch.int64 and len(labels) == count
        position += count
        assert parts.stream.position == position
    parts.close()


@pytest.mark.sample(2)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_resumed_batch_source_repeats_and_skips_nothing(
    dataset: MapDataset, loader_workers: int
) -> None:
    first = source(dataset, loader_workers=loader_workers)
    first.next_batch()
    first.next_batch(3)
    position = first.stream.position
    expected = [first.next_batch() for _ in range(4)]
    first.close()
    second = source(dataset)
    first.stream.position = second.stream.position = position
    for inputs, labels in expected:
        for resumed in (first, second):
            again = resumed.next_batch()
            assert torch.equal(again[0], inputs) and torch.equal(again[1], labels)
    first.close()


# -- plain data sets of the user ----------------------------------------------------------------


def test_batch_source_reads_tensor_dataset() -> None:
    data = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))
    inputs, labels = source(data).next_batch(6)
    assert torch.equal(inputs[:, 0], 2.0 * labels) and sorted(labels.tolist()) == list(range(6))


def test_batch_source_rejects_samples_that_are_not_pairs() -> None:
    data: list[dict[str, int]] = [{"input": 1}] * 5
    with pytest.raises(UserError, match=r"--dataset.*\(input, label\).*\bdict\b"):
        source(data).next_batch()


# -- evaluation and statistics ------------------------------------------------------------------


def test_evaluation_returns_every_sample_once_without_augmentation(dataset: MapDataset) -> None:
    if isinstance(dataset, RandomNoise):
        dataset = TensorDataset(torch.rand(20, 3), torch.arange(20))
    batches = list(loading.test_batches(dataset, 8))
    assert [len(labels) for _, labels in batches] == [8, 8, 4]
    inputs = torch.cat([each for each, _ in batches])
    assert all(torch.equal(inputs[i], dataset[i][0]) for i in range(20))


def test_statistics_use_training_samples_without_augmentation() -> None:
    data = arrays()
    batches = list(loading.train_batches_for_statistics(data, 4, 5, seed=2))
    labels = torch.cat([each for _, each in batches])
    assert sorted(labels.tolist()) == list(range(20))
    for inputs, labels in batches:
        assert torch.equal(inputs, data.evaluation_batch(labels.numpy())[0])
    other = list(loading.train_batches_for_statistics(data, 4, 5, seed=3))
    assert [each.tolist() for _, each in other] != [each.tolist() for _, each in batches]


# -- complete run -------------------------------------------------------------------------------


def test_training_on_digits_reaches_accuracy() -> None:
    torch.manual_seed(0)
    pair = load_dataset("digits")
    model = build_model("digits", pair.num_classes, pair.in_channels, pair.image_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = BatchSource(pair.train, ShardedStream(len(pair.train), 0, 1, seed=0), 32)
    for _ in range(4 * len(pair.train) // 32):
        images, labels = batches.next_batch()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(images).argmax(1) == labels).sum())
            for images, labels in loading.test_batches(pair.test, 100)
        )
    assert right / len(pair.test) >= 0.97
