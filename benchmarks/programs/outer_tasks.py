"""The learning tasks of `benchmarks.outer`: models, data, optimizers and held-out losses."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

from aladdin_mpi.data.datasets import DatasetPair, load_dataset
from aladdin_mpi.data.models import build_model
from benchmarks.outer_cells import BATCH
from benchmarks.programs.gpt import example

LENGTH = 64
"""Characters of a training window."""
PRINTABLE, OTHER, NEWLINE = range(32, 127), 95, 96
"""Characters that are encoded as themselves, and the codes of the others."""
LETTERS, LAYERS = 97, 2
PIECE, HELD_OUT = 4096, 20
"""One of so many pieces of the text, of this many characters, is held out."""
WINDOWS, PICTURES = 384, 1000
"""Held-out windows of text, and pictures, on which every evaluation is made."""
SIDE = 16
"""Height and width of pictures; with 32, a run takes four times as long."""
PART = 128
WARMUP, FLOOR = 0.05, 0.02
"""Share of a run with a rising rate, and the last rate relative to the peak."""
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
"""Folders of the standard library without text, or missing on some machines."""


@dataclass(frozen=True)
class Task:
    """A model with data.

    Attributes:
        model: a function that makes the model.
        data: the training set.
        optimizer: makes the optimizer for a model and a peak rate; None: the built-in SGD.
        loss: returns the loss of a batch.
        evaluate: returns a model's figures on the held-out samples.
        settings: further arguments of `DataParallel`.
    """

    model: Callable[[], nn.Module]
    data: Any
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] | None
    loss: Callable[[nn.Module, Any], Tensor]
    evaluate: Callable[[nn.Module], dict[str, float]]
    settings: dict[str, Any]


class Windows(Dataset[Tensor]):
    """Consecutive windows of a text of N characters: inputs and, one later, targets."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // LENGTH

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * LENGTH : (index + 1) * LENGTH + 1].long()


@lru_cache
def sources() -> tuple[Tensor, Tensor]:
    """Return the standard library's sources, encoded in bytes, to train on and held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if SKIPPED.isdisjoint(path.relative_to(root).parts)
    ]
    code = torch.full((256,), OTHER, dtype=torch.uint8)
    code[list(PRINTABLE)] = torch.arange(len(PRINTABLE), dtype=torch.uint8)
    code[ord("\n")] = NEWLINE
    text = bytearray(b"".join(path.read_bytes() for path in files))
    pieces = code[torch.frombuffer(text, dtype=torch.uint8).long()].split(PIECE)
    train = [piece for turn, piece in enumerate(pieces) if turn % HELD_OUT]
    return torch.cat(train), torch.cat(pieces[::HELD_OUT])


def initialise(model: nn.Module) -> nn.Module:
    """Draw weights that suit short runs: fan-in scaling, less for the ends of residual branches.

    With the example's weights, a run of 200 steps ends 0.2 nats higher.
    """
    for name, values in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(values)
        elif name.endswith(("qkv.weight", "mlp.0.weight")):
            nn.init.normal_(values, std=values.shape[1] ** -0.5)
        elif name.endswith(("out.weight", "mlp.2.weight")):
            nn.init.normal_(values, std=(2 * LAYERS * values.shape[1]) ** -0.5)
    nn.init.normal_(model.get_parameter("letters.weight"), std=0.05)  # also that of the head
    return model


def _adamw(model: nn.Module, peak: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.8, 0.99), weight_decay=0.05)


def text() -> Task:
    """Return a GPT of 110,000 parameters on the characters of Python's standard library."""
    gpt = example()
    train, test = sources()
    starts = torch.linspace(0, len(test) - LENGTH - 2, WINDOWS).long()
    held_out = test[starts[:, None] + torch.arange(LENGTH + 1)].long()

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def evaluate(model: nn.Module) -> dict[str, float]:
        losses = [loss(model, part).item() for part in held_out.split(PART)]
        return {"test_loss": sum(losses) / len(losses)}

    settings = {"batch_size": BATCH["gpt"], "clip": 1.0}
    return Task(
        lambda: initialise(gpt.GPT(LETTERS, LENGTH, layers=LAYERS)),
        Windows(train),
        _adamw,
        loss,
        evaluate,
        settings,
    )


@lru_cache
def _pictures(folder: Path) -> tuple[DatasetPair, Tensor, Tensor]:
    """Return CIFAR-10 and its held-out pictures and labels."""
    pair = load_dataset("imagefolder", folder, image_size=SIDE)
    step = max(1, len(pair.test) // PICTURES)
    chosen = [pair.test[index] for index in range(0, len(pair.test), step)]
    return pair, torch.stack([x for x, _ in chosen]), torch.tensor([int(y) for _, y in chosen])


def pictures(folder: Path) -> Task:
    """Return ResNet-20 on CIFAR-10 at half its resolution, in a folder of images."""
    pair, inputs, labels = _pictures(folder)

    def model() -> nn.Module:
        return build_model("resnet20", pair.num_classes, pair.in_channels, pair.image_size)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(model: nn.Module) -> dict[str, float]:
        outputs = torch.cat([model(part) for part in inputs.split(PART)])
        right = (outputs.argmax(1) == labels).float().mean().item()
        return {"test_loss": cross_entropy(outputs, labels).item(), "test_accuracy": right}

    settings = {
        "batch_size": BATCH["resnet20"],
        "nesterov": True,
        "weight_decay": 1e-4,
        "bn_batches": 20,
    }
    return Task(model, pair.train, None, loss, evaluate, settings)


def timed(name: str) -> Task:
    """Return a task with the parameters of ``name``, all of whose gradients are zero."""

    def model() -> nn.Module:
        if name == "gpt":
            return example().GPT(LETTERS, LENGTH, layers=LAYERS)
        return build_model("resnet20", 10, 3, SIDE)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return sum((each.sum() * 0.0 for each in model.parameters()), torch.zeros(()))

    settings: dict[str, Any] = {"batch_size": BATCH[name], "bn_batches": 0}
    settings |= {"clip": 1.0} if name == "gpt" else {"nesterov": True}
    data = TensorDataset(torch.zeros(100_000))
    return Task(model, data, _adamw if name == "gpt" else None, loss, _nothing, settings)


def _nothing(model: nn.Module) -> dict[str, float]:
    return {"test_loss": 0.0}


def task(name: str, folder: Path | None) -> Task:
    """Return the task ``gpt``, or ``resnet20`` with its data in ``folder``, or either ``timed``."""
    if name.endswith(" timed"):
        return timed(name.removesuffix(" timed"))
    if name == "gpt":
        return text()
    assert folder is not None
    return pictures(folder)


def schedule(total: int) -> Callable[[int], float]:
    """Return the rate relative to its peak after a number of the run's ``total`` samples."""

    def factor(samples: int) -> float:
        done = samples / total
        if done < WARMUP:
            return done / WARMUP
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARMUP) / (1 - WARMUP))))
        return FLOOR + (1 - FLOOR) * cosine

    return factor


RECEIVED: dict[int, int] = {}
"""Bytes that each worker of this process has received during its training, by rank."""
