"""``--augment`` and ``--image-size``: recipes of data sets, and torchvision's policies."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from aladdin_mpi.data import datasets
from aladdin_mpi.data.augment import (
    CLASSES,
    IMAGENET,
    LargeImages,
    Policy,
    SmallImages,
    to_image,
    to_tensor,
)
from aladdin_mpi.data.datasets import describe_set, load_dataset
from aladdin_mpi.data.images import ImageArrays
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.run import TrainOptions, parse
from aladdin_mpi.run import trainer

POLICIES = tuple(CLASSES)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "cache"))


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    draw = np.random.default_rng(seed)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), dtype=np.uint8))


def folder(root: Path, width: int, height: int) -> Path:
    for split in ("train", "test"):
        (root / split / "cat").mkdir(parents=True)
        for i in range(4):
            picture(width, height, i).save(root / split / "cat" / f"{i}.png")
    return root


def views(root: Path, augment: str, cache: str = "auto", size: int | None = None) -> torch.Tensor:
    """Return the training images as augmented in epoch 1."""
    data: Any = load_dataset("imagefolder", root, image_size=size, cache=cache, augment=augment)
    keys = [7919 << 40, 2**64 - 1, 12345, 3 << 33]
    if hasattr(data.train, "augmented"):
        return torch.stack([data.train.augmented(i, key)[0] for i, key in enumerate(keys)])
    result: torch.Tensor = data.train.recipe.training(data.train.images, np.array(keys, np.uint64))
    return result


# -- policies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_policy_matches_torchvision_and_leaves_global_generators_unchanged(name: str) -> None:
    """Whatever other threads draw, and without changing the global generators."""
    settings = [v2.AutoAugmentPolicy.IMAGENET] if name == "autoaugment" else []
    plain = getattr(v2, CLASSES[name])(*settings)
    image, policy = picture(40, 30), Policy(name, "IMAGENET")
    keys = [key << 32 | 77 for key in range(12)]
    expected = []
    for key in keys:
        torch.manual_seed(key >> 32)
        expected.append(to_tensor(plain(image)))
    assert len({each.numpy().tobytes() for each in expected}) > 6

    ended = Event()

    def disturb() -> None:
        while not ended.is_set():
            torch.rand(1)

    states = str((random.getstate(), np.random.get_state()))
    thread = Thread(target=disturb)
    thread.start()
    try:
        outcome = [to_tensor(policy(image, key)) for key in keys]
    finally:
        ended.set()
        thread.join()
    assert all(torch.equal(a, b) for a, b in zip(outcome, expected, strict=True))
    before = torch.get_rng_state()
    policy(image, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert str((random.getstate(), np.random.get_state())) == states


def test_policy_requires_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match=r"--augment randaugment .*torchvision.*vision"):
        load_dataset("digits", augment="randaugment")


# -- recipes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", datasets.CHOICES)
def test_augmented_images_match_in_memory_and_from_files(tmp_path: Path, augment: str) -> None:
    root = folder(tmp_path / "set", 16, 16)
    held, files = views(root, augment, "on"), views(root, augment, "off")
    assert torch.equal(held, files) and held.shape == (4, 3, 16, 16)
    assert views(root, augment, "off", 20).shape == (4, 3, 20, 20)


def test_augment_option_selects_recipe(tmp_path: Path) -> None:
    small, large = folder(tmp_path / "small", 16, 16), folder(tmp_path / "large", 90, 70)
    for root, usual in ((small, "crop-flip"), (large, "imagenet")):
        data = load_dataset("imagefolder", root, image_size=24).train
        plain = torch.stack([data[i][0] for i in range(4)])
        outcome = {augment: views(root, augment, size=24) for augment in datasets.CHOICES}
        assert torch.equal(outcome.pop("auto"), outcome[usual])
        assert torch.equal(outcome["none"], plain)
        kinds = {each.numpy().tobytes() for each in outcome.values()}
        assert len(kinds) == len(outcome), "no two are alike"


def test_shifted_crop_is_a_window_of_evaluated_image() -> None:
    image = picture(90, 70)
    recipe = LargeImages(image_size=24, crop="shift")
    whole = LargeImages(image_size=27, crop="none")  # the height of its shorter side
    wide = image.resize((round(90 * 27 / 70), 27), Image.Resampling.BILINEAR)
    windows = IMAGENET(to_tensor(wide)).unfold(1, 24, 1).unfold(2, 24, 1)
    seen = set()
    for key in range(60):
        view = recipe.training_image(image, key)
        hits = [
            (windows == each[:, None, None]).all(-1).all(-1).all(0) for each in (view, view.flip(2))
        ]
        assert sum(int(hit.sum()) for hit in hits) == 1
        seen.add((bool(hits[1].any()), *(hits[0] | hits[1]).nonzero()[0].tolist()))
    assert {each[0] for each in seen} == {True, False}
    assert {each[1] for each in seen} == set(range(4)) and len({each[2] for each in seen}) == 12
    assert whole.training_image(image, 3).shape == (3, 27, 27)


@pytest.mark.parametrize("augment", ["imagenet", *POLICIES])
def test_grey_images_of_few_shades_are_augmented(augment: str) -> None:
    data: Any = load_dataset("digits", augment=augment)
    keys = np.arange(50, dtype=np.uint64) << np.uint64(32)
    outcome = data.train.recipe.training(data.train.images[:50], keys)
    plain: Any = load_dataset("digits").train
    assert outcome.shape == (50, 1, 8, 8)
    assert torch.allclose(data.train[3][0], plain[3][0], atol=0.01) or augment == "imagenet"
    image = data.train.images[0]
    assert image.max() > 200 and torch.equal(to_tensor(to_image(image)), image)


def test_load_dataset_rejects_unsupported_augmentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--augment imagenet: .*channels.*\b5\b"):
        load_dataset("synthetic:5x8x8:2:9", augment="imagenet")
    with pytest.raises(UserError, match=r"--augment: .*auto, none.*'mixup'"):
        load_dataset("digits", augment="mixup")
    module = "def data():\n    return 5\ndef heeds(augment, image_size):\n    return augment\n"
    (tmp_path / "own_images.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"--image-size .*image_size.*own_images:data"):
        load_dataset("own_images:data", image_size=9)
    with pytest.raises(UserError, match=r"--augment .*\baugment\b.*own_images:data"):
        load_dataset("own_images:data", augment="none")
    with pytest.raises(UserError, match=r"--dataset own_images:heeds: .*\bstr\b"):
        load_dataset("own_images:heeds", augment="none", image_size=9)


def test_synthetic_and_described_sets_use_augmentation_options() -> None:
    train: Any = load_dataset("synthetic:3x16x16:2:9", augment="crop-flip").train
    assert isinstance(train.recipe, SmallImages)
    assert (train.recipe.pad, train.recipe.flip) == (2, True)
    assert describe_set("imagenet", None, False, 160).size == 160


def test_augmentation_options_reach_trainer() -> None:
    words = "--model mlp --image-size 12 --augment trivialaugment"
    data, module = trainer._prepare(parse(TrainOptions, words.split(), "train", ""), None)
    assert isinstance(data.train, ImageArrays) and isinstance(data.train.recipe.policy, Policy)
    assert data.image_size == 12 and next(module.parameters()).shape == (256, 144)
