"""Averages of the trained model (EMA, SWA), made in the loop by torch or by deep copies."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from tests.run.test_loop_data import DATA, PLAIN, assert_equal, loss_of, model_of

DECAY = 0.8


class Copied:
    """An average of a deep copy, as libraries keep it."""

    def __init__(self, model: nn.Module) -> None:
        self.module = deepcopy(model).requires_grad_(False)

    def update_parameters(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs.detach(), 1 - DECAY)


def averages_of(model: nn.Module) -> list[Any]:
    return [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY)), Copied(model)]


def train(
    folder: Path, algorithm: str, early: bool, averages: bool = True
) -> list[tuple[nn.Module, list[Any]]]:
    """Train on two workers; return each one's model and averages, made before or in the loop."""
    results: list[tuple[nn.Module, list[Any]]] = []
    servers = int(algorithm == "aladdin-ahead")

    def main(transport: Transport) -> None:
        model = model_of()
        kept = averages_of(model) if averages and early else []
        run = DataParallel(
            model, transport=transport, algorithm=algorithm, lr=0.1, momentum=0.9, epochs=2,
            run_dir=folder, quiet=True, compute_time=0.01, **PLAIN,
        )  # fmt: skip
        for number, batch in enumerate(run.batches(DataLoader(DATA, 16, drop_last=True))):
            if averages and not number and not early:
                kept = averages_of(model)
            loss = loss_of(model, batch)
            loss.backward()
            run.step(loss)
            for each in kept:
                each.update_parameters(model)
        if not run.is_server:
            results.append((model, kept))

    VirtualCluster(servers + 2, Cluster(hosts=2), 0).run(main)
    return results


@pytest.mark.parametrize("early", [True, False])
def test_averages_with_ar_sgd_equal_one_process(tmp_path: Path, early: bool) -> None:
    expected = model_of()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    averages = averages_of(expected)
    for batch in 2 * list(DataLoader(DATA, 32, drop_last=True)):
        optimizer.zero_grad()
        loss_of(expected, batch).backward()
        optimizer.step()
        for each in averages:
            each.update_parameters(expected)
    for model, kept in train(tmp_path, "ar-sgd", early):
        assert_equal(model, expected)
        for mine, theirs in zip(kept, averages, strict=True):
            assert_equal(mine.module, theirs.module)


def test_averages_do_not_affect_an_asynchronous_run(tmp_path: Path) -> None:
    """They are plain modules with their own memory."""
    without = train(tmp_path / "without", "aladdin-ahead", early=False, averages=False)
    averaged = train(tmp_path / "with", "aladdin-ahead", early=False)
    for (plain, _), (model, kept) in zip(without, averaged, strict=True):
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
        for each in kept:
            memory = {p.untyped_storage().data_ptr() for p in each.module.parameters()}
            assert len(memory) == len(list(model.parameters()))
            assert memory.isdisjoint(p.untyped_storage().data_ptr() for p in model.parameters())
            held = (vars(part).items() for part in each.module.modules())
            hooks = sum(len(h) for items in held for name, h in items if "_hooks" in name)
            assert not hooks
