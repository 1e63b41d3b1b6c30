"""The sizes of well-known data sets: all that timed computing needs of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from aladdin_mpi.data.datasets import load_dataset
from aladdin_mpi.data.synthetic import parse_synthetic


@dataclass(frozen=True)
class Description:
    """Of a training set of images.

    Args:
        samples: in an epoch.
        classes: outputs of a model.
        channels: of an image.
        size: its height in pixels.
    """

    samples: int
    classes: int
    channels: int
    size: int


KNOWN = {
    "mnist": Description(60_000, 10, 1, 28),
    "fashion-mnist": Description(60_000, 10, 1, 28),
    "cifar10": Description(50_000, 10, 3, 32),
    "cifar100": Description(50_000, 100, 3, 32),
    "imagenet": Description(1_281_167, 1000, 3, 224),
}


def describe_set(
    name: str,
    data_dir: Path | None,
    download: bool,
    image_size: int | None = None,
    corrupt_images: str = "stop",
) -> Description:
    """The sizes of the data set ``name``, which is read only if they are not known.

    Raises:
        UserError: as :func:`~aladdin_mpi.data.datasets.load_dataset`.
    """
    found = _known(name)
    if found is None:
        data = load_dataset(
            name, data_dir, download, image_size, "off", corrupt_images=corrupt_images
        )
        return Description(len(data.train), data.num_classes, data.in_channels, data.image_size)
    return found if image_size is None else replace(found, size=image_size)


def _known(name: str) -> Description | None:
    if name.split(":")[0] == "synthetic":
        shape, classes, count = parse_synthetic(name)
        return Description(count, classes, shape[0], shape[1])
    return KNOWN.get(name)
