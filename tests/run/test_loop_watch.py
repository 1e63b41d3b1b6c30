"""A custom loop must not replace the parameters that the run has placed in its vector."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.run.loop import LoopWatch
from tests.messages import naming


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.1))
        self.head = nn.Linear(4, 2)
        self.fixed = nn.Linear(2, 2).requires_grad_(False)


def renew_weight(net: Net) -> None:
    net.head.weight.data = net.head.weight.data.clone()


def move(net: Net) -> None:
    net.double().float()


def assign(net: Net) -> None:
    values = {name: value.clone() for name, value in net.state_dict().items()}
    net.load_state_dict(values, assign=True)


def assign_one(net: Net) -> None:
    net.head.bias = nn.Parameter(torch.zeros(2))


def exchange(net: Net) -> None:
    net.head = nn.Linear(4, 5)


def add(net: Net) -> None:
    net.body.append(nn.Linear(4, 4))


def remove(net: Net) -> None:
    net.head.bias = None  # type: ignore[assignment]


@pytest.fixture
def net() -> Net:
    return Net()


@pytest.fixture
def watch(net: Net) -> Iterator[LoopWatch]:
    Replica(net)
    watch = LoopWatch(net)
    yield watch
    watch.close()


@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        (renew_weight, "head.weight", "memory"),
        (move, "body.0.weight", "memory"),
        (assign, "body.0.weight", "replaced"),
        (assign_one, "head.bias", "replaced"),
        (exchange, "head.weight", "replaced"),
        (add, "body.2.weight", "added"),
        (remove, "head.bias", "removed"),
    ],
)
@pytest.mark.parametrize("after", [False, True], ids=["before step", "after step"])
def test_replaced_parameters_are_refused_by_name(
    net: Net, watch: LoopWatch, change: Callable[[Net], None], name: str, what: str, after: bool
) -> None:
    watch.begin()
    if after:
        watch.end()
        change(net)
        watch.begin()
    else:
        change(net)
    with pytest.raises(UserError, match=naming(f"parameter {name} ", what, "assign=True")):
        watch.end()


def test_parameter_values_and_frozen_modules_may_change(net: Net, watch: LoopWatch) -> None:
    watch.begin()
    watch.end()
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})
    net.body[1] = nn.Dropout(0.5)
    net.fixed = nn.Linear(7, 7).requires_grad_(False)
    for _ in range(2):
        watch.begin()
        watch.end()


def clamp(net: Net) -> None:
    with torch.no_grad():
        net.head.weight.clamp_(-0.1, 0.1)


def clamp_data(net: Net) -> None:
    net.head.weight.data.clamp_(-0.1, 0.1)


def set_one_value(net: Net) -> None:
    net.head.weight.data[0, 0] = 0.0


def load(net: Net) -> None:
    net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()})


def copy(net: Net) -> None:
    with torch.no_grad():
        net.head.weight.copy_(torch.zeros(2, 4))


def initialise(net: Net) -> None:
    nn.init.zeros_(net.head.weight)


WRITES = [clamp, clamp_data, set_one_value, load, copy, initialise]


@pytest.mark.parametrize("write", WRITES)
def test_lost_parameter_write_between_steps_is_refused(
    net: Net, write: Callable[[Net], None]
) -> None:
    Replica(net)
    watch = LoopWatch(net, loses_writes="bsp")
    try:
        watch.begin()
        watch.end()
        watch.resume()
        write(net)
        with pytest.raises(
            UserError, match=naming(".weight", "after run.step()", "bsp", "run.project()")
        ):
            watch.resume()
    finally:
        watch.close()


@pytest.mark.parametrize("write", WRITES)
def test_write_between_batch_and_step_is_refused(
    net: Net, watch: LoopWatch, write: Callable[[Net], None]
) -> None:
    watch.begin()
    write(net)
    with pytest.raises(UserError, match=naming(".weight", "between", "step()", "run.project()")):
        watch.end()


def test_frozen_parameters_may_be_written_between_steps(net: Net) -> None:
    Replica(net)
    watch = LoopWatch(net, loses_writes="bsp")
    watch.begin()
    watch.end()
    net.fixed.weight.data.add_(1.0)
    watch.resume()
    watch.begin()
    watch.end()
    watch.close()


def test_parameter_data_is_plain_torch_again_after_close(net: Net, watch: LoopWatch) -> None:
    weight = net.head.weight
    assert weight.data.data_ptr() == weight.data_ptr()
    watch.close()
    before = weight._version
    weight.data.zero_()
    assert weight._version == before


def test_scaled_loss_is_refused_at_its_step(net: Net, watch: LoopWatch) -> None:
    scaler, off = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    scaler.scale(torch.ones(()))  # before the batch
    watch.begin()
    assert off.scale(torch.ones(())) == 1
    watch.end()
    watch.begin()
    assert scaler.scale(torch.ones(())) == 2**16
    with pytest.raises(UserError, match=naming("GradScaler", "run.scale(loss)")):
        watch.end()
