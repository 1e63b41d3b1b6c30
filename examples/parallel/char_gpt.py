"""Train a small character-level GPT on Python code from the standard library.

mpirun -np 3 python char_gpt.py
"""

from __future__ import annotations

import argparse
import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from aladdin_mpi import DataParallel

EPOCHS, PARTS = 2, 2


class Text(Dataset):
    """Consecutive pieces of a text, encoded as letter indices."""

    def __init__(self, text: str, letters: str, length: int) -> None:
        number = {letter: i for i, letter in enumerate(letters)}
        self.numbers = torch.tensor([number[letter] for letter in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.numbers[start : start + self.length + 1]


def collate(pieces: list[Tensor]) -> dict[str, Tensor]:
    """Stack pieces into inputs and targets; each target is the next letter."""
    batch = torch.stack(pieces)
    return {"letters": batch[:, :-1], "next": batch[:, 1:]}


class Block(nn.Module):
    """A transformer block: causal self-attention, then a two-layer MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, width) to (N, T, width)."""
        n, t, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A language model with tied input and output embeddings."""

    def __init__(self, letters: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters, bias=False)
        nn.init.normal_(self.letters.weight, std=0.02)
        self.head.weight = self.letters.weight

    def forward(self, letters: Tensor) -> Tensor:
        """Map (N, T) to (N, T, letters)."""
        x = self.letters(letters) + self.places[: letters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross entropy in nats per letter."""
    return functional.cross_entropy(model(batch["letters"]).flatten(0, 1), batch["next"].flatten())


def validate(model: nn.Module, data: Text) -> float:
    """Return the mean cross entropy on held-out text, in nats per letter."""
    model.eval()
    with torch.no_grad():
        losses = [
            loss_of(model, batch).item() for batch in DataLoader(data, 64, collate_fn=collate)
        ]
    model.train()
    return sum(losses) / len(losses)


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Return parameter groups that apply weight decay to matrices only."""
    own = list(model.parameters())
    return [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0},
    ]


def main() -> None:
    """Train, and validate after each epoch."""
    text = inspect.getsource(argparse) + inspect.getsource(inspect)
    letters, cut = "".join(sorted(set(text))), int(0.9 * len(text))
    train_data, test_data = Text(text[:cut], letters, 64), Text(text[cut:], letters, 64)
    torch.manual_seed(0)
    model = GPT(len(letters), 64)
    optimizer = torch.optim.AdamW(groups(model), lr=3e-3, betas=(0.9, 0.95))
    loader = DataLoader(train_data, 8, shuffle=True, collate_fn=collate)
    run = DataParallel(model, optimizer=optimizer, epochs=EPOCHS, accumulate=PARTS, clip=1.0)
    for epoch in run.epochs(loader):
        for batch in epoch:
            loss = loss_of(model, batch) / PARTS
            loss.backward()
            run.step(loss)
        run.print(f"epoch {epoch}: {validate(model, test_data):.3f} nats per letter")
    if run.is_first:
        torch.save(model.state_dict(), "char_gpt.pt")


if __name__ == "__main__":
    main()
