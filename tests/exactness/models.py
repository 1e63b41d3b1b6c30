"""Small models and data sets for the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from tests.exactness.row import SAMPLES, Batch

INPUTS, OUTPUTS, CLASSES, VOCABULARY, LENGTH = 5, 3, 4, 11, 6


class Samples(Dataset[Any]):
    """Samples (input, target, number).

    Args:
        inputs: one for each sample.
        targets: one for each sample.
    """

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index], index


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(17)


def vectors(count: int = SAMPLES, dtype: torch.dtype = torch.float32) -> Samples:
    """Return vectors, and numbers to predict."""
    generator = _generator()
    inputs = torch.randn(count, INPUTS, generator=generator)
    return Samples(inputs.to(dtype), torch.randn(count, OUTPUTS, generator=generator).to(dtype))


def labelled(count: int = SAMPLES) -> Samples:
    """Return vectors and classes."""
    generator = _generator()
    inputs = torch.randn(count, INPUTS, generator=generator)
    return Samples(inputs, torch.randint(CLASSES, (count,), generator=generator))


def images() -> Samples:
    """Return images of 3 x 6 x 6, and numbers to predict."""
    generator = _generator()
    inputs = torch.randn(SAMPLES, 3, 6, 6, generator=generator)
    return Samples(inputs, torch.randn(SAMPLES, OUTPUTS, generator=generator))


def texts() -> Samples:
    """Return tokens, and the token that follows each."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=_generator())
    return Samples(tokens[:, :-1], tokens[:, 1:])


def sequences() -> Samples:
    """Return sequences of vectors, and numbers to predict."""
    generator = _generator()
    inputs = torch.randn(SAMPLES, LENGTH, INPUTS, generator=generator)
    return Samples(inputs, torch.randn(SAMPLES, OUTPUTS, generator=generator))


def squares(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean squared error."""
    return functional.mse_loss(model(batch[0]), batch[1])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross entropy of the classes of vectors or tokens."""
    return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def mlp(outputs: int = OUTPUTS, activation: type[nn.Module] = nn.Tanh) -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 6), activation(), nn.Linear(6, outputs))


def classifier() -> nn.Sequential:
    return mlp(CLASSES)


def convolution(norm: Callable[[], nn.Module] = nn.Identity) -> nn.Sequential:
    """Return a network of two convolutions with a norm of four channels between them."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        norm(),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3),
        nn.Flatten(),
        nn.Linear(16, OUTPUTS),
    )


def batch_norm() -> nn.Module:
    return convolution(lambda: nn.BatchNorm2d(4))


def fixed_batch_norm() -> nn.Module:
    """Return batch norm that uses its running statistics, as for fine-tuning a backbone."""
    model = batch_norm()
    model.eval()
    return model


def language_model(**embedding: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, 4, **embedding), nn.Tanh(), nn.Linear(4, VOCABULARY)
    )


def tied() -> nn.Sequential:
    model = language_model()
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Sequential:
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Recurrent(nn.Module):
    """A recurrent network with a linear layer on its last output.

    Args:
        kind: class such as ``nn.LSTM``.
        options: its arguments.
    """

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.body = kind(INPUTS, 4, batch_first=True, **options)
        self.head = nn.LazyLinear(OUTPUTS)
        self(torch.zeros(1, LENGTH, INPUTS))  # its size

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs)[0][:, -1])
        return outputs


class Attention(nn.Module):
    """Self-attention, or a layer of a transformer, over embedded tokens."""

    def __init__(self, is_layer: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, 8))
        self.body: nn.Module = (
            nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, activation="gelu")
            if is_layer
            else nn.MultiheadAttention(8, 2, batch_first=True)
        )
        self.is_layer = is_layer
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        if self.is_layer:
            x = self.body(x, src_mask=mask)
        else:
            x = x + self.body(x, x, x, attn_mask=mask, need_weights=False)[0]
        outputs: Tensor = self.head(x)
        return outputs


class Lists(nn.Module):
    """Parameters in lists and dicts, one of them a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([0.4 * torch.randn(INPUTS, INPUTS) for _ in range(2)])
        self.ends = nn.ParameterDict({"weight": 0.4 * torch.randn(INPUTS, OUTPUTS)})
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: Tensor) -> Tensor:
        x = inputs
        for layer in self.layers:
            x = torch.tanh(x @ layer)
        outputs: Tensor = self.scale * (x @ self.ends["weight"])
        return outputs


class Strided(nn.Module):
    """Parameters with permuted memory layout, one of them without values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.4 * torch.randn(INPUTS, OUTPUTS).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.tanh(inputs @ self.weight.t())


class Dtypes(nn.Module):
    """Two layers of different dtypes."""

    def __init__(self, first: torch.dtype, second: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 6).to(first)
        self.second = nn.Linear(6, OUTPUTS).to(second)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        outputs: Tensor = self.second(hidden.to(self.second.weight.dtype))
        return outputs


class Branches(nn.Module):
    """A layer that is used only by batches whose first sample has a large input.

    Args:
        above: bound that the first value has to exceed.
    """

    def __init__(self, above: float) -> None:
        super().__init__()
        self.body = nn.Linear(INPUTS, OUTPUTS)
        self.extra = nn.Linear(INPUTS, OUTPUTS)
        self.above = above

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.body(inputs)
        if inputs[0, 0] > self.above:
            outputs = outputs + self.extra(inputs)
        return outputs


class Line(nn.Module):
    """A linear function, for losses whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(INPUTS, OUTPUTS))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs @ self.weight


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(INPUTS, 6), nn.Tanh(), nn.Linear(6, OUTPUTS))
        self.judge = nn.Sequential(nn.Linear(OUTPUTS, 6), nn.Tanh(), nn.Linear(6, 1))
