"""Train on an endless stream of data: predict the letter that follows eight others.

python stream.py
"""

from __future__ import annotations

import heapq
import inspect
import itertools
import queue
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

BATCHES, SIZE, CONTEXT = 600, 32, 8


class Letters(IterableDataset):
    """Endless pairs of eight letters and the next one, from the source of three modules."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        for module in itertools.cycle((heapq, queue, textwrap)):
            letters = [min(ord(letter), 127) for letter in inspect.getsource(module)]
            for start in range(0, len(letters) - CONTEXT, 3):
                yield torch.tensor(letters[start : start + CONTEXT]), letters[start + CONTEXT]


def main() -> None:
    """Train, and print the loss every 100 batches."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, 16), nn.Flatten(), nn.Linear(16 * CONTEXT, 128), nn.ReLU(),
        nn.Linear(128, 128),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(Letters(), SIZE)
    for number, (context, following) in enumerate(itertools.islice(loader, BATCHES)):
        loss = functional.cross_entropy(model(context), following)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 100 == 0:
            print(f"batch {number}: {loss.item():.3f} nats per letter")


if __name__ == "__main__":
    main()
