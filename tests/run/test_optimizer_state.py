"""A script saves its optimizer during and after a run as with plain torch."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
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
from tests.messages import naming

STEPS, MORE = 3, 2
INPUTS = torch.randn(STEPS + MORE, 4, 2, 5, 5, generator=torch.Generator().manual_seed(3))

Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda model: torch.optim.Adam(groups(model), amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(groups(model), momentum=0.9),
    "plain sgd": lambda model: torch.optim.SGD(groups(model)),
    "adagrad": lambda model: torch.optim.Adagrad(groups(model)),
    "adafactor": lambda model: torch.optim.Adafactor(groups(model)),
}


def network() -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))
    model[3].bias.requires_grad_(False)
    return model.to(memory_format=torch.channels_last)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups in another order than the model's, with a frozen parameter."""
    own = list(model.parameters())
    return [{"params": own[::-2], "lr": 0.01}, {"params": own[::2], "lr": 0.02}]


def backward(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(INPUTS[step]).square().mean()
    loss.backward()
    return loss


def plain(make: Make, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = make(model)
    step_plainly(model, optimizer, range(steps))
    return model, optimizer


def step_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


Script = Callable[[DataParallel, nn.Module, torch.optim.Optimizer], None]


def simulated(script: Script, make: Make, folder: Path, algorithm: str) -> None:
    """Run the script on one worker, and on a server if the algorithm has any."""

    def main(transport: Transport) -> None:
        model = network()
        optimizer = make(model)
        run = DataParallel(
            model,
            optimizer=optimizer,
            algorithm=algorithm,
            transport=transport,
            batch_size=1,
            steps=STEPS,
            compute_time=0.01,
            run_dir=folder,
            bucket_mb=0.0001,
            wire="fp32",
            quiet=True,
        )
        script(run, model, optimizer)

    servers = 0 if not ALGORITHMS[algorithm].has_servers else 1
    VirtualCluster(servers + 1, Cluster(hosts=2), 0).run(main)


def assert_equal_states(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert one["state"].keys() == other["state"].keys()
    for index, state in one["state"].items():
        assert state.keys() == other["state"][index].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, other["state"][index][name])


@pytest.mark.parametrize(
    ("algorithm", "name"),
    [*(("ar-sgd", name) for name in OPTIMIZERS), ("asp", "adam"), ("sgp", "adam")],
)
def test_optimizer_state_continues_in_plain_torch(
    tmp_path: Path, algorithm: str, name: str
) -> None:
    make = OPTIMIZERS[name]
    saved: list[tuple[Any, Any]] = []
    trained: list[tuple[nn.Module, torch.optim.Optimizer]] = []

    def script(run: DataParallel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(model, step))
            saved.append(deepcopy((model.state_dict(), optimizer.state_dict())))
        if not run.is_server:
            trained.append((model, optimizer))

    simulated(script, make, tmp_path, algorithm)
    _, reference = plain(make, 1)
    assert_equal_states(saved[0][1], reference.state_dict())
    expected, reference = plain(make, STEPS)
    ((model, optimizer),) = trained
    assert_equal_states(optimizer.state_dict(), reference.state_dict())

    resumed = network()
    resumed.load_state_dict(saved[-1][0])
    continued = make(resumed)
    continued.load_state_dict(saved[-1][1])
    for each in ((expected, reference), (resumed, continued), (model, optimizer)):
        step_plainly(*each, range(STEPS, STEPS + MORE))
    for other in (resumed, model):
        for a, b in zip(expected.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)


def test_several_optimizers_have_separate_states(tmp_path: Path) -> None:
    """Each optimizer has the state of its parameters."""

    model, other = network(), network()
    both = [
        [torch.optim.Adam(groups(each)[at : at + 1]) for at in range(2)] for each in (model, other)
    ]

    def main(transport: Transport) -> None:
        run = DataParallel(
            model,
            optimizer=both[0],
            transport=transport,
            batch_size=1,
            steps=STEPS,
            algorithm="ar-sgd",
            compute_time=0.01,
            run_dir=tmp_path,
            quiet=True,
        )
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(model, step))
            other.zero_grad()
            backward(other, step)
            for mine, reference in zip(*both, strict=True):
                reference.step()
                assert_equal_states(mine.state_dict(), reference.state_dict())

    VirtualCluster(1, Cluster(hosts=1), 0).run(main)


def test_optimizer_state_held_by_servers_is_refused_on_workers(tmp_path: Path) -> None:
    """The server, which has the whole model, has the state."""
    states = []

    def script(run: DataParallel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(model, step))
            with pytest.raises(UserError, match=naming("optimizer.state_dict():", "resume=")):
                optimizer.state_dict()
        if run.is_server:
            states.append(optimizer.state_dict())
        else:
            with pytest.raises(
                UserError, match=naming("optimizer.state_dict():", "Adam", "other ranks")
            ):
                optimizer.state_dict()

    simulated(script, OPTIMIZERS["adam"], tmp_path, "bsp")
    assert_equal_states(states[0], plain(OPTIMIZERS["adam"], STEPS)[1].state_dict())


def test_optimizer_state_after_a_server_run_is_that_of_the_next_run(tmp_path: Path) -> None:
    make = OPTIMIZERS["adam"]
    given: list[torch.optim.Optimizer] = []

    def on_server(run: DataParallel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(model, step))
        if not run.is_server:
            given.append(optimizer)

    def on_worker(run: DataParallel, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, _ in enumerate(run.batches(range(1))):
            run.step(backward(model, step))

    simulated(on_server, make, tmp_path / "first", "bsp")
    (optimizer,) = given
    with pytest.raises(UserError, match=naming("optimizer.state_dict():", "Adam", "other ranks")):
        optimizer.state_dict()

    def reuse(model: nn.Module) -> torch.optim.Optimizer:
        for mine, others in zip(optimizer.param_groups, groups(model), strict=True):
            mine["params"] = others["params"]
        return optimizer

    simulated(on_worker, reuse, tmp_path / "second", "ar-sgd")
    assert_equal_states(optimizer.state_dict(), plain(make, STEPS)[1].state_dict())


def test_optimizer_state_on_some_workers_only_is_refused(tmp_path: Path) -> None:
    _, trained = plain(OPTIMIZERS["adam"], 1)

    def main(transport: Transport) -> None:
        model = network()
        optimizer = OPTIMIZERS["adam"](model)
        if transport.rank == 0:
            optimizer.load_state_dict(trained.state_dict())
        run = DataParallel(
            model,
            optimizer=optimizer,
            algorithm="ar-sgd",
            transport=transport,
            batch_size=1,
            steps=STEPS,
            compute_time=0.01,
            run_dir=tmp_path,
            quiet=True,
        )
        for step, _ in enumerate(run.batches(range(2))):
            run.step(backward(model, step))

    with pytest.raises(UserError, match=naming("optimizer.state:", "3 parameters", "0 parameters")):
        VirtualCluster(2, Cluster(hosts=2), 0).run(main)


def test_optimizer_state_is_loaded_before_but_not_during_a_run(tmp_path: Path) -> None:
    make = OPTIMIZERS["adam"]
    model, before = plain(make, 1)
    before_run = deepcopy(before.state_dict())
    trained: list[nn.Module] = []

    def script(run: DataParallel, mine: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        mine.load_state_dict(model.state_dict())
        optimizer.load_state_dict(before.state_dict())
        for step, _ in enumerate(run.batches(range(1)), start=1):
            run.step(backward(mine, step))
            with pytest.raises(
                UserError, match=naming("optimizer.load_state_dict()", "run.batches()")
            ):
                optimizer.load_state_dict(before.state_dict())
        trained.append(mine)
        optimizer.load_state_dict(before.state_dict())
        assert_equal_states(optimizer.state_dict(), before.state_dict())

    simulated(script, make, tmp_path, "ar-sgd")
    expected, _ = plain(make, 1 + STEPS)
    assert_equal_states(before.state_dict(), before_run)
    for a, b in zip(expected.parameters(), trained[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
