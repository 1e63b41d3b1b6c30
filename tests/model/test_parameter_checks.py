"""Modules with invalid parameters are rejected with a clear message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.vectors import check_module
from aladdin_mpi.hooks.variance import draw_places
from tests.commands import refusal, simulate, train
from tests.launch import needs

MODELS = "tests.model.programs.models_without_values"


def linear(weight: Tensor) -> nn.Module:
    module = nn.Linear(4, 2)
    module.weight = nn.Parameter(weight)
    return module


def with_buffer() -> nn.Module:
    module = nn.Linear(4, 2)
    module.register_buffer("mean", torch.empty(3, device="meta"))
    return module


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"\blazy 0\.weight\b"),
        (nn.LazyBatchNorm1d, r"\blazy weight\b"),
        (lambda: nn.Linear(4, 2, device="meta"), r"\bweight on .*\bmeta\b"),
        (with_buffer, r"\bmean on .*\bmeta\b"),
        (lambda: linear(torch.ones(1, 4).expand(2, 4)), r"\bweight\b.*\[0, 1\]"),
        (lambda: linear(torch.ones(5).as_strided((2, 4), (1, 1))), r"\bweight\b.*\[1, 1\]"),
        (lambda: linear(torch.ones(2, 8)[:, ::2]), r"\bweight\b.*\[2, 4\].*\[8, 2\]"),
        (lambda: linear(torch.ones(2, 4).to_sparse()), r"\bweight\b.*\bsparse_coo\b"),
    ],
)
def test_check_module_rejects_untrainable_parameters(
    make: Callable[[], nn.Module], fault: str
) -> None:
    with pytest.raises(UserError, match=f"^model: .*{fault}"):
        check_module(make(), needs_values=True)


def test_check_module_accepts_valid_parameters() -> None:
    check_module(linear(torch.ones(4, 2).t()), needs_values=True)
    channels_last = nn.Conv2d(3, 1, 2).to(memory_format=torch.channels_last)
    check_module(channels_last, needs_values=True)
    check_module(nn.Linear(0, 2), needs_values=True)
    frozen = linear(torch.ones(1, 4).expand(2, 4)).requires_grad_(False)
    check_module(frozen, needs_values=True)
    check_module(nn.Linear(4, 2, device="meta"), needs_values=False)


def test_replica_rejects_incompatible_dtypes_and_empty_parameters() -> None:
    mixed = nn.Linear(4, 2)
    mixed.more = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(
        UserError, match=r"^model: .*float32.*float8_e4m3fn|^model: .*float8_e4m3fn.*float32"
    ):
        Replica(mixed)
    empty = nn.Module()
    empty.values = nn.Parameter(torch.empty(0))
    with pytest.raises(UserError, match=r"^model: .*\bvalues\b.*\bnone\b"):
        Replica(empty)


def test_draw_places_skips_empty_parameters() -> None:
    assert draw_places((0, 3, 0), 0).at.tolist() == [0, 1, 2]


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_simulation_rejects_model_without_values(tmp_path: Path, kind: str) -> None:
    options = ("--model", f"{MODELS}:{kind}", "--workers", 2, "--samples", 64)
    completed = simulate(tmp_path / "run", *options, check=False)
    assert re.search(rf"error: model: .*\b{kind}\b", refusal(completed))


@needs("openmpi")
def test_training_over_mpi_rejects_lazy_model(tmp_path: Path) -> None:
    options = ("--model", f"{MODELS}:lazy", "--samples", 64)
    completed = train(3, tmp_path / "run", *options, check=False)
    assert re.search(r"error: .*model: .*\blazy\b", refusal(completed))
