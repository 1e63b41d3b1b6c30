"""Train an LSTM on words, with a hidden state that is carried from batch to batch.

python word_language_model.py
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

EPOCHS, COLUMNS, WINDOW, WORDS = 4, 12, 16, 500


class Windows:
    """Successive windows of a text in columns, after the ``state["step"]`` used before."""

    def __init__(self, columns: Tensor, state: dict[str, Any]) -> None:
        self.columns, self.state = columns, state

    def __len__(self) -> int:
        return (len(self.columns) - 1) // WINDOW

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.state["step"] % len(self), len(self)):
            rows = self.columns[number * WINDOW :][: WINDOW + 1]
            yield rows[:-1], rows[1:]


class Model(nn.Module):
    """An LSTM that predicts the next word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 32)
        self.lstm = nn.LSTM(32, 64)
        self.decode = nn.Linear(64, WORDS)

    def forward(self, words: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of the next words, and the hidden state."""
        outputs, carried = self.lstm(self.embed(words), tuple(hidden))
        return self.decode(outputs), torch.stack(carried)

    def loss(self, inputs: Tensor, targets: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the hidden state after the inputs."""
        outputs, hidden = self(inputs, hidden)
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()), hidden


def new_hidden(columns: Tensor) -> Tensor:
    """Return the hidden state at the start of a text."""
    return torch.zeros(2, 1, columns.shape[1], 64)


def numbers_of(*modules: Any) -> list[Tensor]:
    """Return the words of modules' source as numbers, the most frequent first; 0 is unknown."""
    texts = [re.findall(r"\w+|[^\w\s]", inspect.getsource(module)) for module in modules]
    common = Counter(itertools.chain.from_iterable(texts)).most_common(WORDS - 1)
    numbers = {word: number for number, (word, _) in enumerate(common, 1)}
    return [torch.tensor([numbers.get(word, 0) for word in text]) for text in texts]


@torch.no_grad()
def validate(model: Model, words: Tensor) -> float:
    """Return the mean loss."""
    words = words[:, None]
    loss, _ = model.loss(words[:-1], words[1:], new_hidden(words))
    return loss.item()


def main() -> None:
    """Train, and print the loss on another text after each epoch."""
    torch.manual_seed(0)
    train_words, test_words = numbers_of(argparse, textwrap)
    rows = len(train_words) // COLUMNS
    columns = train_words[: rows * COLUMNS].view(COLUMNS, rows).t()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    state: dict[str, Any] = {}
    state.update(step=0, hidden=new_hidden(columns))
    data = Windows(columns, state)
    for inputs, targets in itertools.chain.from_iterable([data] * EPOCHS):
        loss, hidden = model.loss(inputs, targets, state["hidden"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        state.update(step=state["step"] + 1, hidden=hidden.detach())
        if state["step"] % len(data) == 0:
            state.update(hidden=new_hidden(columns))
            epoch = state["step"] // len(data)
            print(f"epoch {epoch}: {validate(model, test_words):.4f} nats per word")


if __name__ == "__main__":
    main()
