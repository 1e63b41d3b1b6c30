"""Modules whose parameters cannot be trained as they are: told in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.flat.vectors import check_module
from aladdin_mpi.run.variance import draw_places
from tests.commands import refusal, simulate, train
from tests.launch import needs

MODELS = """
import torch
from torch import nn
def lazy(*_):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
def meta(*_):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10, device="meta"))
"""


def linear(weight: Tensor) -> nn.Module:
    module = nn.Linear(4, 2)
    module.weight = nn.Parameter(weight)
    return module


def with_buffer() -> nn.Module:
    module = nn.Linear(4, 2)
    module.register_buffer("mean", torch.empty(3, device="meta"))
    return module


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(2)), "the lazy 0.weight"),
        (nn.LazyBatchNorm1d, "the lazy weight"),
        (lambda: nn.Linear(4, 2, device="meta"), "weight on the device meta"),
        (with_buffer, "mean on the device meta"),
        (lambda: linear(torch.ones(1, 4).expand(2, 4)), r"weight, which .* strides \[0, 1\]"),
        (lambda: linear(torch.ones(5).as_strided((2, 4), (1, 1))), r"strides \[1, 1\]"),
        (lambda: linear(torch.ones(2, 8)[:, ::2]), r"shape \[2, 4\] with strides \[8, 2\]"),
        (lambda: linear(torch.ones(2, 4).to_sparse()), "of the layout sparse_coo"),
    ],
)
def test_it_is_refused(make: Callable[[], nn.Module], told: str) -> None:
    with pytest.raises(UserError, match=f"^model: expected .*{told}.*; "):
        check_module(make(), needs_values=True)


def test_what_is_sound_passes() -> None:
    check_module(linear(torch.ones(4, 2).t()), needs_values=True)
    channels_last = nn.Conv2d(3, 1, 2).to(memory_format=torch.channels_last)
    check_module(channels_last, needs_values=True)
    check_module(nn.Linear(0, 2), needs_values=True)
    frozen = linear(torch.ones(1, 4).expand(2, 4)).requires_grad_(False)
    check_module(frozen, needs_values=True)
    check_module(nn.Linear(4, 2, device="meta"), needs_values=False)


def test_dtypes_that_do_not_go_together_and_no_values() -> None:
    mixed = nn.Linear(4, 2)
    mixed.more = nn.Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(UserError, match="expected trainable parameters of dtypes that torch"):
        Replica(mixed)
    empty = nn.Module()
    empty.values = nn.Parameter(torch.empty(0))
    with pytest.raises(UserError, match="expected trainable parameters with values"):
        Replica(empty)


def test_a_parameter_without_values_is_passed_over() -> None:
    assert draw_places((0, 3, 0), 0).at.tolist() == [0, 1, 2]


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    (tmp_path / "unsound.py").write_text(MODELS)
    return tmp_path


@pytest.mark.parametrize("kind", ["lazy", "meta"])
def test_in_virtual_time(modules: Path, kind: str) -> None:
    options = ("--model", f"unsound:{kind}", "--workers", 2, "--samples", 64)
    done = simulate(modules / "run", *options, check=False, modules=modules)
    assert f"{kind}" in refusal(done)


@needs("openmpi")
def test_over_mpi(modules: Path) -> None:
    options = ("--model", "unsound:lazy", "--samples", 64)
    done = train(3, modules / "run", *options, check=False, modules=modules)
    assert "model: expected parameters whose sizes are known" in refusal(done)
