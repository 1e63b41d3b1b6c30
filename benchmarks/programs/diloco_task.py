"""The task of `benchmarks.torchft_diloco`, for both libraries: a model, its data, and records.

It imports nothing but torch, because the peer's environment may lack everything else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

LAYERS = 4
"""Hidden layers of equal size; a fragment has a whole number of them."""
INPUTS, CLASSES, HIDDEN = 64, 16, 32
HELD_OUT = 4096
INTERFACE = "eth0"
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9


@dataclass(frozen=True)
class Plan:
    """Settings of a run, the same for both libraries.

    Attributes:
        width: units of a hidden layer.
        batch: samples of a worker's step.
        rate: learning rate of the inner AdamW.
        steps: inner steps in which every fragment is synchronised once.
        rounds: how many times these steps are measured; they are made once before and once after.
        fragments: 1, 2 or 4.
        overlap: inner steps during which a fragment is summed.
        blend: weight of a worker's own fragment when the global one is applied.
    """

    width: int
    batch: int
    rate: float
    steps: int
    rounds: int
    fragments: int
    overlap: int
    blend: float

    @property
    def total(self) -> int:
        """Steps of a worker."""
        return self.steps * (self.rounds + 2)

    def to_json(self) -> str:
        """Return a command-line argument for :meth:`from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of a command-line argument."""
        return Plan(**json.loads(text))


def make_model(plan: Plan) -> nn.Sequential:
    """Return a classifier of ``LAYERS`` parts, the same on every worker."""
    torch.manual_seed(0)
    width = plan.width
    parts = [
        nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())
        for _ in range(LAYERS)
    ]
    parts[0].insert(0, nn.Linear(INPUTS, width))
    parts[-1].append(nn.Linear(width, CLASSES))
    return nn.Sequential(*parts)


def fragments_of(model: nn.Sequential, plan: Plan) -> list[nn.Module]:
    """Return the plan's fragments of a model: consecutive layers, which share its parameters."""
    size = LAYERS // plan.fragments
    return [model[first : first + size] for first in range(0, LAYERS, size)]


def make_inner(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """Return the optimizer of a worker's own steps."""
    return torch.optim.AdamW(model.parameters(), lr=plan.rate)


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch in nats."""
    return cross_entropy(model(batch[0]), batch[1])


def draw(seed: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return normal inputs, and as labels the largest outputs of a fixed random network."""
    teacher = torch.Generator().manual_seed(1)
    hidden = torch.randn(INPUTS, HIDDEN, generator=teacher)
    last = torch.randn(HIDDEN, CLASSES, generator=teacher)
    inputs = torch.randn(samples, INPUTS, generator=torch.Generator().manual_seed(seed))
    return inputs, ((inputs @ hidden).relu() @ last).argmax(1)


def batches(rank: int, plan: Plan) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a worker's batches, which no other worker has."""
    for step in range(plan.total):
        yield draw(1_000_000 * (rank + 1) + step, plan.batch)


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Return the loss on samples that no worker has seen."""
    return loss_of(model, draw(0, HELD_OUT)).item()


def bytes_sent(counters: str, interface: str = INTERFACE) -> int:
    """Return the bytes that an interface has sent, from the text of /proc/net/dev."""
    for line in counters.splitlines():
        name, _, values = line.partition(":")
        if name.strip() == interface:
            return int(values.split()[8])
    raise ValueError(f"/proc/net/dev has no interface {interface!r}")


class Record:
    """A worker's time, also that of its threads, and its host's bytes in the measured steps."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._step = plan, 0
        self._edges: list[tuple[float, float, int]] = []

    def step_done(self) -> None:
        """Count a step; read clocks and the counter before and after the measured ones."""
        self._step += 1
        if self._step in (self._plan.steps, self._plan.total - self._plan.steps):
            sent = bytes_sent(Path("/proc/net/dev").read_text(encoding="ascii"))
            self._edges.append((time.perf_counter(), time.process_time(), sent))

    def save(self, folder: Path, rank: int, loss: float) -> None:
        """Write ``rank.json``: seconds, CPU seconds, bytes sent, and the final model's loss."""
        seconds, cpu, sent = (after - before for before, after in zip(*self._edges, strict=True))
        figures = {"seconds": seconds, "cpu": cpu, "sent": sent, "loss": loss}
        (folder / f"{rank}.json").write_text(json.dumps(figures), encoding="ascii")
