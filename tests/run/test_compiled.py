"""Models compiled by ``torch.compile``, also with activation checkpointing, train as without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aladdin_mpi import DataParallel
from aladdin_mpi.flat.parts import uncompiled
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.loop_lab import DATA, PLAN, flat, plain
from tests.quadratic import NO_DELAY

LONG = pytest.mark.long


class Network(nn.Module):
    """A network with batch norm, whose second layer may be checkpointed."""

    def __init__(self, is_reentrant: bool | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(24, 8), nn.BatchNorm1d(8)
        self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).relu()
        if self.is_reentrant is None:
            hidden = self.second(hidden).relu()
        else:
            hidden = checkpoint(self.second, hidden, use_reentrant=self.is_reentrant).relu()
        scores: Tensor = self.head(hidden)
        return scores


def train(
    folder: Path, order: str, backend: str = "eager", is_reentrant: bool | None = None
) -> tuple[Tensor, list[Tensor], list[str]]:
    """Train on two workers; return the model, its buffers, and the names in its file.

    Args:
        order: compile "before" or "after" the run is made, then "wrapped" or "in place"; or "not".
        backend: of ``torch.compile``.
        is_reentrant: see :class:`Network`.
    """

    def compiled(model: nn.Module) -> nn.Module:
        if "in place" in order:
            model.compile(backend=backend)
            return model
        wrapped: Any = torch.compile(model, backend=backend)
        return wrapped

    def rank(transport: Any) -> tuple[Tensor, list[Tensor]]:
        model = Network(is_reentrant)
        called = compiled(model) if "before" in order else model
        options = {**PLAN, "samples": 44, "run_dir": folder / order, "algorithm": "ar-sgd"}
        run = DataParallel(called, transport=transport, evaluate=mean_score, **options)
        if "after" in order:
            called = compiled(model)
        for inputs, labels in run.batches(DATA):  # the last batches are shorter
            plain(run, called, inputs, labels)
        return flat(model), [buffer.clone() for buffer in model.buffers()]

    results: list[Any] = VirtualCluster(2, NO_DELAY).run(rank)
    x, buffers = results[0]
    return x, buffers, list(torch.load(folder / order / "model.pt"))


def mean_score(model: nn.Module) -> dict[str, float]:
    assert isinstance(model, Network)
    return {"test_loss": model(DATA.tensors[0]).mean().item()}


@pytest.mark.parametrize(
    ("order", "backend", "is_reentrant"),
    [
        ("before, wrapped", "aot_eager", False),
        pytest.param("after, in place", "eager", True, marks=LONG),
        pytest.param("after, wrapped", "aot_eager", True, marks=LONG),
        pytest.param("before, in place", "aot_eager", None, marks=LONG),
        pytest.param("before, wrapped", "inductor", None, marks=LONG),
    ],
)
def test_compiled_model_equals_original(
    tmp_path: Path, order: str, backend: str, is_reentrant: bool | None
) -> None:
    torch._dynamo.reset()
    expected = train(tmp_path, "not", is_reentrant=None)
    trained = train(tmp_path, order, backend, is_reentrant)
    torch.testing.assert_close(trained[:2], expected[:2], rtol=1e-5, atol=1e-6)
    assert trained[2] == expected[2] == list(Network(None).state_dict())


def test_original_of_a_compiled_module_is_found() -> None:
    model = nn.Linear(2, 2)
    wrapped: Any = torch.compile(model, backend="eager")
    assert uncompiled(wrapped) is uncompiled(model) is model
