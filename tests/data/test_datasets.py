"""Data sets by name: splits, messages, folders, the host's cache."""

from __future__ import annotations

import gzip
import hashlib
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
from aladdin_mpi.data.builtin_sets import DrawnImages
from aladdin_mpi.data.datasets import DatasetPair, MapDataset, load_dataset
from aladdin_mpi.data.host_cache import cached_array
from aladdin_mpi.data.images import ImageArrays, ImageFiles
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


# -- sets that are always there ---------------------------------------------------------------


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


def test_ranks_of_one_process_share_a_set() -> None:
    assert load_dataset("digits") is load_dataset("digits")


def test_synthetic_sets_have_the_size_that_was_asked_for() -> None:
    pair = load_dataset("synthetic:1x6x8:4:40")
    assert pair.train[0][0].shape == (1, 6, 8)
    assert (len(pair.train), len(pair.test), pair.num_classes) == (40, 8, 4)
    assert not torch.equal(held(pair.train).images[:8], held(pair.test).images[:8])


def test_a_synthetic_set_can_be_learned_from() -> None:
    """The nearest mean of the training images tells the class of test images."""
    pair = load_dataset("synthetic:3x8x8:5:200")
    train, labels = held(pair.train).evaluation_batch(slice(None))
    means = torch.stack([train[labels == c].mean(0) for c in range(5)])
    test, expected = held(pair.test).evaluation_batch(slice(None))
    found = torch.cdist(test.flatten(1), means.flatten(1)).argmin(1)
    assert (found == expected).float().mean() > 0.95


@pytest.mark.parametrize("name", ["synthetic:3x8:2:9", "synthetic:3x8x8:0:9", "synthetic:a"])
def test_wrong_synthetic_names_are_explained(name: str) -> None:
    with pytest.raises(UserError, match="expected synthetic:CxHxW:CLASSES:COUNT"):
        load_dataset(name)


def test_a_synthetic_set_may_be_larger_than_memory() -> None:
    """200 GB: its images are drawn when they are asked for, each time the same."""
    train = held(load_dataset("synthetic:3x224x224:1000:1300000").train)
    numbers = np.array([1_299_999, 7, 7])
    images, labels = train.evaluation_batch(numbers)
    assert images.shape == (3, 3, 224, 224) and labels.tolist() == [999, 7, 7]
    assert torch.equal(images[1], images[2]) and not torch.equal(images[0], images[1])
    assert torch.equal(train.evaluation_batch(numbers[:1])[0][0], images[0])
    assert torch.equal(train[7][0], images[1])


def test_a_small_synthetic_set_is_the_same_in_whatever_order_it_is_drawn() -> None:
    first, second = (DrawnImages((3, 5, 6), 4, 30, split=0) for _ in range(2))
    assert torch.equal(first[torch.tensor([9, 3, 9])], second[:][[9, 3, 9]])
    assert torch.equal(first[:], second[:]) and torch.equal(first[29], second[29])
    assert len(first) == 30 and not torch.equal(first[0], first[4])


def test_images_are_scaled_to_the_size_asked_for() -> None:
    pair = load_dataset("digits", image_size=20)
    assert pair.image_size == 20 and pair.train[0][0].shape == (1, 20, 20)


# -- messages -----------------------------------------------------------------------------------


def test_an_unknown_name_brings_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"unknown data set 'cifar'; did you mean cifar10.*digits"):
        load_dataset("cifar")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_missing_data_say_where_they_were_looked_for(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"--data-dir {tmp_path} .*--download .*http"):
        load_dataset(name, tmp_path)
    with pytest.raises(UserError, match="--data-dir was not given"):
        load_dataset(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"image_size": 0}, "image_size"), ({"cache": "yes"}, "--cache: expected one of auto")],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset("digits", **options)


# -- torchvision's sets -------------------------------------------------------------------------


@pytest.fixture
def tiny_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have torchvision download a tiny MNIST from a server on this machine."""
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
def test_mnist_is_downloaded_when_asked(tmp_path: Path) -> None:
    pair = load_dataset("mnist", tmp_path / "data", download=True)
    assert (len(pair.train), len(pair.test), pair.in_channels, pair.image_size) == (20, 5, 1, 28)
    assert [label for _, label in (pair.test[i] for i in range(5))] == [0, 1, 2, 3, 4]
    again = load_dataset("mnist", tmp_path / "data")
    assert torch.equal(held(again.train).images[:], held(pair.train).images[:])


def test_a_failed_download_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"{tmp_path.as_uri()}/nowhere/"])
    with pytest.raises(UserError, match="--download: cannot download MNIST"):
        load_dataset("mnist", tmp_path, download=True)


# -- folders of images --------------------------------------------------------------------------


def test_a_folder_of_small_images_is_held_in_memory(tmp_path: Path, cache: Path) -> None:
    pair = load_dataset("imagefolder", write_images(tmp_path / "set", [(32, 32)] * 3))
    assert isinstance(pair.train, ImageArrays) and isinstance(pair.test, ImageArrays)
    assert (len(pair.train), pair.num_classes, pair.in_channels, pair.image_size) == (6, 2, 3, 32)
    assert pair.train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert isinstance(pair.train.recipe, SmallImages)
    assert (pair.train.recipe.pad, pair.train.recipe.flip) == (4, True)
    pixels = np.asarray(Image.open(tmp_path / "set" / "train" / "dog" / "1.png"))
    assert np.array_equal(pair.train.images[4].permute(1, 2, 0).numpy(), pixels)
    assert len(list(cache.glob("*.npy"))) == 2


def test_cache_on_and_off_give_the_same_samples(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(16, 16)] * 4)
    arrays, files = (load_dataset("imagefolder", root, cache=cache) for cache in ("on", "off"))
    assert isinstance(files.train, ImageFiles)
    for i in range(8):
        assert torch.equal(arrays.train[i][0], files.train[i][0])
        assert arrays.train[i][1] == files.train[i][1]


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8)])
    before = imagefolder.fingerprint(imagefolder.list_images(root / "train", ["cat", "dog"]))
    Image.new("RGB", (8, 8)).save(root / "train" / "cat" / "0.png")
    after = imagefolder.fingerprint(imagefolder.list_images(root / "train", ["cat", "dog"]))
    assert before != after


def test_a_folder_of_large_images_gets_imagenets_recipe(tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"--cache on: .*differ in size"):
        load_dataset("imagefolder", root, cache="on")


def test_the_evaluation_view_of_a_large_image_is_its_centre(tmp_path: Path) -> None:
    """Scaled by 256/224 the central square of a one-coloured middle stays one-coloured."""
    root = write_images(tmp_path / "set", [(100, 300)])
    image = Image.new("RGB", (100, 300), "black")
    image.paste((255, 255, 255), (0, 90, 100, 210))
    image.save(root / "test" / "cat" / "0.png")
    view, _ = load_dataset("imagefolder", root, image_size=56).test[0]
    white = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(view, white.view(3, 1, 1).expand(3, 56, 56), atol=1e-4)


def test_nested_folders_and_grey_images_are_read(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8)])
    (root / "train" / "cat" / "images").mkdir()
    Image.new("L", (8, 8), 7).save(root / "train" / "cat" / "images" / "x.JPEG")
    (root / "train" / "cat" / "notes.txt").write_text("no image")
    pair = load_dataset("imagefolder", root)
    assert len(pair.train) == 3 and held(pair.train).images.shape[1] == 3


def test_the_example_writes_what_imagefolder_reads(tmp_path: Path) -> None:
    write = runpy.run_path(str(ROOT / "examples" / "cifar10_folders.py"))["write"]
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        pixels = draw.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
        images = [(Image.fromarray(each), i % 2) for i, each in enumerate(pixels)]
        write(images, ["frog", "ship"], tmp_path / "set" / part)
    data = load_dataset("imagefolder", tmp_path / "set")
    assert (len(data.train), len(data.test), data.num_classes, data.image_size) == (6, 6, 2, 32)


def test_missing_parts_of_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="imagefolder needs it"):
        load_dataset("imagefolder")
    with pytest.raises(UserError, match=r"no folder .*train; expected DIR/train/CLASS"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(UserError, match="neither a folder test nor val"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match=r"no images in .*train"):
        load_dataset("imagefolder", tmp_path)
    (tmp_path / "test" / "cow").mkdir()
    (tmp_path / "train" / "cat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "cat" / "0.png")
    with pytest.raises(UserError, match="class 'cow' that is not in train"):
        load_dataset("imagefolder", tmp_path)


def test_unfit_files_are_named(tmp_path: Path) -> None:
    root = write_images(tmp_path / "set", [(8, 8), (8, 9)])
    with pytest.raises(UserError, match=r"cat/1.png: is 8x9 pixels, but .* are 8x8"):
        load_dataset("imagefolder", root)
    (root / "train" / "cat" / "1.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"cat/1.png: not a readable image"):
        load_dataset("imagefolder", root)


# -- the host's cache ---------------------------------------------------------------------------

TWO_AT_ONCE = """
import sys, time
from pathlib import Path
import numpy as np
from aladdin_mpi.data.host_cache import cached_array
folder, me = Path(sys.argv[1]), sys.argv[2]

def build():
    while len(list(folder.glob("ready-*"))) < 2:
        time.sleep(0.05)
    time.sleep(0.3)  # the other waits for the lock by now
    (folder / f"built-{me}").touch()
    return np.arange(5, dtype=np.uint8)

(folder / f"ready-{me}").touch()
assert cached_array("key", build).tolist() == [0, 1, 2, 3, 4]
"""


@pytest.mark.timeout(60)
def test_of_two_processes_one_decodes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TWO_AT_ONCE, str(tmp_path)]
    both = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait(50) for process in both] == [0, 0]
    assert len(list(tmp_path.glob("built-*"))) == 1


def test_a_cache_that_cannot_be_used_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ALADDIN_MPI_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot use the cache .* Set ALADDIN_MPI_CACHE"):
        assert cached_array("key", lambda: np.ones(2, dtype=np.uint8)).tolist() == [1, 1]


def test_a_failed_decoding_leaves_nothing_behind(cache: Path) -> None:
    def build() -> np.ndarray:
        raise UserError("broken image")

    with pytest.raises(UserError, match="broken image"):
        cached_array("key", build)
    assert not list(cache.glob("*key.npy")) and not list(cache.glob("*.tmp*"))


# -- the user's own -----------------------------------------------------------------------------

USERS = """
import torch
from torch.utils.data import TensorDataset
from aladdin_mpi.data.datasets import DatasetPair

def split(count):
    return TensorDataset(torch.zeros(count, 2, 5, 5), torch.arange(count) % 3)

def both(data_dir):
    assert data_dir.name == "here"
    return split(9), split(3)

def pair():
    return DatasetPair(split(9), split(3), 30, 2, 5, "mine")

def vague():
    return [(1.0, 2)], [(1.0, 2)]

def wrong():
    return 5

def greedy(data_dir, /, path):
    return split(9), split(3)
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_sets.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "users_sets"


def test_a_users_function_may_return_two_sets_or_a_pair(user_module: str) -> None:
    both = load_dataset(f"{user_module}:both", Path("here"))
    assert (both.num_classes, both.in_channels, both.image_size, len(both.test)) == (3, 2, 5, 3)
    pair = load_dataset(f"{user_module}:pair")
    assert isinstance(pair, DatasetPair) and pair.num_classes == 30


def test_wrong_user_sets_are_named(user_module: str) -> None:
    with pytest.raises(UserError, match=r"must return a DatasetPair .* returned int"):
        load_dataset(f"{user_module}:wrong")
    with pytest.raises(UserError, match=r"--dataset .*:greedy: .* needs data_dir, path; give"):
        load_dataset(f"{user_module}:greedy")
    with pytest.raises(UserError, match="cannot tell the number of classes"):
        load_dataset(f"{user_module}:vague")
