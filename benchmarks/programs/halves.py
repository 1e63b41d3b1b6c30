"""Train one phase of a run, for `benchmarks.halves`, which simulates this program.

Arguments: the run folder, the seed, the samples of the whole run, the first and the last sample of
the phase, and whether the rate ``follows`` the whole run's schedule or ``falls`` to zero; the
folder of CIFAR-10, or ``digits``; and the model to start from, if there is one.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aladdin_mpi import DataParallel, load_dataset
from aladdin_mpi.data.datasets import DatasetPair
from aladdin_mpi.data.models import build_model
from benchmarks.learning.part import BATCH

WARM_UP = 8
"""The rate rises during the first eighth of the whole run."""
LR = 0.0125
LINES = 32
"""Lines of training loss in a whole run."""


@lru_cache  # the simulated ranks share it
def load(data: str) -> tuple[DatasetPair, Tensor, Tensor]:
    """Return the data, and the test images and labels as tensors."""
    pair = load_dataset("digits") if data == "digits" else load_dataset("imagefolder", Path(data))
    tests = [pair.test[i] for i in range(len(pair.test))]
    return pair, torch.stack([x for x, _ in tests]), torch.tensor([int(y) for _, y in tests])


def cosine(sample: float, total: int) -> float:
    """Return the factor of the whole run's schedule."""
    rise = total / WARM_UP
    if sample < rise:
        return sample / rise
    return max(0.0, 0.5 * (1 + math.cos(math.pi * (sample - rise) / (total - rise))))


def main(
    run_dir: str,
    seed: int,
    total: int,
    first: int,
    last: int,
    shape: str,
    data: str,
    start: str | None = None,
) -> None:
    """Train; test loss and accuracy are in the metrics."""

    def factor(samples: float) -> float:
        if shape == "follows":
            return cosine(first + samples, total)
        return cosine(first, total) * max(0.0, (last - first - samples) / (last - first))

    def evaluate(model: nn.Module) -> dict[str, float]:
        outputs = torch.cat([model(part) for part in images.split(500)])
        right = (outputs.argmax(1) == labels).float().mean()
        return {
            "test_loss": cross_entropy(outputs, labels).item(),
            "test_accuracy": right.item(),
        }

    torch.manual_seed(seed)
    pair, images, labels = load(data)
    model = build_model("resnet20", pair.num_classes, pair.in_channels, pair.image_size)
    if start is not None:
        model.load_state_dict(torch.load(start, map_location="cpu", weights_only=True))
    run = DataParallel(
        model,
        lr=LR,
        momentum=0.9,
        weight_decay=1e-4,
        schedule=factor,
        samples=last - first,
        seed=seed + 10 * (first > 0),  # other batches than those of the first half
        run_dir=run_dir,
        quiet=True,
        evaluate=evaluate,
        eval_every=1e9,
        log_every=total // LINES,
        batch_size=BATCH,
        channels_last=True,
        bn_batches=40,
    )
    for inputs, targets in run.batches(pair.train):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        run.step(loss)


folder, seed, total, first, last, kind, *rest = sys.argv[1:]
main(folder, int(seed), int(total), int(first), int(last), kind, *rest)
