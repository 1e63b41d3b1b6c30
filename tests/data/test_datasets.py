"""Data sets by name: splits, errors, folders and the host's cache."""

from __future__ import annotations

import gzip
import hashlib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from aladdin_mpi.data import imagefolder
from aladdin_mpi.data.augment import SmallImages
from aladdin_mpi.data.datasets import DatasetPair, MapDataset, load_dataset
from aladdin_mpi.data.host_cache import cached_array
from aladdin_mpi.data.images import DrawnImages, ImageArrays, ImageFiles
from aladdin_mpi.errors import UserError
from tests.launch import ROOT


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(folder))
    return folder


def write_images(root: Path, sizes: list[tuple[int, int]], suffix: str = "png") -> Path:
    """Write ``train`` and ``test`` with two classes, one image of each size in each class."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i, (width, height) in enumerate(sizes):
                pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.{suffix}")
    return root


def held(dataset: MapDataset) -> ImageArrays:
    """Return ``dataset``, which must be held in memory."""
    assert isinstance(dataset, ImageArrays)
    return dataset


# -- built-in sets ----------------------------------------------------------------------------


def test_digits_are_split_and_normalised() -> None:
    pair = load_dataset("digits")
    assert (len(pair.train), len(pair.test)) == (1437, 360)
    assert (pair.num_classes, pair.in_channels, pair.image_size) == (10, 1, 8)
    images = torch.stack([pair.train[i][0] for i in range(len(pair.train))])
    assert images.mean().abs() < 0.01 and (images.std() - 1).abs() < 0.01
    counts = held(pair.test).targets.bincount()
    assert counts.min() >= 35 and counts.max() <= 37
    image, label = pair.test[0]
    assert image.dtype == torch.float32 and image.shape == (1, 8, 8) and isinstance(label, int)


def test_load_dataset_shares_set_within_process() -> None:
    assert load_dataset("digits") is load_dataset("digits")


def test_synthetic_set_has_requested_size() -> None:
    pair = load_dataset("synthetic:1x6x8:4:40")
    assert pair.train[0][0].shape == (1, 6, 8)
    assert (len(pair.train), len(pair.test), pair.num_classes) == (40, 8, 4)
    assert not torch.equal(held(pair.train).images[:8], held(pair.test).images[:8])


def test_synthetic_set_is_learnable() -> None:
    """The nearest class mean of the training images classifies the test images."""
    pair = load_dataset("synthetic:3x8x8:5:200")
    train, labels = held(pair.train).evaluation_batch(slice(None))
    means = torch.stack([train[labels == c].mean(0) for c in range(5)])
    test, expected = held(pair.test).evaluation_batch(slice(None))
    result = torch.cdist(test.flatten(1), means.flatten(1)).argmin(1)
    assert (result == expected).float().mean() > 0.95


@pytest.mark.parametrize("name", ["synthetic:3x8:2:9", "synthetic:3x8x8:0:9", "synthetic:a"])
def test_load_dataset_rejects_malformed_synthetic_name(name: str) -> None:
    with pytest.raises(UserError, match=f"--dataset {name}: .*synthetic:CxHxW:CLASSES:COUNT"):
        load_dataset(name)


def test_synthetic_set_larger_than_memory_draws_images_on_demand() -> None:
    """A set of 200 GB: images are generated on access, always with the same values."""
    train = held(load_dataset("synthetic:3x224x224:1000:1300000").train)
    numbers = np.array([1_299_999, 7, 7])
    images, labels = train.evaluation_batch(numbers)
    assert images.shape == (3, 3, 224, 224) and labels.tolist() == [999, 7, 7]
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    assert torch.equal(train.evaluation_batch(numbers[:1])[0][0], images[0])
    assert torch.equal(train[7][0], images[1])


def test_synthetic_images_do_not_depend_on_access_order() -> None:
    first, second = (DrawnImages((3, 5, 6), 4, 30, split=0) for _ in range(2))
    assert torch.equal(first[torch.tensor([9, 3, 9])], second[:][[9, 3, 9]])
    assert torch.equal(first[:], second[:]) and torch.equal(first[29], second[29])
    assert first.shape[0] == 30 and not torch.equal(first[0], first[4])


def test_image_size_scales_images() -> None:
    pair = load_dataset("digits", image_size=20)
    assert pair.image_size == 20 and pair.train[0][0].shape == (1, 20, 20)


# -- errors -------------------------------------------------------------------------------------


def test_load_dataset_suggests_known_names_for_unknown_set() -> None:
    with pytest.raises(UserError, match=r"--dataset: .*'cifar'.*\bcifar10\b.*\bdigits\b"):
        load_dataset("cifar")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_load_dataset_names_folder_and_download_option_for_missing_data(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=rf"--dataset {name}: .*--data-dir {tmp_path} .*--download .*http"
    ):
        load_dataset(name, tmp_path)
    with pytest.raises(UserError, match=f"--dataset {name}: .*--data-dir (?!/)"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"image_size": 0}, "--image-size: .*1.*0"), ({"cache": "yes"}, "--cache: .*auto.*'yes'")],
)
def test_load_dataset_names_invalid_option(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset("digits", **options)


# -- torchvision's sets -------------------------------------------------------------------------


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let torchvision download a tiny MNIST from a local server."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    draw = np.random.default_rng(0)
    resources = []
    for split, count in (("train", 20), ("t10k", 5)):
        images = np.array([0x803, count, 28, 28], dtype=">i4").tobytes() + draw.bytes(count * 784)
        labels = np.array([0x801, count], dtype=">i4").tobytes() + bytes(range(5)) * (count // 5)
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{split}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content))
            resources.append((path.name, hashlib.md5(path.read_bytes()).hexdigest()))
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        mirror = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [mirror])
        monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
        yield
        server.shutdown()


@pytest.mark.usefixtures("tiny_mnist")
def test_download_option_downloads_mnist(tmp_path: Path) -> None:
    pair = load_dataset("mnist", tmp_path / "data", download=True)
    assert (len(pair.train), len(pair.test), pair.in_channels, pair.image_size) == (20, 5, 1, 28)
    assert [label for _, label in (pair.test[i] for i in range(5))] == [0, 1, 2, 3, 4]
    again = load_dataset("mnist", tmp_path / "data")
    assert torch.equal(held(again.train).images[:], held(pair.train).images[:])


def test_failed_download_names_option_and_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"{tmp_path.as_uri()}/nowhere/"])
    with pytest.raises(UserError, match=r"--download: .*\bMNIST\b"):
        load_dataset("mnist", tmp_path, download=True)


# -- folders of images --------------------------------------------------------------------------


def test_imagefolder_of_small_images_is_held_in_memory(tmp_path: Path, cache: Path) -> None:
    pair = load_dataset("imagefolder", write_images(tmp_path / "set", [(32, 32)] * 3))
    assert isinstance(pair.train, ImageArrays) and isinstance(pair.test, ImageArrays)
    assert (len(pair.train), pair.num_classes, pair.in_channels, pair.image_size) == (6, 2, 3, 32)
    assert pair.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert isinstance(pair.train.recipe, SmallImages)
    assert (pair.train.recipe.pad, pair.train.recipe.flip) == (4, True)
    pixels = np.asarray(Image.open(tmp_path / "set" / "train" / "dog" / "1.png"))
    assert np.array_equal(pair.train.images[4].permute(1, 2, 0).numpy(), pixels)
    assert len(list(cache.glob("*.npy"))) == 2


def test_cache_on_and_off_return_the_same_samples(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(16, 16)] * 4)
    arrays, files = (load_dataset("imagefolder", root, cache=cache) for cache in ("on", "off"))
    assert isinstance(files.train, ImageFiles)
    for i in range(8):
        assert torch.equal(arrays.train[i][0], files.train[i][0])
        assert arrays.train[i][1] == files.train[i][1]


def test_folders_with_equal_names_sizes_and_times_are_distinguished(tmp_path: Path) -> None:
    """As extracted from an archive without times, with images of fixed sizes."""
    pixels = {}
    for value in (0, 255):
        file = tmp_path / f"{value}" / "cat" / "0.ppm"
        file.parent.mkdir(parents=True)
        file.write_bytes(b"P6 2 2 255\n" + bytes([value] * 12))
        os.utime(file, (1e9, 1e9))
        listing = imagefolder.list_images(tmp_path / f"{value}", ["cat"])
        pixels[value] = imagefolder.fingerprint(listing)
    assert pixels[0] != pixels[255]


def test_fingerprint_changes_with_image_file(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8)])
    before = imagefolder.fingerprint(imagefolder.list_images(root / "train", ["cat", "dog"]))
    Image.new("RGB", (8, 8)).save(root / "train" / "cat" / "0.png")
    after = imagefolder.fingerprint(imagefolder.list_images(root / "train", ["cat", "dog"]))
    assert before != after


def test_imagefolder_of_large_images_uses_imagenet_recipe(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(90, 70), (40, 120)], "jpg")
    (root / "test").rename(root / "val")
    pair = load_dataset("imagefolder", root)
    assert isinstance(pair.train, ImageFiles) and pair.image_size == 224
    assert pair.test[3][0].shape == (3, 224, 224)
    small = load_dataset("imagefolder", root, image_size=48)
    assert isinstance(small.train, ImageFiles)
    views = [small.train.augmented(1, key)[0] for key in (5, 5, 6)]
    assert views[0].shape == (3, 48, 48)
    assert torch.equal(views[0], views[1]) and not torch.equal(views[0], views[2])
    with pytest.raises(UserError, match=r"--cache on .*/train .*--cache auto"):
        load_dataset("imagefolder", root, cache="on")


def test_evaluation_view_of_large_image_is_its_centre(tmp_path: Path) -> None:
    """After scaling by 256/224, the central square of a uniform centre is uniform."""
    root = write_images(tmp_path / "set", [(100, 300)])
    image = Image.new("RGB", (100, 300), "black")
    image.paste((255, 255, 255), (0, 90, 100, 210))
    image.save(root / "test" / "cat" / "0.png")
    view, _ = load_dataset("imagefolder", root, image_size=56).test[0]
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(view, white.view(3, 1, 1).expand(3, 56, 56), atol=1e-4)


def test_imagefolder_reads_nested_folders_and_grey_images(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8)])
    (root / "train" / "cat" / "images").mkdir()
    Image.new("L", (8, 8), 7).save(root / "train" / "cat" / "images" / "x.JPEG")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    pair = load_dataset("imagefolder", root)
    assert len(pair.train) == 3 and held(pair.train).images.shape[1] == 3


def test_cifar10_folders_example_writes_readable_imagefolder(tmp_path: Path) -> None:
    write = runpy.run_path(str(ROOT / "examples" / "cifar10_folders.py"))["write"]
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        pixels = draw.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
        images = [(Image.fromarray(each), i % 2) for i, each in enumerate(pixels)]
        write(images, ["frog", "ship"], tmp_path / "set" / part)
    data = load_dataset("imagefolder", tmp_path / "set")
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (6, 6, 2, 32)


def test_imagefolder_names_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\bimagefolder requires --data-dir\b"):
        load_dataset("imagefolder")
    with pytest.raises(UserError, match=r"--data-dir .*/train\b.*DIR/train/CLASS"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match=rf"--data-dir {tmp_path}: .*\btest nor val\b"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match=r"--data-dir: .*\bimages\b.*/train/CLASS"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "test" / "cow").mkdir()
    (tmp_path / "train" / "cat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(UserError, match=r"--data-dir: .*/test\b.*'cow'.*\btrain\b"):
        load_dataset("imagefolder", tmp_path)


def test_imagefolder_names_unsuitable_files(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8), (8, 9)])
    with pytest.raises(UserError, match=r"cat/1\.png: .*8x9.*8x8"):
        load_dataset("imagefolder", root)
    (root / "train" / "cat" / "1.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"cat/1\.png: .*\breadable\b"):
        load_dataset("imagefolder", root)


# -- the host's cache ---------------------------------------------------------------------------

BUILD_CACHED_ARRAY = Path(__file__).parent / "programs" / "build_cached_array.py"


@pytest.mark.timeout(60)
def test_concurrent_processes_build_cached_array_once(tmp_path: Path) -> None:
    command = [sys.executable, str(BUILD_CACHED_ARRAY), str(tmp_path)]
    both = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait(50) for process in both] == [0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_unusable_cache_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"/file\b.*ALADDIN_MPI_CACHE"):
        assert cached_array("key", lambda: np.ones(2, dtype=np.uint8)).tolist() == [1, 1]


def test_failed_build_leaves_no_cache_files(cache: Path) -> None:
    def build() -> np.ndarray:
        raise UserError("broken image")

    with pytest.raises(UserError, match="broken image"):
        cached_array("key", build)
    assert not list(cache.glob("*key.npy")) and not list(cache.glob("*.tmp*"))


# -- data sets of the user ------------------------------------------------------------------------

FUNCTIONS = "tests.data.programs.dataset_functions"


def test_dataset_function_may_return_two_sets_or_a_pair() -> None:
    both = load_dataset(f"{FUNCTIONS}:both", Path("here"))
    assert (both.num_classes, both.in_channels, both.image_size, len(both.test)) == (3, 2, 5, 3)
    pair = load_dataset(f"{FUNCTIONS}:pair")
    assert isinstance(pair, DatasetPair) and pair.num_classes == 30


def test_load_dataset_rejects_invalid_dataset_function() -> None:
    with pytest.raises(UserError, match=r"--dataset .*:wrong: .*\bDatasetPair\b.*\bint\b"):
        load_dataset(f"{FUNCTIONS}:wrong")
    with pytest.raises(UserError, match=r"--dataset .*:greedy: .*\bdata_dir, path\b"):
        load_dataset(f"{FUNCTIONS}:greedy")
    with pytest.raises(UserError, match=r"--dataset .*:vague: .*\bclasses\b.*\btargets\b"):
        load_dataset(f"{FUNCTIONS}:vague")
