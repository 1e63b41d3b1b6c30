"""Workloads for the speed measurements: ResNet-50 and a GPT, each trained on one fixed batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aladdin_mpi.data.models import build_model


class GPT(nn.Module):
    """A GPT-2 with a shared token embedding; 124 million parameters by default.

    Args:
        vocabulary: number of tokens.
        length: number of positions.
        width: size of a token's vector.
        heads: number of attention heads.
        layers: number of blocks.
    """

    def __init__(
        self,
        vocabulary: int = 50304,
        length: int = 1024,
        width: int = 768,
        heads: int = 12,
        layers: int = 12,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        block: Callable[[], nn.Module] = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, T) to logits of the next tokens (N, T, vocabulary)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        logits: Tensor = self.norm(x) @ self.tokens.weight.T
        return logits


@dataclass(frozen=True)
class Workload:
    """A network, the batch that it is trained on and its optimizer.

    Args:
        name: name in the report.
        samples: samples per batch.
        network: creates the network, with random seed 1.
        batch: creates inputs and labels.
        optimizer: "sgd", with momentum, or "adamw".
    """

    name: str
    samples: int
    network: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    optimizer: str

    def build(self, device: torch.device) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        """Return the network and the batch on ``device``, images as channels-last."""
        torch.manual_seed(1)
        module = self.network().to(device)
        inputs, labels = (each.to(device) for each in self.batch())
        if inputs.dim() == 4:
            module = module.to(memory_format=torch.channels_last)
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return module, (inputs, labels)

    def torch_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return torch's fused optimizer, its fastest."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
        return torch.optim.SGD(
            module.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True
        )

    def our_optimizer(self, module: nn.Module) -> dict[str, Any]:
        """Return the arguments of ``DataParallel`` for the same optimizer."""
        if self.optimizer == "adamw":
            return {"optimizer": self.torch_optimizer(module)}
        own = {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
        return {**own, "lr_schedule": "constant", "warmup_epochs": 0}


class Repeated:
    """One batch for every step, as an iterable that is read once per epoch.

    Args:
        batch: inputs and labels.
        steps: number of batches.
    """

    def __init__(self, batch: tuple[Tensor, Tensor], steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter([self._batch] * self._steps)


def loss_of(module: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of a forward pass in bfloat16."""
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = module(inputs)
        return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _images(count: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(classes, (count,))


def _tokens(count: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (count, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


FULL = (
    Workload(
        "ResNet-50",
        128,
        lambda: build_model("resnet50", 1000, 3, 224),
        lambda: _images(128, 224, 1000),
        "sgd",
    ),
    Workload("GPT", 16, GPT, lambda: _tokens(16, 1024, 50304), "adamw"),
)
"""Workloads for a GPU: 224 x 224 pixels and 1,000 classes; sequences of 1,024 tokens."""
SMALL = (
    Workload(
        "ResNet-20",
        4,
        lambda: build_model("resnet20", 10, 3, 32),
        lambda: _images(4, 32, 10),
        "sgd",
    ),
    Workload("small GPT", 2, lambda: GPT(64, 16, 32, 2, 2), lambda: _tokens(2, 16, 64), "adamw"),
)
"""Workloads for a machine without a GPU, to try the programs."""
