"""float64 models are not rounded in messages, evaluations or checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import ALGORITHMS
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.launch import needs
from tests.run_program import run_program

START, RATE, STEPS = 1 / 7, 1e-3, 5
EXPECTED = START - STEPS * RATE / 3
"""Rounding the gradient, 1/3, to float32 would change it by 2e-11, rounding the model by 7e-9."""
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-14}


def train(workers: int, rate: float = RATE, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """Return the trained weights, and those used by evaluations."""
    model = nn.Linear(3, 2, bias=False, dtype=torch.float64)
    nn.init.constant_(model.weight, START)
    evaluated: list[Tensor] = []

    def evaluate(module: nn.Module) -> dict[str, float]:
        assert isinstance(module, nn.Linear)
        evaluated.append(module.weight.detach().clone())
        return {"weight": module.weight.mean().item()}

    run = DataParallel(
        model,
        evaluate=evaluate,
        batch_size=1,
        lr=rate,
        lr_scaling="none",
        lr_schedule="constant",
        warmup_epochs=0,
        momentum=0,
        weight_decay=0,
        quiet=True,
        **{"samples": STEPS * workers, **settings},
    )
    for _ in run.batches(range(workers)):
        loss = model(torch.ones(1, 3, dtype=torch.float64)).sum() / 3
        loss.backward()
        run.step(loss)
    assert model.weight.dtype == torch.float64
    return model.weight.detach().clone(), evaluated


def simulated(algorithm: str, folder: Path, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    result: dict[int, tuple[Tensor, list[Tensor]]] = {}
    settings = {"wire": "fp32", "overwrite": True, **settings}

    def main(transport: Transport) -> None:
        result[transport.rank] = train(
            2,
            transport=transport,
            algorithm=algorithm,
            run_dir=folder,
            compute_time=0.01,
            **settings,
        )

    servers = 0 if not ALGORITHMS[algorithm].has_servers else 1
    VirtualCluster(servers + 2, Cluster(hosts=2), 0).run(main)
    for weight, _ in result.values():
        assert torch.equal(weight, result[0][0])
    return result[0]


@pytest.mark.parametrize("algorithm", sorted({*ALGORITHMS} - {"aladdin-local"}))
def test_float64_model_is_not_rounded(tmp_path: Path, algorithm: str) -> None:
    weight, evaluated = simulated(algorithm, tmp_path)
    expected = torch.full_like(weight, EXPECTED)
    if algorithm in ("easgd", "eamsgd"):  # the centre follows the workers: it moves by the rate
        twice, _ = simulated(algorithm, tmp_path, rate=2 * RATE)
        expected = (START + twice) / 2
    torch.testing.assert_close(weight, expected, **CLOSE)
    torch.testing.assert_close(evaluated[-1], weight, **CLOSE)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ar-sgd", {"ar_sgd": {"allreduce": "ring"}}),
        ("bsp", {"node_sums": True}),
        ("aladdin", {"checksum": True}),
    ],
)
def test_float64_model_is_not_rounded_with_other_settings(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    weight, _ = simulated(algorithm, tmp_path, **settings)
    torch.testing.assert_close(weight, torch.full_like(weight, EXPECTED), **CLOSE)


@pytest.mark.parametrize("algorithm", ["ar-sgd", "asp"])
def test_float64_values_selected_by_dgc_are_not_rounded(tmp_path: Path, algorithm: str) -> None:
    """Deep gradient compression omits values, and sends the others unrounded."""
    weight, _ = simulated(algorithm, tmp_path, compression="dgc", dgc={"clip": None})
    gradients = (START - weight) / (RATE / 3 / 2)  # each is divided by the number of workers
    torch.testing.assert_close(gradients, gradients.round(), rtol=0, atol=1e-10)
    assert gradients.max() > 0


def test_float64_checkpoint_is_not_rounded(tmp_path: Path) -> None:
    simulated("asp", tmp_path, samples=4)
    weight, _ = simulated("asp", tmp_path, samples=10, resume=tmp_path, overwrite=False)
    torch.testing.assert_close(weight, torch.full_like(weight, EXPECTED), **CLOSE)


def test_float64_model_is_rejected_where_scales_are_float32(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"float64.*aladdin-local.*model\.float\(\)"):
        simulated("aladdin-local", tmp_path)


def test_float64_model_rejects_quantised_default_wire(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\bfloat64\b.*\baladdin-ahead\b.*\bint8\b.*wire"):
        simulated("aladdin-ahead", tmp_path, wire="auto")


@pytest.mark.parametrize(
    ("algorithm", "settings", "option"),
    [
        ("ar-sgd", {"wire": "int4"}, "wire int4"),
        ("diloco", {"compression": "powersgd"}, "compression powersgd"),
    ],
    ids=["int4", "powersgd"],
)
def test_float64_model_rejects_compressed_sums(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], option: str
) -> None:
    with pytest.raises(UserError, match=rf"{option} requires .*float64. Leave the option out"):
        simulated(algorithm, tmp_path, **settings)


PROGRAM = Path(__file__).parent / "programs" / "train_in_float64.py"


@pytest.mark.long
@needs("openmpi")
def test_float64_model_is_not_rounded_over_mpi(tmp_path: Path) -> None:
    run_program(PROGRAM, 2, cwd=tmp_path, timeout=60)
    for algorithm in ("ar-sgd", "bsp"):
        weight = torch.load(tmp_path / f"{algorithm}.pt")
        torch.testing.assert_close(weight, torch.full_like(weight, EXPECTED), **CLOSE)
        saved = torch.load(tmp_path / algorithm / "model.pt")["weight"]
        assert torch.equal(saved, weight)
