"""Write CIFAR-10 as folders of images, for ``--dataset imagefolder --data-dir FOLDER``.

python examples/cifar10_folders.py cifar10

torchvision downloads 170 MB into FOLDER-download. Writing 60,000 PNG files takes a minute.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from PIL import Image
from torchvision.datasets import CIFAR10


def write(images: Iterable[tuple[Image.Image, int]], classes: Sequence[str], folder: Path) -> None:
    """Write each image, given with its class index, to ``folder/CLASS/NUMBER.png``."""
    for name in classes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(images):
        image.save(folder / classes[label] / f"{number:05d}.png")


def main(folder: Path) -> None:
    """Download CIFAR-10 and write both splits."""
    for part, train in (("train", True), ("test", False)):
        data = CIFAR10(f"{folder}-download", train=train, download=True)
        write((data[i] for i in range(len(data))), data.classes, folder / part)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("cifar10_folders: expected one folder to write to; see its first lines")
    main(Path(sys.argv[1]))
