"""A run resumes only with what it was started with, and says what is different."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.errors import UserError
from aladdin_mpi.hooks.checkpoints import MANIFEST
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.commands import checkpoint, checkpoint_part, summary
from tests.loop_lab import DATA, PLAN, flat, loss_of, network
from tests.messages import naming
from tests.quadratic import NO_DELAY

HALF, WHOLE = 48, 96
"""Samples after which the run has ended, and those of the resumed run."""
Make = Callable[[], nn.Module]
Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
IN_OPTIMIZER = ("lr", "lr_scaling", "lr_schedule", "momentum", "warmup_epochs", "weight_decay")


def adam(model: nn.Module, lr: float = 0.01, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, **settings)


def script(
    folder: Path,
    make: Make = network,
    data: TensorDataset = DATA,
    optimizer: Optimizer = adam,
    ranks: int = 2,
    algorithm: str = "ar-sgd",
    **settings: Any,
) -> torch.Tensor:
    """Run a script that starts or resumes the run in ``folder``; return the model."""
    plan = {name: value for name, value in PLAN.items() if name not in IN_OPTIMIZER}
    plan |= {"run_dir": folder, "resume": "auto", "algorithm": algorithm, **settings}

    def rank(transport: Any) -> torch.Tensor:
        model = make()
        run = DataParallel(model, transport=transport, optimizer=optimizer(model), **plan)
        for inputs, labels in run.batches(data):
            loss = loss_of(model, inputs, labels)
            loss.backward()
            run.step(loss)
        return flat(model)

    models: list[Any] = VirtualCluster(ranks, NO_DELAY).run(rank)
    return models[-1]


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("half") / "run"
    script(run_dir, samples=HALF)
    return run_dir


@pytest.fixture
def copy(tmp_path: Path, half: Path) -> Path:
    return Path(shutil.copytree(half, tmp_path / "copy"))


# -- changes that are refused -----------------------------------------------------------------
def frozen() -> nn.Module:
    model = network()
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model


def renamed() -> nn.Module:
    model = nn.Sequential()
    for name, layer in zip("abc", network().children(), strict=True):
        model.add_module(name, layer)
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (
            lambda: nn.Sequential(
                nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 3)
            ),
            ["'2.weight float32 [3, 16]'", "'2.weight float32 [16, 16]'"],
        ),
        (
            lambda: nn.Sequential(nn.Linear(24, 17), nn.ReLU(), nn.Linear(17, 3)),
            ["[16, 24]", "[17, 24]"],
        ),
        (
            lambda: nn.Sequential(
                nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 3), nn.BatchNorm1d(3)
            ),
            ["'absent'", "3.weight"],
        ),
        (renamed, ["'0.weight float32 [16, 24]'", "'a.weight float32 [16, 24]'"]),
        (frozen, ["'0.bias float32 [16]'", "'0.bias float32 [16] frozen'"]),
        (lambda: network().double(), ["float32", "float64"]),
    ],
    ids=["deeper", "wider", "batch norm", "renamed", "frozen", "dtype"],
)
def test_resume_refuses_another_model(half: Path, make: Make, names: list[str]) -> None:
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=naming("resume: the model", *names)):
        script(half, make, samples=WHOLE)
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before


def test_resume_refuses_another_model_with_equally_many_values(tmp_path: Path) -> None:
    """Without a check, the values of one parameter would become those of another."""

    def first() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 3, bias=False), nn.Linear(3, 3))

    def second() -> nn.Module:
        return nn.Sequential(nn.Linear(24, 3), nn.Linear(3, 3, bias=False))

    script(tmp_path / "run", first, samples=HALF)
    with pytest.raises(UserError, match=naming("'1.weight float32 [3, 3]'", "'0.bias float32 [3]")):
        script(tmp_path / "run", second, samples=WHOLE)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"optimizer": lambda model: adam(model, lr=0.03)}, ["optimizer: lr 0.01 and lr 0.03."]),
        (
            {"optimizer": lambda model: adam(model, betas=(0.5, 0.9))},
            ["optimizer: betas (0.9, 0.999) and betas (0.5, 0.9)."],
        ),
        (
            {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.01)},
            ["optimizer: AdamW and SGD"],
        ),
        ({"data": TensorDataset(*DATA[:40])}, ["data.samples: 48 and 40"]),
        ({"algorithm": "local-sgd"}, ["algorithm: ar-sgd and local-sgd"]),
        ({"batch_size": 8}, ["batch-size: 4 and 8"]),
        ({"ranks": 3}, ["ranks: 2 and 3", "allow_resize"]),
        ({"ranks": 1}, ["ranks: 2 and 1", "allow_resize"]),
    ],
    ids=["lr", "betas", "optimizer", "data", "algorithm", "batch size", "more", "fewer"],
)
def test_resume_refuses_changes_and_names_only_them(
    half: Path, changes: dict[str, Any], names: list[str]
) -> None:
    with pytest.raises(UserError, match=naming(*names)) as refused:
        script(half, samples=WHOLE, **changes)
    assert "eps" not in str(refused.value)


# -- changes that are accepted ------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 3])
def test_resume_with_allow_resize_accepts_other_ranks(copy: Path, ranks: int) -> None:
    script(copy, samples=WHOLE, ranks=ranks, allow_resize=True)
    assert summary(copy)["samples"] == WHOLE
    assert summary(copy)["workers"] == ranks


@pytest.mark.parametrize("name", ["moved", "with spaces, ünïcode", "n" * 200])
def test_run_resumes_in_a_moved_folder(
    tmp_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The new path is relative, and the script then changes its current folder."""
    copy.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    script(Path(name), data=Elsewhere(tmp_path), samples=WHOLE)
    assert summary(tmp_path / name)["samples"] == WHOLE


class Elsewhere(TensorDataset):
    """The data, whose use changes the current folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*DATA.tensors)
        self._folder = folder / "elsewhere"
        self._folder.mkdir()

    def __getitem__(self, index: Any) -> Any:
        os.chdir(self._folder)
        return super().__getitem__(index)


# -- checkpoints of other versions ----------------------------------------------------------------
def edit(run_dir: Path, without: Iterable[str] = (), **changes: Any) -> None:
    """Change the manifest, and the digest of the first part."""
    file = checkpoint(run_dir) / MANIFEST
    manifest = {**json.loads(file.read_text()), **changes}
    part = (checkpoint(run_dir) / "rank-0.pt").read_bytes()
    manifest["parts"][0] |= {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
    file.write_text(json.dumps({k: v for k, v in manifest.items() if k not in without}))


def test_checkpoint_of_a_version_without_descriptions_resumes(copy: Path) -> None:
    edit(copy, without=["model", "data", "version"])
    script(copy, samples=WHOLE)
    assert summary(copy)["samples"] == WHOLE


OLD = {"aladdin_mpi": "0.1", "torch": "1.2"}


def test_state_of_another_version_names_both(copy: Path) -> None:
    state = checkpoint_part(copy, 0)
    del state["role"]
    torch.save(state, checkpoint(copy) / "rank-0.pt")
    edit(copy, version=OLD)
    with pytest.raises(UserError, match=naming("aladdin_mpi 0.1, torch 1.2", torch.__version__)):
        script(copy, samples=WHOLE)


def test_file_format_of_another_torch_names_both(copy: Path) -> None:
    (checkpoint(copy) / "rank-0.pt").write_bytes(b"a format of the future")
    edit(copy, version=OLD)
    with pytest.raises(UserError, match=naming("torch 1.2", torch.__version__)):
        script(copy, samples=WHOLE)


def test_refused_optimizer_of_another_version_names_the_versions(copy: Path) -> None:
    """A new version of torch may add a setting to its optimizers."""
    edit(copy, version=OLD, optimizer="AdamW: 4 parameters, lr 0.01; scheduler none")
    with pytest.raises(UserError, match=naming("absent and betas", "torch 1.2")):
        script(copy, samples=WHOLE)
