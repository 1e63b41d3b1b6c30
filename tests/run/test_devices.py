"""Behaviour that depends on a rank's device, with torch's device "meta" in place of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from aladdin_mpi import DataParallel
from aladdin_mpi.codec.base import DenseWire
from aladdin_mpi.codec.dgc import DeepGradientCompression
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import cut
from aladdin_mpi.hooks.checkpoints import _shorten_optimizers
from aladdin_mpi.optimizers.part import OptimizerPart, PartPiece
from aladdin_mpi.run.job import Job
from aladdin_mpi.run.training_data import Delivery
from aladdin_mpi.session.user_optimizer import UserOptimizer
from tests.commands import metrics
from tests.launch import run_ranks

META = torch.device("meta")
PROGRAM = Path(__file__).parent / "programs" / "moving_evaluation.py"


def test_evaluation_may_move_the_model(tmp_path: Path) -> None:
    for moves in ("", "moves"):
        run_ranks(2, [str(PROGRAM), str(tmp_path / f"run{moves}"), moves])
    still, moved = (metrics(tmp_path / name, "eval") for name in ("run", "runmoves"))
    assert len(still) > 2
    losses = [line["test_loss"] for line in still]
    assert losses[-1] < losses[0]
    assert [line["test_loss"] for line in moved] == losses


def test_packed_sequence_is_moved_whole() -> None:
    batch = {"text": pack_sequence([torch.zeros(3), torch.zeros(2)])}
    text = Delivery(META, channels_last=False)(batch)["text"]
    assert text.data.device == META
    assert text.batch_sizes.device.type == "cpu"


def test_optimizer_state_follows_the_parameters() -> None:
    parameter = nn.Parameter(torch.ones(4))
    given = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones(4)
    given.step()
    state = dict(given.state[parameter])
    assert state["exp_avg"].device.type == "cpu"
    like = torch.zeros(4, device=META)
    part = OptimizerPart(given, [PartPiece(0, 0, 4)], like, [state])
    (held,) = part._inner.state.values()
    assert held["exp_avg"].device == held["exp_avg_sq"].device == META


def test_residual_is_restored_on_the_device_of_its_gradients() -> None:
    layout = cut(8, 0, 1.0, 1.0)
    codec = DeepGradientCompression(
        DenseWire(torch.float32, META), layout, [(8,)], lambda samples: 0.5
    )
    codec.load_state_dict({"left": torch.ones(8)})
    assert codec.left is not None
    assert codec.left.device == META


def test_implementation_of_an_optimizer_may_differ_between_ranks() -> None:
    def describe(**how: Any) -> str:
        model = nn.Linear(2, 2)
        access: Any = None
        return UserOptimizer(torch.optim.AdamW(model.parameters(), **how), access).describe()

    assert describe(fused=True) == describe(foreach=True) == describe()
    assert describe(lr=0.5) != describe()
    older = describe().replace("; scheduler", ", foreach None, fused True; scheduler")
    manifest, here = {"optimizer": older}, {"optimizer": describe()}
    _shorten_optimizers(manifest, here)
    assert manifest == here
    manifest, here = {"optimizer": older}, {"optimizer": describe(lr=0.5)}
    _shorten_optimizers(manifest, here)
    assert (manifest["optimizer"], here["optimizer"]) == ("lr 0.001", "lr 0.5")


def test_other_default_device_is_refused() -> None:
    with torch.device("meta"), pytest.raises(UserError, match=r"default device, got meta\. Remove"):
        DataParallel(nn.Linear(2, 2), algorithm="ar-sgd")


def test_server_without_gpu_accepts_the_precision_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("aladdin_mpi.integrations.transformers")

    def arguments(rank: int) -> Any:
        job = Job(rank, [0, 0], 1, shares_process=False, wait=lambda: None)
        monkeypatch.setattr(transformers, "find_job", lambda settings: job)
        return transformers.TrainingArguments(str(tmp_path), bf16=True, tf32=True)

    server = arguments(0)
    assert (server.bf16, server.tf32, server.use_cpu) == (True, True, True)
    with pytest.raises(ValueError, match=r"tf32|bf16"):
        arguments(1)
